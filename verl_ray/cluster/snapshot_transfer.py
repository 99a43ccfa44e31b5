"""Snapshots on other nodes: what is there, and the way there.

Each function begins a task of Ray on a node, which reads and writes files in /dev/shm
there. The kernel keeps the files, so no process has to live between two tasks, and the
ranks take no part. A task on the target asks one on the source for piece after piece.

Invariant: what counts on the target is whole, and is what counted on the source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from verl_ray.checkpoint.snapshot_files import Memory, SnapshotFiles, SnapshotNames
from verl_ray.cluster.process_control import task_on
from verl_ray.errors import CheckpointError
from verl_ray.ownership import remove_stale
from verl_ray.private_files import shared_folder

Rank = tuple[str, int]
"""A role and the number of one of its ranks."""

_LOOK_S = 0.05

# Pieces that have been read, and wait until they are written.
_NUM_READ_AHEAD = 2


def begin_copy(
    names: SnapshotNames,
    ranks: Sequence[Rank],
    step: int,
    source: str,
    target: str,
    patience_s: float,
    start_s: float,
) -> Any:
    """Begin to copy the snapshots of some ranks from one node to another.

    Args:
        names: Names of the run's snapshots.
        ranks: The ranks.
        step: Step of the snapshots, which may not be whole yet.
        source: Ray's id of the node that has them.
        target: That of the node that gets them.
        patience_s: Longest time in seconds until a snapshot is whole.
        start_s: Longest time in seconds until the process that sends it has started.
            The next piece may take both together.

    Returns:
        A reference to nothing, or to the CheckpointError that ended the copies.
    """
    limits_s = (patience_s, start_s)
    return task_on(target, _copy_here, names, ranks, step, source, *limits_s)


def begin_look(names: SnapshotNames, ranks: Sequence[Rank], node: str) -> Any:
    """Return a reference to the steps of each rank's snapshots on a node, in order."""
    return task_on(node, _steps_here, names, ranks)


def begin_removal(names: SnapshotNames, ranks: Sequence[Rank], node: str) -> Any:
    """Begin to remove all snapshots of these ranks on a node; return a reference."""
    return task_on(node, _remove_here, names, ranks)


# ---------------------------------------------------------------- in tasks on the nodes


def _files(names: SnapshotNames, rank: Rank) -> SnapshotFiles:
    return SnapshotFiles(names.place(*rank), names)


def _copy_here(
    names: SnapshotNames,
    ranks: Sequence[Rank],
    step: int,
    source: str,
    patience_s: float,
    start_s: float,
) -> None:
    # On a node without another process of the run, nobody else does it.
    remove_stale(shared_folder())
    for rank in ranks:
        pieces = _from_node(names, rank, step, source, patience_s, start_s)
        _files(names, rank).oldest().receive(pieces)


def _from_node(
    names: SnapshotNames,
    rank: Rank,
    step: int,
    source: str,
    patience_s: float,
    start_s: float,
) -> Iterator[Memory]:
    """Yield the pieces of a snapshot on another node.

    Raises:
        CheckpointError: The node did not send them.
    """
    sent = task_on(
        source,
        _send,
        names,
        rank,
        step,
        patience_s,
        num_returns="streaming",
        _generator_backpressure_num_objects=_NUM_READ_AHEAD,
    )
    # The process of the source has to start. It then waits until the snapshot is whole.
    limit_s = start_s + patience_s
    while True:
        try:
            if not ray.wait([sent], timeout=limit_s)[0]:
                raise CheckpointError(f"no piece of it has come for {limit_s:g} s")
            piece = ray.get(next(sent), timeout=limit_s)
        except StopIteration:
            return
        except ray.exceptions.RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise CheckpointError(
                f"the node that has the snapshot of {rank[0]} rank {rank[1]} did not"
                f" send it: {reason}"
            ) from None
        yield piece


def _send(
    names: SnapshotNames, rank: Rank, step: int, patience_s: float
) -> Iterator[Memory]:
    """Wait until there is a whole snapshot of a step, and yield its pieces."""
    files = _files(names, rank)
    deadline_s = time.monotonic() + patience_s
    while step not in files.steps():
        if time.monotonic() > deadline_s:
            raise CheckpointError(f"there is none of step {step}")
        time.sleep(_LOOK_S)
    yield from files.of(step).pieces()


def _steps_here(names: SnapshotNames, ranks: Sequence[Rank]) -> list[list[int]]:
    return [_files(names, rank).steps() for rank in ranks]


def _remove_here(names: SnapshotNames, ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        _files(names, rank).remove()
