"""Phases of the driver's work, told where nothing else is, and the times of a step's.

A phase is announced where it begins (`phase`), and may be a part of another one. Every
wait of the driver ticks (`verl_ray/cluster/waiting.py`), so there is no thread, except
around calls of libraries that wait themselves (`blocking`). After
ten seconds without news a line on stderr says where the run is, and then after 20, 40
and every 60 more. A live block on a terminal shows the phase instead (`shown_live`). A
block that knows how much of its work is done counts it (`OpenPhase.reach`).

Invariant: text is made only when it is shown, in the thread of the driver; a count may
be read in any thread. A phase changes nothing that the run computes. The time of a name
(`Timers`) is the length of the union of its spans. Nested and overlapping spans of one
name (the reward during generation, calls in flight together) therefore never count a
second twice. Not a profiler: it times what the driver names, and belongs to one thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verl_ray.profiling.trace import span

FIRST_S = 10.0
"""Seconds without news after which a phase says where it is."""
LONGEST_S = 60.0
"""Longest time in seconds between two reports."""

_LIVE_S = 5.0
"""Seconds between two texts of a phase that a live block shows."""
_SOON_S = 1.5
"""Seconds before a report in which its details are requested."""

_KIB = 1 << 10
_MIB = 1 << 20

Text = str | Callable[[], str]
"""A text, or a function that returns the text of this moment."""


@dataclass(frozen=True)
class Count:
    """How much of some work is done, such as 12 of 256 responses."""

    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        if not self.unit.startswith("bytes"):
            return f"{self.done}/{self.total} {self.unit}"
        rest = self.unit.removeprefix("bytes")
        size, name = (_MIB, "MiB") if self.total >= _MIB else (_KIB, "KiB")
        return f"{self.done // size}/{self.total // size} {name}{rest}"


@dataclass(frozen=True)
class Doing:
    """Work of a process at a moment.

    Attributes:
        text: Its open phases: "step 3/200: updating"; empty without a phase.
        count: How much is done of the outermost phase that counts; None if none does.
        seconds: Seconds since the innermost phase began; None without a phase.
    """

    text: str
    count: Count | None
    seconds: float | None


NOTHING = Doing("", None, None)
"""What a process does that has no open phase."""


@dataclass
class OpenPhase:
    """A phase that is open."""

    text: Text
    began_s: float
    reports: int = 0

    reports_at_request: int = 0
    """Number of its reports when details for the next one were requested."""

    count: Count | None = None
    """How much of it is done, as its block says."""

    live: Doing | None = None
    """Text and count as a live block shows them."""

    def reach(self, done: int, total: int, unit: str) -> None:
        """Note that `done` of `total` units of this phase are done."""
        self.count = Count(done, total, unit)


class Phases:
    """The open phases of a process, the innermost last."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a phase.

        Args:
            write: Function that shows a report.
            clock: Clock in seconds that only increases.
        """
        self._write = write
        self._clock = clock
        self._phases: list[OpenPhase] = []
        self._details: list[tuple[Callable[[], str], Callable[[], Count | None]]] = []
        self._news_s = clock()
        self.is_shown_live = False
        """Whether somebody shows what `glance` returns."""
        # Making a text may wait for a moment, and every wait ticks.
        self._is_reporting = False

    @contextlib.contextmanager
    def phase(self, text: Text) -> Iterator[OpenPhase]:
        """Announce that this block is a phase, a part of the one that is open."""
        now_s = self._clock()
        if not self._phases:
            self._news_s = now_s
        phase = OpenPhase(text, now_s)
        self._phases.append(phase)
        # A text of the moment names no span; what is timed in such a phase has names.
        noting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(text, str):
            noting = span(text, "phase")
        try:
            with noting:
                yield phase
        finally:
            self._phases.pop()

    @contextlib.contextmanager
    def detail(
        self,
        text: Callable[[], str],
        count: Callable[[], Count | None] = lambda: None,
    ) -> Iterator[None]:
        """Add a text in brackets to the reports of this block; empty for none.

        Args:
            text: Function that returns the text of this moment.
            count: Function that returns how much of the block's work is done. It counts
                where no open phase does.
        """
        self._details.append((text, count))
        try:
            yield
        finally:
            self._details.pop()

    @contextlib.contextmanager
    def shown_live(self) -> Iterator[None]:
        """Print no reports within the block: somebody shows what `glance` returns."""
        before = self.is_shown_live
        self.is_shown_live = True
        try:
            yield
        finally:
            self.is_shown_live = before

    def needs_details(self) -> bool:
        """Return whether to request details now: a report is due within a moment.

        A live block shows a text every few seconds. Its details are requested once for
        each, and for the first one, which is shown at once, not at all.
        """
        if not self._phases or self._remaining_s() > _SOON_S:
            return False
        phase = self._phases[-1]
        if self.is_shown_live and phase.reports_at_request == phase.reports:
            return False
        phase.reports_at_request = phase.reports
        return True

    def glance(self) -> Doing:
        """Return what the process does; any thread may ask.

        Texts that are functions belong to the driver's thread. They are left out, but
        for what was made of them for a live block.
        """
        phases = list(self._phases)
        if not phases:
            return NOTHING
        innermost = phases[-1]
        counts = [phase.count for phase in phases]
        texts = [phase.text for phase in phases if isinstance(phase.text, str)]
        text = ": ".join(texts)
        if innermost.live is not None:
            text = innermost.live.text
            counts.append(innermost.live.count)
        return Doing(text, _outermost(counts), self._clock() - innermost.began_s)

    def tick(self) -> None:
        """Report where the run is, if that is due."""
        if not self._phases or self._is_reporting or self._remaining_s() > 0:
            return

        self._is_reporting = True
        try:
            text = self._text()
            counts = [count() for _, count in self._details]
        finally:
            self._is_reporting = False
        phase = self._phases[-1]
        phase.reports += 1
        self._news_s = self._clock()
        elapsed_s = self._news_s - phase.began_s
        if self.is_shown_live:
            phase.live = Doing(text, _outermost(counts), elapsed_s)
            return
        # A phase that has just begun is not what took so long.
        self._write(f"{text} [{elapsed_s:.0f} s]" if elapsed_s >= FIRST_S else text)

    def _remaining_s(self) -> float:
        phase = self._phases[-1]
        if self.is_shown_live:
            # The first tick of a phase shows it.
            interval_s = _LIVE_S if phase.reports else 0.0
        else:
            interval_s = min(FIRST_S * 2.0**phase.reports, LONGEST_S)
        return self._news_s + interval_s - self._clock()

    def _text(self) -> str:
        texts = [_plain(phase.text) for phase in self._phases]
        details = [text() for text, _ in self._details]
        text = ": ".join(text for text in texts if text)
        known = ", ".join(detail for detail in details if detail)
        return f"{text} ({known})" if known else text


def _outermost(counts: Iterable[Count | None]) -> Count | None:
    return next((count for count in counts if count is not None), None)


def _plain(text: Text) -> str:
    return text if isinstance(text, str) else text()


def _print(report: str) -> None:
    # The reader of stderr may have exited, as `tee` does at Ctrl-C.
    with contextlib.suppress(OSError):
        print(report, file=sys.stderr, flush=True)


PHASES = Phases(_print)
"""The phases of this process, which belong to its main thread."""
phase = PHASES.phase


@contextlib.contextmanager
def blocking(
    text: str, write: Callable[[str], None] = _print, first_s: float = FIRST_S
) -> Iterator[None]:
    """Announce a phase that never ticks, because a library waits in it.

    A timer reports it once, since nothing else runs meanwhile, unless it is shown live.

    Args:
        text: What the block does.
        write: Function that shows the report.
        first_s: Seconds after which the block is reported.
    """

    def report() -> None:
        if not PHASES.is_shown_live:
            write(f"{text} [{first_s:.0f} s]")

    timer = threading.Timer(first_s, report)
    timer.daemon = True
    timer.start()
    try:
        with PHASES.phase(text):
            yield
    finally:
        timer.cancel()


# -------------------------------------------------------------------------------- times

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
        union = self._spans.setdefault(name, _Union())
        union.enter(self._clock())
        try:
            with span(name, "time"):
                yield
        finally:
            union.leave(self._clock())

    @contextmanager
    def timed(
        self, text: Text, name: str, *, waits: bool = False
    ) -> Iterator[OpenPhase]:
        """Announce the block as a phase, and count its time.

        Args:
            text: Text of the phase.
            name: Its time counts towards `timing_s/<name>`.
            waits: Whether it counts as spent on waiting for workers.
        """
        waiting = self.waiting() if waits else contextlib.nullcontext()
        with phase(text) as opened, self(name), waiting:
            yield opened

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
            with span("waiting for workers", "wait"):
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
        unions = self._spans.items()
        still_open = [name for name, union in unions if union.is_open]
        assert not still_open, f"spans still open: {still_open}"

        times = {f"timing_s/{name}": union.total_s for name, union in unions}
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
