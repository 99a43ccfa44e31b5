"""The report of a run at its end, on a terminal.

It says time, before and after, samples, and what to try next. It is no tracker: it is
made from the record on disk after the trackers are closed
(`controllers/run/conclusion.py`).

Invariant: nothing of a rollout or a metric is interpreted as markup or sent to the
terminal as a control sequence; such text is shown as it is, with control characters
spelled out. Every line fits into 80 columns but paths and commands, which are not
wrapped, so that they can be copied.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from verl_ray.algorithms.intervals import Interval
from verl_ray.profiling.output_lines import printable
from verl_ray.tracking.base import Sample
from verl_ray.tracking.block import duration_text
from verl_ray.tracking.held_out_names import accuracy_beside, main_names

# Characters of a prompt or response that are shown. The whole text is in evaluations/.
_SHOWN_CHARACTERS = 240

# Phases with a smaller share are left out, but for the longest ones.
_SMALLEST_SHARE = 0.005
_SHOWN_PHASES = 5

# Last parts of the names of metrics that count held-out rows.
_COUNTS = ("num_prompts", "num_pairs", "num_responses")

_FAILURES = ("failed_scores", "dropped", "clip_ratio")


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

    summary: str = ""
    """What the run came to, in one sentence; empty where nothing is recorded."""


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
    if report.summary:
        console.print(_plain(report.summary, most=len(report.summary)))
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

    for name in _ordered(side for _, side in sides):
        values = [side.metrics.get(name) for _, side in sides]
        if _is_trivial(name, values):
            continue
        cells = [_cell(name, side) for _, side in sides]
        if len(sides) == 2:
            cells.append(_change(values, report.changes.get(name)))
        table.add_row(_MetricName(name), *cells)
    return table


def _ordered(sides: Iterable[HeldOut]) -> list[str]:
    """Return the metrics of some evaluations, each once, and the main ones first.

    The reward beside an accuracy is left out where both are the same everywhere.
    """
    sides = list(sides)
    main = dict.fromkeys(name for side in sides for name in main_names(side.metrics))
    names = dict.fromkeys(name for side in sides for name in side.metrics)
    rest = [name for name in names if accuracy_beside(name) not in names]
    return list(dict.fromkeys([*main, *rest]))


def _is_trivial(name: str, values: Sequence[float | None]) -> bool:
    """Return whether a metric says nothing.

    There is no failure, nothing was cut or left out, no episode ended so, or the same
    count or length stands twice.
    """
    kind = name.rpartition("/")[2]
    if kind in _FAILURES or name.endswith(f"/episode/ends/{kind}"):
        return not any(values)
    may_repeat = kind in _COUNTS or "/response_length/" in name
    return may_repeat and len(values) == 2 and values[0] == values[1]


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


def _plain(text: str, most: int = _SHOWN_CHARACTERS) -> Text:
    """Return text in which no character is interpreted.

    Control characters are spelled out, and what is beyond `most` characters is left
    out.
    """
    short = text
    if len(text) > most:
        short = text[:most] + "…"
    return Text(printable(short))
