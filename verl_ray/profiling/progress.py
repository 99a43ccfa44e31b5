"""What this process has done of its present work, and when it last got on with it.

Workers count rows, micro-batches, tokens or bytes where they do them; whoever watches the process reads the counts from
another thread, also while the work is stuck. Each thread counts for itself, so counting takes no lock, and it never
waits for a device. Measured: 0.2 microseconds per count.

Invariant: every count moves the process's clock, and nothing else does. Deliberately not here: how long a process may
stand still, and what happens then (`verl_ray/cluster/heartbeat.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What a process says of its work."""

    done: int
    """How much of the work that got on last is done."""
    total: int | None
    """Of how much; None where nobody knows beforehand."""
    unit: str
    """What is counted; empty while nothing has been counted since the work began."""
    idle_s: float
    """Seconds since the process last got on with anything."""
    waits_for_others: bool
    """Whether it says that it waits for another process: then what holds it up may be there."""

    def __str__(self) -> str:
        if not self.unit:
            return "nothing"
        return f"{self.done} {self.unit}" if self.total is None else f"{self.done} of {self.total} {self.unit}"


@dataclass
class _Work:
    """What one thread does."""

    moved: float
    done: int = 0
    total: int | None = None
    unit: str = ""


_imported = time.monotonic()

_works: dict[int, _Work] = {}
"""By thread. Those of threads that have ended stay until the number is used again; they are few."""

_waits: list[None] = []
"""One entry per thread that waits for another process: appending and removing take no lock."""


def begin() -> None:
    """This thread begins with something else: what it has counted so far belongs to what it did before."""
    _works[threading.get_ident()] = _Work(time.monotonic())


def touch() -> None:
    """This thread got on, with nothing to count."""
    _own().moved = time.monotonic()


def advance(count: int, unit: str) -> None:
    """This thread has done so many more."""
    work = _own()
    if work.unit != unit:
        work.done, work.total, work.unit = 0, None, unit
    work.done += count
    work.moved = time.monotonic()


def reach(done: int, total: int, unit: str) -> None:
    """This thread has done so many of so many."""
    work = _own()
    work.done, work.total, work.unit = done, total, unit
    work.moved = time.monotonic()


@contextlib.contextmanager
def waiting_for_others() -> Iterator[None]:
    """While this thread waits for another process, which may be the one that is stuck."""
    _waits.append(None)
    try:
        yield
    finally:
        _waits.pop()


def progress() -> Progress:
    """How far this process is; from any thread, at once."""
    last = max(_works.copy().values(), key=lambda work: work.moved, default=_Work(_imported))
    return Progress(last.done, last.total, last.unit, max(0.0, time.monotonic() - last.moved), bool(_waits))


def _own() -> _Work:
    own = threading.get_ident()
    work = _works.get(own)
    if work is None:
        work = _works[own] = _Work(time.monotonic())
    return work
