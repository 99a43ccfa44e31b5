"""The block that shows a run on a terminal while it lasts, and the course it shows.

Its lines are the step and the time that remains, reward and held-out metrics with their
changes, the phases of the last step, what the driver and each role do now, and the last
warnings. A run shows its own block; `verl-ray watch` shows it from another terminal.

Invariant: a block is made from values alone, and asks nothing of the run. Names and
texts are shown as they are, with control characters spelled out. No line is longer than
the terminal, and of a low terminal the last lines are left out first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.text import Text

from verl_ray.errors import TrackingError
from verl_ray.profiling.output_lines import WARNINGS, printable
from verl_ray.profiling.phases import NOTHING, PHASES, Count, Doing
from verl_ray.profiling.process_table import IDLE, ProcessRow, read_status
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.held_out_names import label_of, main_names
from verl_ray.tracking.history import (
    RunSegment,
    phase_durations,
    read_history,
    wall_s,
)
from verl_ray.tracking.terminal import LiveLines, is_live

# ------------------------------------------------------------------ the course of a run

# The first metric of each group that exists is shown, with its label.
_SHOWN = (
    (
        ("reward", "critic/rewards/mean"),
        ("reward", "critic/score/mean"),
        ("loss", "actor/loss"),
    ),
    (
        ("teacher kl", "distill/kl"),
        ("kl", "actor/kl_loss"),
        ("kl", "actor/reward_kl_penalty"),
    ),
    (("loss", "reward/loss"),),
    (("pairs right", "reward/accuracy"), ("pairs right", "rewards/accuracies")),
)

# Number of steps that the remaining time is estimated from. They are recent ones, since
# responses grow and shrink during a run.
_RECENT_STEPS = 20

_STEP_S = "timing_s/step"
_TIMES = (_STEP_S, "timing_s/testing", "timing_s/save_checkpoint")


@dataclass(frozen=True)
class ShownMetric:
    """A metric, and the first value that it had."""

    label: str
    value: float
    step: int
    first: float
    first_step: int


class Course:
    """The steps of a run so far, as its lines of metrics tell.

    They alone count, and the times at which they came where those are known, so the
    driver and whoever reads metrics.jsonl see the same. One thread notes lines, and any
    other one may look meanwhile.
    """

    def __init__(self, total_steps: int | None) -> None:
        """Begin before the first line.

        Args:
            total_steps: Number of steps of the whole run, with those before a resume;
                None where it is not known yet.
        """
        self.total_steps = total_steps
        self.step = 0
        self.line: Mapping[str, float] = {}
        """The last line."""

        self.last_step_line: Mapping[str, float] = {}
        """The last line of a step, since an evaluation may have a line of its own."""

        self._firsts: dict[str, tuple[int, float]] = {}
        """First step and value of each metric that is shown with its change."""

        self._lasts: dict[str, tuple[int, float]] = {}
        self._last_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def note(self, line: Mapping[str, float], now_s: float | None = None) -> None:
        """Note the next line.

        Args:
            line: The metrics of a step, with `training/global_step`.
            now_s: Time at which the line came, in seconds of a rising clock; None if it
                was read later.
        """
        self.step = int(line[GLOBAL_STEP])
        self.line = line
        if _STEP_S in line:
            self.last_step_line = line

        shown = [name for _, name in first_shown(line)]
        for name in [*held_out_names(line), *shown]:
            value = line[name]
            # A score may not be a number where all have failed.
            if value == value:
                self._firsts.setdefault(name, (self.step, value))
                self._lasts[name] = (self.step, value)
        self._note_time(line, now_s)

    def _note_time(self, line: Mapping[str, float], now_s: float | None) -> None:
        """Note how long the step took."""
        if now_s is not None and self._last_s is not None:
            self._recent_s.append(now_s - self._last_s)
        elif _STEP_S in line:
            # The first line has no line before it, and lines of a file have no times.
            times = _TIMES if now_s is None else (_STEP_S,)
            self._recent_s.append(sum(line.get(name, 0.0) for name in times))
        self._last_s = now_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step; None where that cannot be told, or it is over.

        The next steps will take about as long as the recent ones.
        """
        if not self._recent_s or self.total_steps is None:
            return None
        if self.step >= self.total_steps:
            return None
        recent_s = list(self._recent_s)
        mean_s = sum(recent_s) / len(recent_s)
        return mean_s * (self.total_steps - self.step)

    @property
    def main(self) -> list[ShownMetric]:
        """The metrics of the last step that are shown, each with its first value."""
        return [
            self._since_first(label, name)
            for label, name in first_shown(self.last_step_line)
            if name in self._lasts
        ]

    @property
    def held_out(self) -> list[ShownMetric]:
        """The held-out metrics of the last evaluation, each with its first value."""
        # The driver may note a line meanwhile.
        values = {name: value for name, (_, value) in dict(self._lasts).items()}
        return [
            self._since_first(held_out_label(name), name)
            for name in held_out_names(values)
        ]

    def _since_first(self, label: str, name: str) -> ShownMetric:
        step, value = self._lasts[name]
        first_step, first = self._firsts[name]
        return ShownMetric(label, value, step, first, first_step)


