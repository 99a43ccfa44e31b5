"""A run as a person sees it: its progress while it lasts, and the report at its end.

Progress is a live line on a terminal, else a line per step. Above the live line stands
the phase of the run that is under way. Evaluated steps, the last step and some others
remain on the terminal when the live lines are gone. The report says time, before and
after, samples, and what to try next. It is no tracker: it is made from the record on
disk after the trackers are closed (`controllers/run/conclusion.py`).

Invariant: nothing of a rollout or a metric is interpreted as markup or sent to the
terminal as a control sequence; the report shows such text as it is, with control
characters spelled out. Everything that is shown of a step is in the other trackers,
too. Every line of the report fits into 80 columns but paths and commands, which are not
wrapped, so that they can be copied.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from verl_ray.algorithms.intervals import Interval
from verl_ray.profiling.phases import PHASES
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import HELD_OUT, Sample, Tracker

# The first metric of each group that exists is shown, with its label.
_SHOWN = (
    (
        ("reward", "critic/rewards/mean"),
        ("reward", "critic/score/mean"),
        ("loss", "actor/loss"),
    ),
    (("kl", "actor/kl_loss"), ("kl", "actor/reward_kl_penalty")),
    (("loss", "reward/loss"),),
    (("pairs right", "reward/accuracy"),),
)

# Number of steps that the remaining time is estimated from. They are recent ones, since
# responses grow and shrink during a run.
_RECENT_STEPS = 20

_GAP = "  "

# Number of steps, spread over a run, that at least remain on a terminal.
_REMAINING_STEPS = 20


class ConsoleTracker(Tracker):
    """Shows the progress of a run."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to show progress.

        Args:
            total_steps: Number of steps of the whole run, with those before a resume.
            stream: Stream to write to; None for the current stdout.
            clock: Clock in seconds that only increases.
        """
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._last_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

        # The parts of the last line while only the live line shows it.
        self._passing: list[str] = []

        self._live: Progress | None = None
        self._showing = contextlib.ExitStack()
        if self._stream.isatty():
            description = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            self._live = Progress(
                SpinnerColumn(),
                description,
                console=Console(file=self._stream),
                refresh_per_second=2,
                transient=True,
            )
            # Two lines: the phase that is under way, and the last step.
            self._phase_task = self._live.add_task("starting", total=None)
            self._task = self._live.add_task("", total=None, visible=False)
            self._live.start()
            self._showing.enter_context(PHASES.show_on(self._show_phase))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing, since the report at the end shows samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step`. On a terminal not every step leaves a line behind."""
        self._note_time(metrics)
        parts = self._parts(step, metrics)
        line = _GAP.join(parts)

        if self._live is None:
            print(line, file=self._stream, flush=True)
            return

        self._live.update(self._task, description=line, visible=True, refresh=True)
        # The live line is overwritten by the next step; this copy stays above it.
        self._passing = parts
        is_evaluated = any(name.startswith(HELD_OUT) for name in metrics)
        if is_evaluated or step % max(1, self._total_steps // _REMAINING_STEPS) == 0:
            self._print_passing()

    def close(self, failed: bool) -> None:
        self._showing.close()
        if self._live is not None:
            self._print_passing()
            self._live.stop()

    def outputs(self) -> dict[str, str]:
        return {}

    def _print_passing(self) -> None:
        """Print the last line above the live line, if it is not there yet."""
        assert self._live is not None
        console = self._live.console
        for line in _wrapped(self._passing, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._passing = []

    def _show_phase(self, text: str) -> None:
        """Show what the run is doing above the line of the last step."""
        if self._live is not None:
            self._live.update(self._phase_task, description=text)

    def _note_time(self, metrics: Mapping[str, float]) -> None:
        """Note how long the step took."""
        now_s = self._clock()
        if self._last_s is not None:
            self._recent_s.append(now_s - self._last_s)
        elif "timing_s/step" in metrics:
            # The first line has no line before it.
            self._recent_s.append(metrics["timing_s/step"])
        self._last_s = now_s

    def _parts(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the parts of the line of a step."""
        width = len(str(self._total_steps))
        parts = [f"step {step:>{width}}/{self._total_steps}"]

        for group in _SHOWN:
            for label, name in group:
                if name in metrics:
                    parts.append(f"{label} {metrics[name]:.4g}")
                    break

        for name, value in metrics.items():
            # Averages alone: best@N/mean and the like stand in the report.
            if name.startswith(HELD_OUT) and not name.endswith("/mean"):
                # The data source of supervised runs is named as all of them are here.
                short = name.removeprefix(HELD_OUT).removeprefix("held_out/")
                parts.append(f"held-out {short} {value:.4g}")

        if failures := _failures(metrics):
            parts.append(failures)

        seconds = metrics.get("timing_s/step")
        if "perf/total_num_tokens" in metrics and seconds:
            tokens_per_s = metrics["perf/total_num_tokens"] / seconds
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        if seconds is not None:
            parts.append(f"{seconds:.2f} s")

        # The next steps will take about as long as the recent ones.
        remaining_steps = self._total_steps - step
        if self._recent_s and remaining_steps > 0:
            mean_s = sum(self._recent_s) / len(self._recent_s)
            parts.append(f"{duration_text(mean_s * remaining_steps)} left")
        return parts


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Return the lines of a step, which are broken only between two parts."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += _GAP + part
        else:
            lines.append(_GAP + part if lines else part)
    return lines


def _failures(metrics: Mapping[str, float]) -> str:
    """Return which share of the scores failed, with the kinds; empty if none did."""
    counts = {
        health: metrics.get(health.metric, 0)
        for health in ScoreHealth
        if metrics.get(health.metric, 0)
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


def duration_text(seconds: float) -> str:
    """Return seconds as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


# ---------------------------------------------------------------- the report at the end

# Characters of a prompt or response that are shown. The whole text is in evaluations/.
_SHOWN_CHARACTERS = 240

# Phases with a smaller share are left out, but for the longest ones.
_SMALLEST_SHARE = 0.005
_SHOWN_PHASES = 5

# Last parts of the names of metrics that count held-out rows.
_COUNTS = ("num_prompts", "num_pairs")


@dataclass(frozen=True)
class HeldOut:
    """The evaluation before or after the steps of a run."""

    step: int
    metrics: Mapping[str, float]

    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % intervals of some of the metrics, by name."""


@dataclass(frozen=True)
class Report:
    """The report of a run at its end."""

    title: str
    """How it ended, such as "first: finished after 200 steps"."""

    total_s: float = 0.0
    """Wall time of all processes of the run."""

    durations: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase, the longest first."""

    before: HeldOut | None = None
    """The first evaluation; None where there is none before the last."""

    after: HeldOut | None = None
    """The last evaluation."""

    changes: Mapping[str, Interval] = field(default_factory=dict)
    """Paired differences of both evaluations, by metric."""

    best: str | None = None
    """The best step, in words."""

    warnings: Sequence[str] = ()
    samples: Sequence[Sample] = ()

    outputs: Mapping[str, str] = field(default_factory=dict)
    """Title -> path, URL or command, see `Trackers.outputs`."""


def plain_console(stream: TextIO | None, width: int | None) -> Console:
    """Return a console that prints tables and texts as they are.

    Args:
        stream: Stream to write to; None for stdout.
        width: Number of columns; None for that of the terminal.
    """
    # In a notebook rich would show what is meant for a file.
    return Console(
        file=stream or sys.stdout,
        force_jupyter=False,
        highlight=False,
        markup=False,
        width=width,
    )


def show(
    report: Report, stream: TextIO | None = None, width: int | None = None
) -> None:
    """Print the report.

    Args:
        stream: Stream to write to; None for stdout.
        width: Number of columns; None for that of the terminal.
    """
    console = plain_console(stream, width)
    console.print()
    console.print(report.title, soft_wrap=True)
    if report.durations:
        console.print(_durations_table(report.durations, report.total_s))
    if report.before is not None or report.after is not None:
        console.print(_metrics_table(report))
    if report.best is not None:
        console.print(f"best: {report.best}", soft_wrap=True)
    if report.samples:
        console.print(_samples_table(report.samples))

    for warning in report.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    for title, place in report.outputs.items():
        console.print(f"{title}: {place}", soft_wrap=True)


def _durations_table(durations: Mapping[str, float], total_s: float) -> Table:
    """Return a table of the longest phases."""
    title = f"wall time: {duration_text(total_s)}"
    table = Table("where the time went", title=title, title_justify="left")
    table.add_column("share", justify="right")
    table.add_column("time", justify="right")

    for number, (name, seconds) in enumerate(durations.items()):
        share = seconds / total_s if total_s else 0.0
        if number < _SHOWN_PHASES or share >= _SMALLEST_SHARE:
            table.add_row(name, f"{share:.0%}", duration_text(seconds))
    return table


def _metrics_table(report: Report) -> Table:
    """Return a table of held-out metrics before and after the run, or of one side."""
    title = "held-out data"
    sides = [("", side) for side in (report.before, report.after) if side is not None]
    if len(sides) == 2:
        title += ", before and after"
        sides = [("before\n", sides[0][1]), ("after\n", sides[1][1])]
    has_intervals = bool(report.changes) or any(side.intervals for _, side in sides)
    if has_intervals:
        title += ", with 95 % intervals"
    table = Table(title=title, title_justify="left")
    # Names are broken where there are too many columns, and numbers never.
    table.add_column("metric")
    for word, side in sides:
        table.add_column(f"{word}step {side.step}", justify="right", no_wrap=True)
    if len(sides) == 2:
        table.add_column("change", justify="right", no_wrap=True)

    # Metrics of either side, each once and in order.
    for name in dict.fromkeys(name for _, side in sides for name in side.metrics):
        values = [side.metrics.get(name) for _, side in sides]
        if _is_trivial(name, values):
            continue
        cells = [_cell(name, side) for _, side in sides]
        if len(sides) == 2:
            cells.append(_change(values, report.changes.get(name)))
        table.add_row(_MetricName(name), *cells)
    return table


def _is_trivial(name: str, values: Sequence[float | None]) -> bool:
    """Return whether a metric says nothing: no failure, or the same count twice."""
    kind = name.rpartition("/")[2]
    if kind == "failed_scores":
        return not any(values)
    return kind in _COUNTS and len(values) == 2 and values[0] == values[1]


def _change(values: Sequence[float | None], paired: Interval | None) -> str:
    """Return the change from the first value to the second; a dash for none."""
    old, new = values
    if old is None or new is None:
        return "-"

    text = f"{new - old:+.4g}"
    if paired is None or not paired.is_telling:
        return text
    return f"{text}\n[{paired.low:+.3g}, {paired.high:+.3g}]"


class _MetricName:
    """The name of a metric, which is broken only after a slash where that is enough."""

    def __init__(self, name: str) -> None:
        self._parts = re.findall(r"[^/]*/|[^/]+", _plain(name).plain)

    def __rich_measure__(self, _: Console, __: ConsoleOptions) -> Measurement:
        shortest = max(map(len, self._parts), default=0)
        return Measurement(shortest, sum(map(len, self._parts)))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            if line and len(line) + len(part) > options.max_width:
                yield Text(line, overflow="fold")
                line = ""
            line += part
        yield Text(line, overflow="fold")


def _cell(name: str, side: HeldOut) -> str:
    """Return a number as text, its interval in a second line; a dash for none."""
    if name not in side.metrics:
        return "-"

    text = f"{side.metrics[name]:.4g}"
    interval = side.intervals.get(name)
    if interval is None or not interval.is_telling:
        return text
    return f"{text}\n[{interval.low:.3g}, {interval.high:.3g}]"


def _samples_table(samples: Sequence[Sample]) -> Table:
    """Return a table of sample rollouts."""
    table = Table(title="sample rollouts", title_justify="left", show_lines=True)
    for column in ("prompt", "response", "answer"):
        table.add_column(column, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)

    for row in samples:
        prompt = _plain(row.prompt)
        response = _plain(row.response)
        if row.truncated:
            response.append(" [cut at the length limit]", style="dim")
        answer = _plain(row.answer)
        table.add_row(prompt, response, answer, f"{row.score:.4g}")
    return table


def _plain(text: str) -> Text:
    """Return text in which no character is interpreted.

    Control characters are spelled out, and the tail of a long text is left out.
    """
    short = text
    if len(text) > _SHOWN_CHARACTERS:
        short = text[:_SHOWN_CHARACTERS] + "…"

    characters = []
    for character in short:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return Text("".join(characters))
