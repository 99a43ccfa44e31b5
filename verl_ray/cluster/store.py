"""Rows into and out of Ray's object store.

Invariant: what is read is a read-only view of the stored bytes wherever rows are neighbours. Deliberately not here:
which rows are read (`verl_ray/data/sharded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import ray

from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError

B = TypeVar("B", bound=Batch)


def put(batch: B) -> Sharded[B]:
    """Store a batch on this node and return the reference to all of its rows."""
    return Sharded.stored(ray.put(batch), Receipt.of(batch))


def read(rows: Sharded[B], deadline_s: float) -> B:
    """The rows themselves. Raises ClusterError when they do not arrive in `deadline_s` seconds or are lost."""

    def fetch(parts: Sequence[Any]) -> Sequence[B]:
        try:
            return cast(list[B], ray.get(list(parts), timeout=deadline_s))
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(
                f"{len(rows)} rows of {rows.stage.__name__} did not arrive within {deadline_s:g} s; they lie in "
                f"{len(parts)} stored objects (run.call_deadline_s is the limit)"
            ) from None
        except ray.exceptions.ObjectLostError as error:
            raise ClusterError(
                f"rows of {rows.stage.__name__} are lost with the process that held them: {error}"
            ) from None

    return rows.read(fetch)
