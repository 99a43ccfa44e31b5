"""Rows into and out of Ray's object store.

Invariant: `read` returns a read-only view of the stored bytes wherever the rows are
neighbours. Deliberately not here: the choice of rows (`verl_ray/data/sharded.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import ray

from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError
from verl_ray.profiling.progress import advance

B = TypeVar("B", bound=Batch)


def put(batch: B) -> Sharded[B]:
    """Store a batch on this node and return the reference to all of its rows."""
    reference = ray.put(batch)
    return Sharded.stored(reference, Receipt.of(batch))


def read(rows: Sharded[B], stall_s: float) -> B:
    """Batch with the rows themselves.

    Args:
        rows: References to the rows.
        stall_s: Limit in seconds without the arrival of another stored object.

    Raises:
        ClusterError: No stored object arrived for `stall_s` seconds, or one is lost.
    """
    stage = rows.stage.__name__

    def fetch(parts: Sequence[Any]) -> Sequence[B]:
        # Several parts may lie in one object, and `wait` takes no duplicates.
        objects = list(dict.fromkeys(parts))
        try:
            _wait_for_arrival(objects, stall_s, f"{len(rows)} rows of {stage}")
            return cast(list[B], ray.get(list(parts)))
        except ray.exceptions.ObjectLostError as error:
            raise ClusterError(
                f"rows of {stage} are lost with the process that held them: {error}"
            ) from None

    return rows.read(fetch)


def _wait_for_arrival(
    references: Sequence[Any], stall_s: float, description: str
) -> None:
    """Wait until all stored objects are on this node; each arrival is progress."""
    num_arrived = 0
    last_arrival = time.monotonic()

    # Waits for the next arrival in slices of at most half a second. Ends when all
    # objects have arrived, or when none has for `stall_s` seconds.
    while True:
        ready = wait(references, len(references), min(stall_s, TICK_S))
        if len(ready) > num_arrived:
            advance(len(ready) - num_arrived, "stored objects")
            num_arrived = len(ready)
            last_arrival = time.monotonic()

        if num_arrived == len(references):
            return
        if time.monotonic() - last_arrival > stall_s:
            raise ClusterError(
                f"{description} lie in {len(references)} stored objects, of which"
                f" {num_arrived} have arrived and none in the last {stall_s:g} s"
                " (run.stall_s)"
            )
