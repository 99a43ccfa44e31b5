"""Where the time of a step goes, as the driver sees it.

Invariant: a name's time is the length of the union of its spans, so nested and overlapping spans of one name (the
reward running beside generation, calls in flight together) never count a second twice. Not a profiler: it times what
the driver names, and belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP = "step"


class Timers:
    """Collects `timing_s/<name>` of one step at a time.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: dict[str, _Union] = {}
        self._waits = _Union()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside towards `timing_s/<name>`, also when it ends in an exception."""
        span = self._spans.setdefault(name, _Union())
        span.enter(self._clock())
        try:
            yield
        finally:
            span.leave(self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside goes to others: the driver waits for workers. Counts only within the `step` span."""
        step = self._spans.get(STEP)
        if step is None or not step.is_open:
            yield
            return
        self._waits.enter(self._clock())
        try:
            yield
        finally:
            self._waits.leave(self._clock())

    def take(self) -> dict[str, float]:
        """What was collected since the last call, in seconds, and forget it; every span must have ended.

        Holds `timing_s/<name>` of every name and, where there was a `step` span, `timing_s/controller`: the driver's
        own share, which is the step without the time spent waiting.
        """
        still_open = [name for name, span in self._spans.items() if span.is_open]
        assert not still_open, f"spans still open: {still_open}"
        taken = {f"timing_s/{name}": span.total_s for name, span in self._spans.items()}
        if STEP in self._spans:
            taken["timing_s/controller"] = self._spans[STEP].total_s - self._waits.total_s
        self._spans, self._waits = {}, _Union()
        return taken


class _Union:
    """The length of the union of spans."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._since_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def enter(self, now_s: float) -> None:
        if self._depth == 0:
            self._since_s = now_s
        self._depth += 1

    def leave(self, now_s: float) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.total_s += now_s - self._since_s
