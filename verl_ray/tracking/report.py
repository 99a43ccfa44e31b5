"""The report at the end of a run: time, before and after, samples, what to try next.

Invariant: text that a model wrote is shown as it is, brackets included, with control
characters spelled out. Every line fits into 80 columns but paths and commands, which
are not wrapped, so that they can be copied.

Deliberately not here: a tracker. The report is made from the record on disk after the
trackers are closed (`controllers/run/conclusion.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_ray.algorithms.intervals import Interval
from verl_ray.tracking.base import Sample
from verl_ray.tracking.console import duration_text

# Characters of a prompt or response that are shown. The whole text is in samples/.
_SHOWN_CHARACTERS = 240

# Phases with a smaller share are left out, but for the longest ones.
_SMALLEST_SHARE = 0.005
_SHOWN_PHASES = 5


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

    total_s: float
    """Wall time of all processes of the run."""

    durations: Mapping[str, float]
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


def show(
    report: Report, stream: TextIO | None = None, width: int | None = None
) -> None:
    """Print the report.

    Args:
        stream: Stream to write to; None for stdout.
        width: Number of columns; None for that of the terminal.
    """
    console = Console(
        file=stream or sys.stdout, highlight=False, markup=False, width=width
    )
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
    """Return a table of held-out metrics before and after the run."""
    before = report.before
    after = report.after
    has_intervals = bool(report.changes) or any(
        side is not None and side.intervals for side in (before, after)
    )

    title = "held-out data, before and after"
    if has_intervals:
        title += ", with 95 % intervals"
    table = Table(title=title, title_justify="left")
    table.add_column("metric", overflow="fold")
    table.add_column(_heading("before", before), justify="right")
    table.add_column(_heading("after", after), justify="right")
    table.add_column("change", justify="right")

    # Metrics of either side, each once and in order.
    old_metrics = {} if before is None else before.metrics
    new_metrics = {} if after is None else after.metrics
    for name in dict.fromkeys((*old_metrics, *new_metrics)):
        old = old_metrics.get(name)
        new = new_metrics.get(name)
        change = "-"
        if old is not None and new is not None:
            change = f"{new - old:+.4g}"

        paired = report.changes.get(name)
        if paired is not None and paired.is_telling:
            change += f"\n[{paired.low:+.3g}, {paired.high:+.3g}]"
        table.add_row(_plain(name), _cell(name, before), _cell(name, after), change)
    return table


def _heading(word: str, side: HeldOut | None) -> str:
    """Return the heading of a column, with the step that was evaluated."""
    return word if side is None else f"{word}\nstep {side.step}"


def _cell(name: str, side: HeldOut | None) -> str:
    """Return a number as text, its interval in a second line; a dash for none."""
    if side is None or name not in side.metrics:
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
