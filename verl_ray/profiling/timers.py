"""Times of the phases of a step, as the driver measures them.

Invariant: the time of a name is the length of the union of its spans. Nested and
overlapping spans of one name (the reward during generation, calls in flight together)
therefore never count a second twice. Not a profiler: it times what the driver names,
and belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP = "step"


class Timers:
    """Collects `timing_s/<name>` of one step at a time.

    Args:
        clock: Function that returns a rising number of seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: dict[str, _Union] = {}
        self._waits = _Union()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `timing_s/<name>`.

        The time counts also if the block ends in an exception.
        """
        span = self._spans.setdefault(name, _Union())
        span.enter(self._clock())
        try:
            yield
        finally:
            span.leave(self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as spent on waiting for workers.

        The block counts only within the `step` span.
        """
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
        """Return the times since the last call, in seconds, and start anew.

        Every span must have ended.

        Returns:
            `timing_s/<name>` of every name. If there was a `step` span, the dictionary
            also holds `timing_s/controller`: the driver's own share of the step,
            without the time spent waiting.
        """
        still_open = [name for name, span in self._spans.items() if span.is_open]
        assert not still_open, f"spans still open: {still_open}"

        times = {f"timing_s/{name}": span.total_s for name, span in self._spans.items()}
        if STEP in self._spans:
            step_s = self._spans[STEP].total_s
            times["timing_s/controller"] = step_s - self._waits.total_s

        self._spans = {}
        self._waits = _Union()
        return times


class _Union:
    """Length of the union of spans, which may be nested or overlap."""

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
