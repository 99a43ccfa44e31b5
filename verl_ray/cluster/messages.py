"""Messages between the driver and a worker process, besides rows.

Invariant: every message is a plain value that survives pickling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_ray.data.sharded import Receipt
from verl_ray.errors import VerlRayError
from verl_ray.profiling.progress import Progress

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
        device: "cpu", or "cuda:0" as the only device that the process sees.
        threads: Number of CPU threads that the process may use.
        process_group: True if the ranks form a torch.distributed process group.
        log_dir: Directory for the output of the process.
        incarnation: 1 at first, plus one for each restart.
    """

    processes: str
    rank: int
    num_ranks: int
    device: str
    threads: int
    process_group: bool
    log_dir: str
    incarnation: int


@dataclass(frozen=True)
class ProcessInfo:
    """Location of a running process and of its log.

    Attributes:
        pid: Process id on its node.
        started: Start of the process in seconds since the epoch. Together with `pid`
            it distinguishes the process from a later one with the same id.
        node_id: Ray's id of the node.
        address: IP address of the node.
        host_name: Host name of the node.
        log_path: Path of the process's log on its node.
    """

    pid: int
    started: float
    node_id: str
    address: str
    host_name: str
    log_path: str

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
