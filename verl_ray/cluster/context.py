"""What a worker is told when it is built.

Invariant: plain values only; this module knows neither Ray nor torch, so a worker can be built in a unit test.
Deliberately not here: the process that hosts a worker (`host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerContext:
    """Handed to a worker's factory as its first argument."""

    role: str
    rank: int  # in [0, num_ranks)
    num_ranks: int
    device: str  # "cpu", or "cuda:0": the one device that this process can see
    process_group: bool  # torch.distributed is initialised over the ranks of this role
    threads: int  # CPU threads this process may use
    log_path: Path  # where this process's output is kept
    incarnation: int  # 1 at first; one more after each restart
