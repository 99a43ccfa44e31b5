"""Words between a worker's class, its process (`host.py`), and the driver.

A worker is built with a context, and marks on its methods put these in concurrency
groups. Ray gives each concurrency group of an actor its own threads. Calls in different
groups therefore never wait for each other. Messages go between the driver and a worker
process, besides rows.

Invariant: contexts and messages are plain values, and messages survive pickling. A
method without a mark runs in the collective group, one call after another. This module
imports neither Ray nor torch, so a worker can be built in a unit test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl_ray.columns.sharded import Receipt
from verl_ray.errors import VerlRayError
from verl_ray.ownership import Owner
from verl_ray.profiling.progress import Progress

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkerContext:
    """First argument of a worker's factory.

    Attributes:
        role: Role of the worker.
        rank: Rank of the worker, in [0, num_ranks).
        num_ranks: Number of ranks of the role.
        device: "cpu", or "cuda:0": the only device that this process can see, or the
            first of those that it can see.
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


# ----------------------------------------------------------------------------- messages

PEER_TIMEOUT_FRACTION = 0.8
"""Fraction of `run.stall_s` for which a worker waits for its peers.

It is below 1 so that the worker can report which peer did not come before the driver
reports the worker itself as stalled.
"""


@dataclass(frozen=True)
class RankSpec:
    """Identity and settings of one process: rank `rank` of its process set.

    Attributes:
        processes: Name of the process set.
        rank: Number of the process in its set.
        num_ranks: Number of ranks that live and die together with this one.
        device: "cpu", or "cuda:0": the only device that the process sees, or the first
            of those that it sees.
        threads: Number of CPU threads that the process may use.
        process_group: True if the ranks form a torch.distributed process group.
        log_dir: Directory for the output of the process.
        incarnation: 1 at first, plus one for each restart.
        notes_spans: Whether the process notes spans for a trace.
    """

    processes: str
    rank: int
    num_ranks: int
    device: str
    threads: int
    process_group: bool
    log_dir: str
    incarnation: int
    notes_spans: bool = False


@dataclass(frozen=True)
class ProcessInfo:
    """Location of a running process and of its log.

    Attributes:
        owner: The process. A later one with the same id is another owner.
        node_id: Ray's id of the node.
        address: IP address of the node.
        host_name: Host name of the node.
        log_path: Path of the process's log on its node.
        gpus: Ids of the GPUs of its node that Ray has given to the process.
    """

    owner: Owner
    node_id: str
    address: str
    host_name: str
    log_path: str
    gpus: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """Process id on its node."""
        return self.owner.pid

    @property
    def node(self) -> str:
        """Name of the node for messages: host name and address."""
        return f"{self.host_name} ({self.address})"


@dataclass(frozen=True)
class CallRequest:
    """One call of one method.

    The process replaces `Sharded` arguments by the batches that they refer to.

    Attributes:
        role: Role whose worker is called.
        incarnation: Incarnation of the process that the call is meant for.
        method: Name of the method.
        args: Positional arguments.
        kwargs: Keyword arguments.
        patience_s: Seconds that the process waits for the rows of its arguments.
        concurrency_group: Concurrency group that the method runs in.
    """

    role: str
    incarnation: int
    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    patience_s: float
    concurrency_group: str


@dataclass(frozen=True)
class Value:
    """Return value of a method that is not a batch."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Exception that a worker raised.

    A defect carries its stack and the last output of the process. An error that this
    project raises on purpose explains itself; its stack is in the process's log.

    Attributes:
        message: Type and text of the exception.
        trace: Stack of the exception; empty for an error raised on purpose.
        output: Last output of the process; empty for an error raised on purpose.
        error: The exception itself if it is an error of this project, else None.
    """

    message: str
    trace: str
    output: str
    error: VerlRayError | None


Reply = Receipt[Any] | Value | Failure | None
"""Reply of one rank to a call; None if another rank replies for the same rows."""


@dataclass(frozen=True)
class Status:
    """Present activity of a process.

    Attributes:
        running: (role, method, seconds so far) of the call in the collective group;
            None while that group is idle.
        progress: Progress of the process in any concurrency group.
        health: Results of the `health` methods of its workers, by role.
    """

    running: tuple[str, str, float] | None
    progress: Progress
    health: dict[str, Any]


@dataclass(frozen=True)
class Collective:
    """A collective of torch.distributed that a process has entered and not left.

    Attributes:
        operation: Backend and operation: "gloo:all_reduce".
        group: Name of the process group.
        sequence: Number of the operation in its group.
        ranks: Ranks of the group, as numbered in the process set.
        seconds: Seconds since the process entered it.
    """

    operation: str
    group: str
    sequence: int
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Whereabouts:
    """The place in its work at which a process is.

    Attributes:
        running: (role, method, seconds so far) of the call in the collective group, or
            else of the oldest other call; None while there is none.
        progress: Progress of the process in any concurrency group.
        line: Innermost line of our own code in the thread of this call: "file:line
            function"; empty without a call.
        collective: The oldest collective that the process is in, if any.
        entered: Number of the last collective that it has entered, by process group.
    """

    running: tuple[str, str, float] | None
    progress: Progress
    line: str
    collective: Collective | None
    entered: dict[str, int]
