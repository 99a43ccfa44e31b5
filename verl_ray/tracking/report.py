"""The report at the end of a run: before and after, samples, outputs, what to try next.

Invariant: text that a model wrote is shown as it is, brackets included, with control
characters spelled out.

Deliberately not here: a tracker. The report is printed once, after the trackers are
closed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_ray.tracking.base import Sample

# Characters of a prompt or response that are shown. The whole text is in samples/.
_SHOWN_CHARACTERS = 240


def report(
    before: Mapping[str, float],
    after: Mapping[str, float],
    samples: Sequence[Sample],
    outputs: Mapping[str, str],
    next_command: str,
    stream: TextIO | None = None,
) -> None:
    """Print the report.

    Args:
        before: Evaluation metrics before the first step.
        after: Evaluation metrics after the last step. A metric that one side lacks is
            shown with a dash.
        samples: Rollouts to show.
        outputs: Title -> path, URL or command, see `Trackers.outputs`.
        next_command: Command to try now.
        stream: Stream to write to; None for stdout.
    """
    console = Console(file=stream or sys.stdout, highlight=False, markup=False)
    console.print()
    console.print(_metrics_table(before, after))
    if samples:
        console.print(_samples_table(samples))

    # Paths and commands are not wrapped, so that they can be copied.
    for title, place in outputs.items():
        console.print(f"{title}: {place}", soft_wrap=True)
    console.print(f"next: {next_command}", soft_wrap=True)


def _metrics_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Return a table of metrics before and after the run."""
    table = Table("metric", title="before and after", title_justify="left")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")

    # Metrics of either side, each once and in order.
    for name in dict.fromkeys((*before, *after)):
        old = before.get(name)
        new = after.get(name)
        change = "-"
        if old is not None and new is not None:
            change = f"{new - old:+.4g}"
        table.add_row(_plain(name), _number(old), _number(new), change)
    return table


def _number(value: float | None) -> str:
    """Return a number as text; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4g}"


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
