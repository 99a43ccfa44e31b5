"""Rows into and out of Ray's object store.

Invariant: what is read is a read-only view of the stored bytes wherever rows are neighbours. Deliberately not here:
which rows are read (`verl_ray/data/sharded.py`).
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
    return Sharded.stored(ray.put(batch), Receipt.of(batch))


def read(rows: Sharded[B], stall_s: float) -> B:
    """The rows themselves. Raises ClusterError when none of the stored objects arrives for `stall_s` seconds, or when
    one is lost."""

    def fetch(parts: Sequence[Any]) -> Sequence[B]:
        try:
            _arrive(list(dict.fromkeys(parts)), stall_s, f"{len(rows)} rows of {rows.stage.__name__}")
            return cast(list[B], ray.get(list(parts)))
        except ray.exceptions.ObjectLostError as error:
            raise ClusterError(
                f"rows of {rows.stage.__name__} are lost with the process that held them: {error}"
            ) from None

    return rows.read(fetch)


def _arrive(parts: Sequence[Any], stall_s: float, what: str) -> None:
    """Until all of the stored objects are on this node; each that arrives is progress."""
    arrived, moved = 0, time.monotonic()
    while True:
        there = len(wait(parts, len(parts), min(stall_s, TICK_S)))
        if there > arrived:
            advance(there - arrived, "stored objects")
            arrived, moved = there, time.monotonic()
        if arrived == len(parts):
            return
        if time.monotonic() - moved > stall_s:
            raise ClusterError(
                f"{what} lie in {len(parts)} stored objects, of which {arrived} have arrived and none in the last "
                f"{stall_s:g} s (run.stall_s)"
            )
