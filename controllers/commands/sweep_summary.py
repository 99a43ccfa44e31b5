"""The summary at the end of a sweep: a table of its runs, the best run, what is next.

Invariant: it is made from the files of the runs alone, so a sweep that goes on shows
the runs before it as well. Deliberately not here: running them (`multirun.py`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from controllers.run.best import BestEvaluation, best_of, evaluations_of
from controllers.run.next_command import next_in_words
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.errors import TrackingError
from verl_ray.preflight.tables import print_tables
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT
from verl_ray.tracking.jsonl import METRICS, read_metrics

SUMMARY = "sweep.txt"
"""File in the folder of a sweep with the summary of its runs."""

FILE_WIDTH = 80


@dataclass(frozen=True)
class RunEnd:
    """The end of a run of a sweep."""

    own: Sequence[str]
    """The overrides that set it apart from the others."""

    config: Config
    """Its configuration, with the folder that it wrote to."""

    outcome: str

    minutes: float | None
    """How long it took; None if it did not start."""


@dataclass(frozen=True)
class _Measured:
    """The evaluations of a run."""

    best: BestEvaluation
    before: float | None
    last: float | None


def print_summary(
    title: str, command: str, ends: Sequence[RunEnd], folder: Path | None
) -> None:
    """Print the summary of a sweep, and write it to a folder.

    Args:
        title: What the runs are.
        command: The command that ran each of them.
        ends: The runs in order.
        folder: The folder of the sweep; None where its runs have no common one.
    """
    measured = [_measured(end, command) for end in ends]
    table = _table(title, ends, measured)
    lines = list(_best_run(command, ends, measured))
    print_tables(table, *lines)
    if folder is None:
        return

    text = io.StringIO()
    console = Console(file=text, force_jupyter=False, width=FILE_WIDTH, highlight=False)
    for part in (table, *lines):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    replace_file(folder / SUMMARY, text.getvalue().encode(errors="backslashreplace"))
    print(f"this summary: {folder / SUMMARY}", flush=True)


def _table(
    title: str, ends: Sequence[RunEnd], measured: Sequence[_Measured | None]
) -> Table:
    """Return a row per run: what sets it apart, how it ended, what it reached."""
    table = Table(title=title, title_justify="left")
    for heading in ("run", "settings", "outcome", "minutes", "before", "last", "best"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "settings")

    for number, (end, result) in enumerate(zip(ends, measured, strict=True)):
        cells = ["-", "-", "-"]
        if result is not None:
            best = f"{result.best.value:.4g}\nstep {result.best.step}"
            cells = [_cell(result.before), _cell(result.last), best]
        minutes = "-" if end.minutes is None else f"{end.minutes:.1f}"
        settings = "\n".join(end.own)
        table.add_row(str(number), settings, end.outcome, minutes, *cells)
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _best_run(
    command: str, ends: Sequence[RunEnd], measured: Sequence[_Measured | None]
) -> Iterator[str]:
    """Yield which run is the best, and what to try next with it."""
    bests = {number: result.best for number, result in enumerate(measured) if result}
    # Values of different metrics cannot be compared.
    if len({best.name for best in bests.values()}) != 1:
        return

    number, best = next(iter(bests.items()))
    for other, candidate in bests.items():
        if best.is_worse_than(candidate.value):
            number, best = other, candidate
    metric = best.name.removeprefix(HELD_OUT)
    yield f"best: run {number}, with {metric} {best.value:.4g} at step {best.step}"
    if command == "train":
        yield next_in_words(ends[number].config)


def _measured(end: RunEnd, command: str) -> _Measured | None:
    """Return the evaluations of a run; None without any."""
    if end.minutes is None:
        return None
    try:
        evaluations = evaluations_of(_lines(Path(end.config.run.dir), command))
    except TrackingError:
        return None

    best = best_of(end.config, evaluations)
    if best.step is None:
        return None
    before = evaluations.get(0) if command == "train" else None
    return _Measured(
        best=best,
        before=None if before is None else best.value_in(before),
        last=best.value_in(evaluations[max(evaluations)]),
    )


def _lines(folder: Path, command: str) -> list[dict[str, float]]:
    """Return the lines of a run's record, or its newest evaluation as a line."""
    if command == "train":
        return read_metrics(folder / METRICS)

    results = list((folder / "evaluated").glob("step_*/metrics.json"))
    if not results:
        return []
    newest = max(results, key=lambda path: path.stat().st_mtime)
    result = json.loads(newest.read_text("utf-8"))
    metrics = result["metrics"].items()
    # What is not finite is null.
    numbers = {name: value for name, value in metrics if value is not None}
    return [{**numbers, GLOBAL_STEP: result["step"]}]
