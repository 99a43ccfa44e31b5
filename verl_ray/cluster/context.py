"""Knowledge of a worker's class about the process that hosts it (`host.py`).

A worker is built with a context, and marks on its methods put these in concurrency
groups. Ray gives each concurrency group of an actor its own threads. Calls in different
groups therefore never wait for each other.

Invariant: a context holds plain values only. A method without a mark runs in the
collective group, one call after another. This module imports neither Ray nor torch, so
a worker can be built in a unit test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkerContext:
    """First argument of a worker's factory.

    Attributes:
        role: Role of the worker.
        rank: Rank of the worker, in [0, num_ranks).
        num_ranks: Number of ranks of the role.
        device: "cpu", or "cuda:0" as the only device that this process can see.
        process_group: True if torch.distributed is initialised over the ranks of the
            role.
        threads: Number of CPU threads that this process may use.
        log_path: File that holds this process's output.
        incarnation: 1 at first, plus one for each restart.
    """

    role: str
    rank: int
    num_ranks: int
    device: str
    process_group: bool
    threads: int
    log_path: Path
    incarnation: int


# ------------------------------------------------------------------- concurrency groups

COLLECTIVE = "collective"
SERVING = "serving"
STEERING = "steering"
CONTROL = "control"

# A serving call holds its thread until it returns. Steering calls direct the serving
# ones and must not wait for a thread of theirs, so they have threads of their own. All
# together are fewer than 100: of more, Python writes no stacks when a process hangs.
CONCURRENCY_GROUPS = {COLLECTIVE: 1, SERVING: 64, STEERING: 4, CONTROL: 1}
"""Number of threads of each concurrency group."""

this_thread = threading.local()
"""State of the calling thread; `stream_state` is set while it runs a stream."""


@dataclass(eq=False)
class StreamState:
    """State of one running generator method, shared with the thread that stops it."""

    concurrency_group: str
    abandoned: bool = False
    """True once the caller no longer consumes the stream."""
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call once the stream is abandoned."""


def concurrent(method: M) -> M:
    """Mark a worker's method that may run at the same time as any other method."""
    method.concurrency_group = SERVING  # type: ignore[attr-defined]
    return method


def steering(method: M) -> M:
    """Mark a worker's method that directs its concurrent methods.

    A steering call never waits for a concurrent call to begin.
    """
    method.concurrency_group = STEERING  # type: ignore[attr-defined]
    return method


def when_abandoned(callback: Callable[[], None]) -> None:
    """Register a callback for the moment when the caller abandons the running stream.

    Call it within a generator method. The callback runs on another thread, or at once
    if the stream is already abandoned. Without a running stream it is ignored.
    """
    state: StreamState | None = getattr(this_thread, "stream_state", None)
    if state is None:
        return

    state.callbacks.append(callback)
    # `abandon_stream` may have run its callbacks before this one was registered.
    if state.abandoned:
        callback()


def concurrency_group_of(method: Callable[..., Any]) -> str:
    """Name of the concurrency group that a worker's method runs in."""
    return getattr(method, "concurrency_group", COLLECTIVE)
