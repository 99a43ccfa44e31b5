"""Rows into and out of Ray's object store.

Invariant: `read` returns a read-only view of the stored bytes wherever the rows are
neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import ray

from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, wait
from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError
from verl_ray.profiling.progress import advance

B = TypeVar("B", bound=Batch)


def put(batch: B) -> Sharded[B]:
    """Store a batch on this node and return the reference to all of its rows.

    Raises:
        ClusterError: The cluster is lost, or Ray hangs.
    """
    reference = RAY_CALLS.make(ray.put, batch)
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
            return cast(list[B], _get(parts, stall_s))
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
    waited_before_asking_s = TICK_S

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

        # Rarely, since an owner replies only once the object exists.
        if time.monotonic() - last_arrival > waited_before_asking_s:
            RAY_CALLS.make(_ask_owners, references)
            waited_before_asking_s *= 2


def _get(references: Sequence[Any], stall_s: float) -> list[Any]:
    """Return stored objects that have arrived on this node."""
    began_s = time.monotonic()

    # One round is enough, unless Ray has forgotten an object.
    while True:
        try:
            objects: list[Any] = RAY_CALLS.make(
                ray.get, list(references), timeout=TICK_S
            )
            return objects
        except ray.exceptions.GetTimeoutError:
            heed_signals()
            if time.monotonic() - began_s > stall_s:
                raise ClusterError(
                    "stored objects have arrived on this node, but cannot be read:"
                    f" Ray has waited for them for {stall_s:g} s (run.stall_s)"
                ) from None
            RAY_CALLS.make(_ask_owners, references)


def _ask_owners(references: Sequence[Any]) -> None:
    """Let Ray ask the owners of stored objects again where these are.

    When a thread drops the last reference of a process to an object, Ray forgets where
    the object is. If another thread received a reference in that moment, what Ray
    learned for it is forgotten, too, and `ray.get` waits for ever.
    """
    worker = ray._private.worker.global_worker.core_worker
    for reference in references:
        _, owner, status = worker.serialize_object_ref(reference)
        worker.deserialize_and_register_object_ref(
            reference.binary(), ray.ObjectRef.nil(), owner, status
        )
