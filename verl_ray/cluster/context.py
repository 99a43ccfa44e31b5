"""The context that a worker is built with.

Invariant: a context holds plain values only. This module imports neither Ray nor
torch, so a worker can be built in a unit test. Deliberately not here: the process that
hosts a worker (`host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
