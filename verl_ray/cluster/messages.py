"""What travels between the driver and a worker process, besides rows.

Invariant: plain values that survive pickling. Deliberately not here: rows (`verl_ray/data`), and who sends what
(`group.py`, `host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_ray.data.sharded import Receipt
from verl_ray.errors import VerlRayError
from verl_ray.profiling.progress import Progress

PATIENCE = 0.8
"""Of run.stall_s: so long a worker waits for others, so that it can say who did not come before it is named itself."""


@dataclass(frozen=True)
class Seat:
    """Which process this is: rank `rank` of the process set `processes`, of which `num_ranks` live and die together."""

    processes: str
    rank: int
    num_ranks: int
    device: str
    threads: int
    process_group: bool
    log_dir: str
    incarnation: int


@dataclass(frozen=True)
class Facts:
    """Where a process runs and where its output is kept."""

    pid: int
    started: float  # seconds since the epoch; with pid, tells it from a later process of the same number
    node_id: str
    address: str
    host_name: str
    log_path: str

    @property
    def node(self) -> str:
        return f"{self.host_name} ({self.address})"


@dataclass(frozen=True)
class Request:
    """One call of one method. `Sharded` arguments arrive at the method as plain batches."""

    role: str
    incarnation: int
    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    patience_s: float
    """How long it waits for the rows to come."""
    lane: str


@dataclass(frozen=True)
class Value:
    """What a method returned that is not a batch."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """An exception of a worker."""

    what: str
    trace: str
    """Its stack, and the last of what the process wrote: of a defect. What this project raises on purpose says itself
    what is wrong, and the stack is in the process's log."""
    output: str
    error: VerlRayError | None
    """The exception itself, where it is one of these."""


Reply = Receipt[Any] | Value | Failure | None  # None: a rank that does not answer for its rows


@dataclass(frozen=True)
class Status:
    """What the collective lane is doing: (role, method, seconds so far), or None when it is idle; how far the process
    is with whatever it does on any lane; and what workers that have a `health` say of themselves, by role."""

    pid: int
    resident_bytes: int
    running: tuple[str, str, float] | None
    progress: Progress
    health: dict[str, Any]
