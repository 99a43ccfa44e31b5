"""The end of a run for people: before and after, sample rollouts, where the outputs are, what to try next.

Invariant: text that a model wrote is shown as it is, brackets included, with control characters spelled out. Not a
tracker: it is printed once, after the trackers are closed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_ray.tracking.base import Sample

# Of a prompt or response; the whole text is in samples/.
_SHOWN_CHARACTERS = 240


def report(
    before: Mapping[str, float],
    after: Mapping[str, float],
    samples: Sequence[Sample],
    outputs: Mapping[str, str],
    next_command: str,
    stream: TextIO | None = None,
) -> None:
    """Print the end of a run.

    Args:
        before: evaluation metrics ahead of the first step.
        after: the same metrics after the last one; a metric that one side lacks is shown with a dash.
        samples: rollouts to show, already chosen.
        outputs: title -> path, URL or command, as from `Trackers.outputs`.
        next_command: something to try now.
        stream: where to write; None = stdout.
    """
    console = Console(file=stream or sys.stdout, highlight=False, markup=False)
    console.print()
    console.print(_change(before, after))
    if samples:
        console.print(_rollouts(samples))
    for title, place in outputs.items():
        # Not wrapped, so that a path can be copied.
        console.print(f"{title}: {place}", soft_wrap=True)
    console.print(f"next: {next_command}", soft_wrap=True)


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    table = Table("metric", title="before and after", title_justify="left")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        change = "-" if old is None or new is None else f"{new - old:+.4g}"
        table.add_row(_plain(name), *("-" if value is None else f"{value:.4g}" for value in (old, new)), change)
    return table


def _rollouts(samples: Sequence[Sample]) -> Table:
    table = Table(title="sample rollouts", title_justify="left", show_lines=True)
    for column in ("prompt", "response", "answer"):
        table.add_column(column, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for row in samples:
        response = _plain(row.response)
        if row.truncated:
            response.append(" [cut at the length limit]", style="dim")
        table.add_row(_plain(row.prompt), response, _plain(row.answer), f"{row.score:.4g}")
    return table


def _plain(text: str) -> Text:
    """`text` with every character shown and none obeyed; the tail of a long one is left out."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return Text("".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in short))