def first_shown(line: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return which metrics of a line are shown, as (label, name)."""
    shown = []
    for group in _SHOWN:
        present = [(label, name) for label, name in group if name in line]
        shown += present[:1]
    return shown


def held_out_names(line: Mapping[str, float]) -> list[str]:
    """Return the names of the main held-out metrics of a line."""
    # Averages alone: best@N/mean and the like stand in the report.
    return [name for name in main_names(line) if not name.endswith("/mean")]


def held_out_label(name: str) -> str:
    """Return the name of a held-out metric as it is shown."""
    # The data source of supervised runs is named as all of them are here.
    return label_of(name).removeprefix("held_out/")


def speed(line: Mapping[str, float]) -> list[str]:
    """Return how fast a step was, in words."""
    parts = []
    seconds = line.get(_STEP_S)
    if "perf/total_num_tokens" in line and seconds:
        tokens_per_s = line["perf/total_num_tokens"] / seconds
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if seconds is not None:
        parts.append(f"{seconds:.2f} s")
    return parts


def failed_scores(line: Mapping[str, float]) -> str:
    """Return which share of the scores failed, with the kinds; empty if none did."""
    counts = {
        health: line.get(health.metric, 0)
        for health in ScoreHealth
        if health is not ScoreHealth.DROPPED and line.get(health.metric, 0)
    }
    total = sum(counts.values())
    failed = total - counts.pop(ScoreHealth.OK, 0)
    if not failed:
        return ""
    kinds = ", ".join(
        f"{health.name.lower()} {count:.0f}" for health, count in counts.items()
    )
    share = failed / total
    # One failure of a thousand is not 0%.
    percentage = f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
    return f"{percentage} of rewards failed ({kinds})"


# --------------------------------------------------------------------------- the block

_GAP = "  "
_BAR = 30
"""Most columns of a bar."""

_LABEL = 10
"""Columns of the names of the lines."""

_MOST_LINES = 3
"""Most lines of held-out metrics, of roles, and of warnings."""

_PHASE_STYLES = ("cyan", "green", "magenta", "yellow", "blue")
_DRIVER = "driver"


def duration_text(seconds: float) -> str:
    """Return seconds as 45s, 3m05s or 2h07m; "?" where they are not a number."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@dataclass
class RunView:
    """A run as its block shows it at a moment, or other work, such as an export."""

    name: str
    course: Course | None = None
    """Its steps so far; None before there can be any."""

    has_steps: bool = True
    """Whether there will be steps."""

    elapsed_s: float | None = None
    doing: Doing = NOTHING
    """What the driver does."""

    rows: Sequence[ProcessRow] = ()
    """What its processes did a moment ago, the driver's row among them."""

    warnings: Sequence[str] = ()

    def lines(self, columns: int, rows: int) -> list[Text]:
        """Return the block.

        Args:
            columns: Columns that a line may have.
            rows: Lines that it may have.
        """
        lines = [*self._head(columns), *self._now(columns)]
        if self.course is not None:
            lines += self._metrics(self.course, columns)
            lines += _last_step(self.course, columns)
        lines += self._roles(columns)
        lines += self._warnings()
        return lines[:rows]

    def _head(self, columns: int) -> list[Text]:
        head = Text(printable(self.name), style="bold")
        course = self.course
        times = []
        if self.elapsed_s is not None:
            times.append(f"{duration_text(self.elapsed_s)} elapsed")
        if course is None or course.total_steps is None:
            states = []
            if course is not None:
                states = [f"step {course.step}"]
            elif self.has_steps:
                states = ["starting"]
            return [_GAP_TEXT.join([head, *map(Text, [*states, *times])])]

        if course.remaining_s is not None:
            times.append(f"{duration_text(course.remaining_s)} left")
        step = Text(f"step {course.step}/{course.total_steps}")
        count = Count(course.step, course.total_steps, "steps")
        parts = [head, step, *map(Text, times)]
        return [_with_bar(parts, 2, count, columns)]

    def _now(self, columns: int) -> list[Text]:
        doing = self.doing
        if not doing.text and doing.count is None:
            return []
        text = printable(doing.text)
        count = doing.count
        amount: list[Text] = []
        if count is not None and count.total > 0:
            amount = [Text(str(count))]
            if f"/{str(count).split()[0].split('/')[1]}" in text:
                amount = [Text(f"{min(1.0, count.done / count.total):.0%}")]
                text = _with_number_of(count, text)
        elif doing.seconds is not None:
            amount = [Text(f"{doing.seconds:.0f} s", style="dim")]

        waiting = Text.assemble(
            (f"{'now':<{_LABEL}}", "dim"), _spinner_at(time.monotonic()), " ", text
        )
        if count is None or not amount:
            return [_GAP_TEXT.join([waiting, *amount])]
        # A long text makes way for a bar.
        others = _LABEL + 2 * len(_GAP) + sum(part.cell_len for part in amount)
        waiting.truncate(columns - others, overflow="ellipsis")
        return [_with_bar([waiting, *amount], 1, count, columns)]

    def _metrics(self, course: Course, columns: int) -> list[Text]:
        """Return the lines of the last step's metrics and of the last evaluation."""
        parts = [_changed(metric) for metric in course.main]
        parts += map(Text, speed(course.last_step_line))
        failures = failed_scores(course.last_step_line)
        if failures:
            parts.append(Text(failures, style="yellow"))
        lines = _flow("last step", parts, columns)

        held_out = [_changed(metric, step=True) for metric in course.held_out]
        return lines + _flow("held-out", held_out, columns)[:_MOST_LINES]

    def _roles(self, columns: int) -> list[Text]:
        """Return what each role does; of several rows, what the first one says."""
        by_role: dict[str, list[ProcessRow]] = {}
        for row in self.rows:
            if row.role != _DRIVER:
                by_role.setdefault(row.role, []).append(row)
        parts = [_role(role, role_rows) for role, role_rows in by_role.items()]
        return _flow("processes", parts, columns)[:_MOST_LINES]

    def _warnings(self) -> list[Text]:
        lines = []
        for warning in list(self.warnings)[-_MOST_LINES:]:
            text = printable(warning).replace("\n", " ")
            lines.append(Text.assemble((f"{'warning':<{_LABEL}}", "yellow"), text))
        return lines


_GAP_TEXT = Text(_GAP)


def _flow(label: str, parts: Sequence[Text], columns: int) -> list[Text]:
    """Return parts behind a label, in lines that are broken only between two parts."""
    start = f"{label:<{_LABEL}}" if label else ""
    indent = " " * len(start) or _GAP

    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(_GAP) + part.cell_len <= columns:
            lines[-1].append(_GAP).append_text(part)
        else:
            lines.append(Text.assemble((indent if lines else start, "dim"), part))
    return lines


def _changed(metric: ShownMetric, *, step: bool = False) -> Text:
    """Return a metric with its change since its first value."""
    text = f"{printable(metric.label)} {metric.value:.4g}"
    if step:
        text += f" at step {metric.step}"
    if metric.first_step == metric.step:
        return Text(text)
    change = f" ({metric.value - metric.first:+.3g} since step {metric.first_step})"
    return Text.assemble(text, (change, "dim"))


def _role(role: str, rows: Sequence[ProcessRow]) -> Text:
    """Return what processes of a role do: those amiss, or else those with work."""
    amiss = [row for row in rows if not row.verb and row.phase != IDLE]
    shown = amiss or [row for row in rows if row.verb] or list(rows)
    first = shown[0]
    number = sum(len(row.ranks) for row in rows)
    num_shown = sum(len(row.ranks) for row in shown)
    name = printable(role)
    if num_shown < number:
        name += f" {num_shown} of {number}"
    elif number > 1:
        name += f" ×{number}"
    words = [first.verb.replace("_", " "), first.phase]
    if first.seconds is not None:
        words.append(f"{first.seconds:.0f} s")
    does = printable(" ".join(word for word in words if word))
    return Text.assemble((name, "bold"), " ", (does, "yellow" if amiss else ""))


def _last_step(course: Course, columns: int) -> list[Text]:
    """Return the shares of the last step's phases: a bar, and the names of its parts.

    Phases that run at the same time count each, as in the report at the end.
    """
    durations = phase_durations([course.last_step_line], None)
    total_s = sum(durations.values())
    if not total_s:
        return []

    bar = Text()
    names = []
    width = min(_BAR, columns - _LABEL)
    so_far = 0.0
    styles = zip(durations.items(), _PHASE_STYLES, strict=False)
    for (name, seconds), style in styles:
        share = seconds / total_s
        so_far += share
        bar.append("█" * (round(so_far * width) - bar.cell_len), style)
        names.append(Text.assemble(("█ ", style), f"{printable(name)} {share:.0%}"))
    return _flow("time", [bar, *names], columns)[:_MOST_LINES]


def _with_number_of(count: Count, text: str) -> str:
    """Return a text that was made a moment ago, with the number that is counted now.

    Several numbers of the same total are left as they are: it may be any of them.
    """
    number = str(count).split()[0]
    before, colon, work = text.rpartition(": ")
    older = re.compile(rf"\b\d+/{number.partition('/')[2]}\b")
    if len(older.findall(work)) == 1:
        work = older.sub(number, work)
    return f"{before}{colon}{work}"


def _with_bar(parts: list[Text], place: int, count: Count, columns: int) -> Text:
    """Return parts in one line, with a bar at this place if it has columns for it."""
    line = _GAP_TEXT.join(parts)
    width = min(_BAR, columns - line.cell_len - len(_GAP))
    if width < _LABEL:
        return line
    bar = ProgressBar(total=count.total, completed=count.done, width=width)
    segments = _PLAIN.render(bar)
    drawn = Text.assemble(*((part.text, part.style or "") for part in segments))
    return _GAP_TEXT.join([*parts[:place], drawn, *parts[place:]])


_PLAIN = Console(force_terminal=True, color_system="standard", width=_BAR)


def _spinner_at(now_s: float) -> Text:
    frame = _SPINNER.render(now_s)
    assert isinstance(frame, Text), "it has no text beside it"
    return frame


_SPINNER = Spinner("dots")


# ------------------------------------------------------------ the block of this process

_LOOK_S = 2.0
"""Seconds between two looks at what the processes do."""

_END_S = 1.0
"""Seconds in which a look is waited for at the end."""


class LiveBlock:
    """The block in which this process shows its own run.

    A thread reads what its processes do, so a disk that hangs holds up nothing that is
    shown or printed.
    """

    def __init__(self, name: str, folder: Path | None, stream: TextIO) -> None:
        """Stand for a terminal.

        Args:
            name: Name of the run, or what is done.
            folder: Folder of the run, which has its history and its status; None where
                there is none.
            stream: The terminal.
        """
        self.view = RunView(name, has_steps=folder is not None)
        self.terminal = LiveLines(stream, self._lines)
        self._folder = folder
        self._begun_s = time.monotonic()
        self._has_ended = threading.Event()
        self._segments: list[RunSegment] = []
        if folder is not None:
            # Damage to it ends no run, and is reported where the run begins.
            with contextlib.suppress(TrackingError):
                self._segments = read_history(folder)

    def print_above(self, parts: Sequence[str]) -> None:
        """Print the parts of a line above the block, which stay."""
        texts = [Text(printable(part)) for part in parts]
        self.terminal.paint(_flow("", texts, self.terminal.columns))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the block while the body of the `with` runs."""
        with contextlib.ExitStack() as ends:
            if self._folder is not None:
                arguments = (self._folder,)
                looker = threading.Thread(
                    target=self._look, args=arguments, name="block", daemon=True
                )
                looker.start()
                ends.callback(looker.join, _END_S)
                ends.callback(self._has_ended.set)
            ends.enter_context(self.terminal.shown())
            yield

    def _lines(self, columns: int, rows: int) -> list[Text]:
        view = self.view
        view.doing = PHASES.glance()
        view.warnings = WARNINGS.last
        view.elapsed_s = time.monotonic() - self._begun_s
        if self._segments:
            view.elapsed_s = wall_s(self._segments)
        return view.lines(columns, rows)

    def _look(self, folder: Path) -> None:
        # Ends with the block, or as soon as the disk answers.
        while True:
            # A disk may be full or slow; then the block shows what it knows.
            with contextlib.suppress(OSError, ValueError):
                status = read_status(folder)
                is_own = status is not None and status.pid == os.getpid()
                self.view.rows = status.rows if status is not None and is_own else ()
            if self._has_ended.wait(_LOOK_S):
                return


_shown: LiveBlock | None = None


@contextlib.contextmanager
def live_block(
    name: str,
    folder: Path | None = None,
    *,
    stream: TextIO | None = None,
    enabled: bool = True,
) -> Iterator[LiveBlock | None]:
    """Show what this process does in a block at the end of its terminal.

    A block within a block is the same one.

    Args:
        name: See `LiveBlock`, like `folder`.
        folder: See there.
        stream: Where to show it; None for the current stdout.
        enabled: Whether to show it at all.

    Yields:
        The block; None where there is no terminal for it.
    """
    global _shown
    terminal = stream or sys.stdout
    if _shown is not None or not enabled or not is_live(terminal):
        yield _shown
        return

    # Those of an earlier run of this process are none of this one.
    WARNINGS.forget()
    block = LiveBlock(name, folder, terminal)
    with PHASES.shown_live(), block.shown():
        _shown = block
        try:
            yield block
        finally:
            _shown = None
