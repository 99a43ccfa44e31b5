"""Waiting for references of Ray, such that the driver still obeys its user.

Invariant: every wait heeds signals at least every half second. One of Ray's compiled
calls may have swallowed the exception of a signal, or may keep the signal's handler
from running. Not for the release of resources, which continues after a signal. A wait
that is long also says what the run is doing (`verl_ray/profiling/phases.py`).
Deliberately not here: how long anything may take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import ray

from verl_ray.cluster.cluster_loss import CLUSTER_LOSS
from verl_ray.cluster.ray_calls import LOOK_S, RAY_CALLS
from verl_ray.cluster.signals import heed_signals
from verl_ray.profiling.phases import PHASES

TICK_S = LOOK_S
"""Longest time in seconds between two looks at signals."""


class Background(Protocol):
    """Work of the driver that continues while the driver waits for something else.

    Both methods return at once.
    """

    def references(self) -> Sequence[Any]:
        """References that the work waits for; it can be advanced once one is ready."""

    def advance(self) -> None:
        """Receive what is ready, and begin what comes next."""


def wait(references: Sequence[Any], count: int, timeout_s: float) -> list[Any]:
    """Wait until `count` of the references are ready, at most `timeout_s` seconds.

    Args:
        references: References without duplicates.
        count: Number of references to wait for.
        timeout_s: Limit in seconds.

    Returns:
        The references that are ready: at least `count`, or fewer at the limit.

    Raises:
        Interrupted: The run was stopped by a signal.
        ClusterError: The cluster is lost, or Ray hangs.
    """
    deadline = time.monotonic() + timeout_s

    # Waits for the references in slices of at most half a second, and heeds signals
    # after each. Ends when enough references are ready, or after the last slice.
    while True:
        remaining_s = deadline - time.monotonic()
        slice_s = min(max(remaining_s, 0.0), TICK_S)
        ready: list[Any]
        ready, _ = RAY_CALLS.make(
            ray.wait, list(references), num_returns=count, timeout=slice_s
        )
        heed_signals()
        CLUSTER_LOSS.raise_if_lost()
        PHASES.tick()
        if len(ready) >= count or remaining_s <= TICK_S:
            return ready


def wait_while_closing(references: Sequence[Any], timeout_s: float) -> None:
    """Wait until all references are ready, at most `timeout_s` seconds.

    A signal does not end the wait, since closing continues after one. Neither does a
    lost cluster.
    """
    count = len(references)
    RAY_CALLS.attempt(
        2 * timeout_s, ray.wait, list(references), num_returns=count, timeout=timeout_s
    )
