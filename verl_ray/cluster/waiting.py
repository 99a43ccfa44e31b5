"""Waiting for what Ray brings, so that the driver stays its user's.

Invariant: no wait lasts longer than half a second before it heeds signals: one of Ray's compiled calls may have
swallowed the exception of a signal, or be in the way of its handler. Not for giving things back, which goes on after a
signal. Deliberately not here: how long anything may take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import ray

from verl_ray.cluster.signals import heed_signals

TICK_S = 0.5


class Background(Protocol):
    """Work of the driver that goes on while it waits for something else. Both methods return at once."""

    def references(self) -> Sequence[Any]:
        """What the work waits for: when one of these is there, it can be advanced."""

    def advance(self) -> None:
        """Take what is there, and begin what comes next."""


def wait(references: Sequence[Any], count: int, timeout_s: float) -> list[Any]:
    """Those of the references (no two alike) that are there: at least `count`, or all that came within `timeout_s`.

    Raises:
        Interrupted: the run was asked to stop.
    """
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        ready: list[Any]
        ready, _ = ray.wait(list(references), num_returns=count, timeout=min(max(left_s, 0.0), TICK_S))
        heed_signals()
        if len(ready) >= count or left_s <= TICK_S:
            return ready
