"""The lanes of a worker process, and the marks that put a method on one.

Invariant: a method without a mark runs on the collective lane, one call after another. Deliberately not here: the
threads (`host.py`), and who calls (`group.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

COLLECTIVE, SERVING, STEERING, CONTROL = "collective", "serving", "steering", "control"
LANES = {COLLECTIVE: 1, SERVING: 64, STEERING: 4, CONTROL: 1}
"""Threads of each lane. A call that is served holds one until it ends; what steers those must not wait for one."""

M = TypeVar("M", bound=Callable[..., Any])


def concurrent(method: M) -> M:
    """Mark a worker's method that may run beside any other."""
    method.lane = SERVING  # type: ignore[attr-defined]
    return method


def steering(method: M) -> M:
    """Mark a worker's method that tells its concurrent ones what to do: it never waits for one of them to begin."""
    method.lane = STEERING  # type: ignore[attr-defined]
    return method


def when_nobody_listens(act: Callable[[], None]) -> None:
    """In a generator method: what to do, on another thread, when its caller no longer wants what it yields."""
    listening: Listening | None = getattr(this_thread, "listening", None)
    if listening is not None:
        listening.acts.append(act)
        if listening.gone:
            act()


@dataclass(eq=False)
class Listening:
    """Who listens to what a generator method yields: whether they have gone, and what is done then."""

    lane: str
    gone: bool = False
    acts: list[Callable[[], None]] = field(default_factory=list)


this_thread = threading.local()


def lane_of(method: Callable[..., Any]) -> str:
    """The lane that a worker's method runs on."""
    return getattr(method, "lane", COLLECTIVE)
