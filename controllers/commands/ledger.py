"""The command `ledger`: what happened to each prompt of a run.

Invariant: every figure comes from the events in the run's ledger. The exit code is 0
only if each ordinal was trained or rejected once, over all restarts, in the step of its
batch, and none is missing below the last trained one, nor of the steps of a finished
run. Nothing is started or changed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich import box
from rich.table import Table

from verl_ray.columns.batch import Array, Int64
from verl_ray.data.ledger import (
    LEDGER,
    NO_SPREAD,
    NONE,
    Event,
    History,
    first_few,
    has_parts,
    read_parts,
)
from verl_ray.errors import ConfigError, Problem, TrackingError
from verl_ray.paths import OUTPUTS, RUN_HELP, RUN_HINT, run_folder
from verl_ray.preflight.tables import print_tables
from verl_ray.report.lines import setting
from verl_ray.report.record import read_config
from verl_ray.tracking.history import read_history

_BLANK = "-"

_COLUMNS = (
    "restart",
    "drawn",
    "drawn\nagain",
    "finished",
    "trained",
    "rejected",
    "open",
    "first\ntrained",
    "last\ntrained",
    "largest\nage",
)


def main(argv: list[str]) -> int:
    """Print a ledger and return 0; return 1 if an ordinal is missing or came twice.

    Raises:
        ConfigError: there is no such run, it has no ledger, or no such ordinal.
        TrackingError: a part of the ledger cannot be read.
    """
    arguments = _parser().parse_args(argv)
    folder = _folder(arguments.run)
    history = read_parts(folder)
    if arguments.ordinal is not None:
        print_tables(_ordinal_table(history, arguments.ordinal))
        return 0

    print_tables(_table(history))
    if len(history.of(Event.REJECTED)):
        print_tables(_reason_table(history))

    num_replayed = len(history.of(Event.REPLAYED))
    if num_replayed:
        print(f"{num_replayed} groups were learned from once more (algorithm.replay)")

    problems = faults(history)
    problems += misplaced(history, _prompts_per_step(folder.parent))
    problems += unfinished(history, _finished_step(folder.parent))
    for problem in problems:
        print(problem)
    if problems:
        print("--ordinal N prints what happened to one of them")
        return 1

    print(_summary(history))
    return 0


# ------------------------------------------------------------------------------ figures


def faults(history: History) -> list[str]:
    """Return what is wrong with a history, a line for each kind; none if all is well.

    An ordinal may be settled (trained or rejected) once. Batches are trained in the
    order of their ordinals, so all below the last trained one are settled.
    """
    num_settled = _times_settled(history)
    lines = []

    twice = np.flatnonzero(num_settled > 1)
    if len(twice):
        lines.append(
            f"trained or rejected more than once: {_numbered(twice)}; expected once"
            " over all restarts"
        )

    last = _last_trained(history)
    missing = np.flatnonzero(num_settled[: last + 1] == 0)
    if len(missing):
        lines.append(
            f"neither trained nor rejected: {_numbered(missing)}; expected all below"
            f" the last trained one, {last}"
        )
    return lines


def misplaced(history: History, prompts_per_step: int | None) -> list[str]:
    """Return a line if ordinals were trained in another step than that of their batch.

    Batches are trained in the order of their ordinals, B of them in each step. Where
    rejected groups were replaced by later ones, batches are not those of the ordinals.

    Args:
        history: The history.
        prompts_per_step: B, of the newest process at least; None where it is not known,
            so that the order is checked.
    """
    is_trained = history.rows["event"] == Event.TRAINED
    order = np.argsort(history.rows["ordinal"][is_trained], kind="stable")
    trained = history.rows[is_trained][order]
    steps = trained["step"]
    # Replacements before the first event are in another folder.
    begins_here = not (history.begins_at.frontier or history.begins_at.holes)
    if prompts_per_step and begins_here and NO_SPREAD not in history.reasons:
        frontiers = history.frontiers[is_trained][order]
        expected = _expected_steps(trained, frontiers, prompts_per_step)
    else:
        expected = np.maximum.accumulate(steps)
    others = np.flatnonzero(steps != expected)
    if not len(others):
        return []
    first = others[0]
    return [
        f"trained in another step than that of their batch:"
        f" {_numbered(trained['ordinal'][others])}; expected step {expected[first]} for"
        f" the first of them, and found {steps[first]}"
    ]


def _expected_steps(trained: Array, frontiers: Int64, prompts_per_step: int) -> Array:
    """Return the step of the batch of each trained ordinal, int64 [trained].

    Each process has one size of batches, which may differ from that before it. So the
    places where two processes began say how many ordinals a step of the first one has.

    Args:
        trained: Trained events in the order of their ordinals.
        frontiers: The frontier at which the process of each of them began.
        prompts_per_step: Ordinals of a batch of the newest process.
    """
    ordinals = trained["ordinal"].astype(np.int64)
    begins, first = np.unique(frontiers, return_index=True)
    first_steps = trained["step"][first]
    first_steps[:1] = 1
    sizes, rests = np.divmod(np.diff(begins), np.maximum(np.diff(first_steps), 1))
    if rests.any() or not sizes.all():
        return ordinals // prompts_per_step + 1
    process = np.searchsorted(begins, frontiers)
    size = np.append(sizes, prompts_per_step)[process]
    steps: Array = first_steps[process] + (ordinals - frontiers) // size
    return steps


def unfinished(history: History, last_step: int | None) -> list[str]:
    """Return a line if a run is finished, and groups of its last step are not here.

    Args:
        history: The history.
        last_step: The last step of a finished run; None for one that is not.
    """
    trained = history.of(Event.TRAINED)
    rejected = history.of(Event.REJECTED)["ordinal"]
    last = int(trained["step"].max(initial=NONE))
    # A step may have learned from none of its groups, which are rejected then.
    is_explained = (rejected > _last_trained(history)).any()
    if last_step is None or last >= last_step or is_explained:
        return []
    newest = "none was" if last == NONE else f"the last trained ones are of step {last}"
    return [f"step {last_step}, the last of the finished run, is missing: {newest}"]


def _prompts_per_step(run_dir: Path) -> int | None:
    """Return the number of ordinals of a batch; None where the run does not say it."""
    number = setting(read_config(run_dir, []), "data.prompts_per_step")
    return number if isinstance(number, int) else None


def _finished_step(run_dir: Path) -> int | None:
    """Return the last step of a finished run; None for one that is not, or unknown."""
    try:
        segments = read_history(run_dir)
    except TrackingError:
        return None
    is_finished = segments and segments[-1].ending == "finished"
    return segments[-1].last_step if is_finished else None


def _numbered(ordinals: Int64) -> str:
    """Return how many ordinals there are, and the first few."""
    noun = "ordinal" if len(ordinals) == 1 else "ordinals"
    return f"{len(ordinals)} {noun} ({first_few(ordinals)})"


def _last_trained(history: History) -> int:
    """Return the largest ordinal that was trained; -1 if there is none."""
    return int(history.of(Event.TRAINED)["ordinal"].max(initial=NONE))


def _times_settled(history: History) -> Int64:
    """Return how often each ordinal was settled, int64 [ordinals]."""
    begins_at = history.begins_at
    ends = [end for _, end in begins_at.holes]
    last = int(history.rows["ordinal"].max())
    size = max(begins_at.frontier, last + 1, *ends)

    is_settled = np.isin(history.rows["event"], (Event.TRAINED, Event.REJECTED))
    counts = np.bincount(history.rows["ordinal"][is_settled], minlength=size)
    return counts + begins_at.mask(size)


@dataclass(frozen=True, eq=False)
class _Marks:
    """Marks that a table adds to the columns of each event.

    Attributes:
        is_again: Whether it is a draw of an ordinal that was drawn before.
        is_open: Whether it is the last draw of an ordinal that is not settled.
        age: Of a trained ordinal the number of versions between its oldest token and
            the version that was trained; -1 for other events, and without tokens.
    """

    is_again: Array
    is_open: Array
    age: Int64


def _marks(history: History) -> _Marks:
    """Return the marks of all events."""
    rows = history.rows
    num_settled = _times_settled(history)

    num_ordinals = len(num_settled)
    is_again = np.zeros(len(rows), np.bool_)
    is_open = np.zeros(len(rows), np.bool_)
    drawn = np.flatnonzero(rows["event"] == Event.DRAWN)
    is_again[drawn] = True
    is_again[_last(rows, drawn[::-1], num_ordinals)] = False
    last_drawn = _last(rows, drawn, num_ordinals)
    is_open[last_drawn] = num_settled[rows["ordinal"][last_drawn]] == 0

    # What was drawn again finished again, and its last tokens are the ones that count.
    # An ordinal may have finished in another run, which this one continues.
    finished = np.flatnonzero(rows["event"] == Event.FINISHED)
    last_finished = rows[_last(rows, finished, num_ordinals)]
    oldest = np.full(num_ordinals, NONE, np.int64)
    oldest[last_finished["ordinal"]] = last_finished["oldest_version"]

    oldest = oldest[rows["ordinal"]]
    has_age = (rows["event"] == Event.TRAINED) & (oldest != NONE)
    age = np.where(has_age, rows["step"] - 1 - oldest, NONE)
    return _Marks(is_again, is_open, age)


def _last(rows: Array, places: Int64, num_ordinals: int) -> Int64:
    """Return those of the places in `rows` that are the last ones of their ordinals."""
    last = np.full(num_ordinals, NONE, np.int64)
    # Of several values for one ordinal the last one stays.
    last[rows["ordinal"][places]] = places
    remaining: Int64 = last[last != NONE]
    return remaining


# ------------------------------------------------------------------------------- tables


def _empty_table(title: str) -> Table:
    """Return a table without columns; ten of six digits fit a narrow terminal."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)


def _table(history: History) -> Table:
    """Return the numbers of events, a row per restart."""
    steps = history.of(Event.TRAINED)["step"]
    title = "no step was trained"
    if len(steps):
        title = f"prompts of steps {steps.min()} to {steps.max()}, by their ordinals"
    table = _empty_table(title)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)

    marks = _marks(history)
    restart_column = history.rows["restart"]
    restarts = np.unique(restart_column).tolist()
    for restart in restarts:
        table.add_row(
            str(restart), *_cells(history.rows, marks, restart_column == restart)
        )
    if len(restarts) > 1:
        table.add_section()
        table.add_row("all", *_cells(history.rows, marks, restart_column >= 0))
    return table


def _cells(rows: Array, marks: _Marks, is_here: Array) -> list[str]:
    """Return a row of the table, without its name, for some of the events."""
    here = rows[is_here]
    counts = np.bincount(here["event"], minlength=len(Event) + 1)
    numbers = [
        counts[Event.DRAWN],
        np.count_nonzero(marks.is_again[is_here]),
        counts[Event.FINISHED],
        counts[Event.TRAINED],
        counts[Event.REJECTED],
        np.count_nonzero(marks.is_open[is_here]),
    ]

    trained = here["ordinal"][here["event"] == Event.TRAINED]
    ends = [trained.min(), trained.max()] if len(trained) else [NONE, NONE]
    largest_age = marks.age[is_here].max(initial=NONE)
    return [_text(number) for number in (*numbers, *ends, largest_age)]


def _text(number: int) -> str:
    """Return a number, or a dash in place of one that an event does not have."""
    return _BLANK if number == NONE else str(number)


def _reason_table(history: History) -> Table:
    """Return how many ordinals were rejected for each reason."""
    table = _empty_table("rejected")
    table.add_column("reason")
    table.add_column("ordinals", justify="right", no_wrap=True)

    counts = np.bincount(history.of(Event.REJECTED)["reason"])
    for number in np.argsort(-counts, kind="stable").tolist():
        table.add_row(history.reasons[number], str(counts[number]))
    return table


def _ordinal_table(history: History, ordinal: int) -> Table:
    """Return the events of one ordinal.

    Raises:
        ConfigError: there is none.
    """
    rows = history.rows[history.rows["ordinal"] == ordinal]
    if not len(rows):
        ordinals = history.rows["ordinal"]
        rule = "the ledger has no event of this ordinal"
        fix = f"It has those from {ordinals.min()} to {ordinals.max()}."
        raise ConfigError([Problem("--ordinal", ordinal, rule, fix)])

    table = _empty_table(f"ordinal {ordinal}")
    for heading in ("time", "restart", "event", "step", "versions", "reason"):
        table.add_column(heading, no_wrap=heading != "reason")

    for row in rows:
        moment = time.localtime(row["time"])
        reason = row["reason"]
        oldest, newest = row["oldest_version"], row["newest_version"]
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M:%S", moment),
            str(row["restart"]),
            Event(row["event"]).name.lower(),
            _text(row["step"]),
            _text(oldest) if oldest == newest else f"{oldest} to {newest}",
            _BLANK if reason == NONE else history.reasons[reason],
        )
    return table


def _summary(history: History) -> str:
    """Return what is right with a ledger that has no faults, as one line."""
    last = _last_trained(history)
    if last == NONE:
        return "no ordinal was trained yet"

    begins_at = history.begins_at
    since = ""
    if begins_at.frontier or begins_at.holes:
        since = f", from {begins_at.frontier} on, where this folder begins"
    return (
        f"every ordinal up to {last} was trained exactly once or rejected, over all"
        f" restarts{since}"
    )


# ------------------------------------------------------------------------ command line


def _folder(run: str) -> Path:
    """Return the folder of the ledger of a run.

    Raises:
        ConfigError: there is none.
    """
    ledger = run_folder(run) / LEDGER
    if not ledger.is_dir():
        rule = (
            f"this folder has no {LEDGER}: it is no run, or a run of SFT, of a reward"
            " model or of an earlier version, or it has written no checkpoint yet"
        )
        _refuse(run, rule, RUN_HINT)
    if not has_parts(ledger):
        rule = f"{LEDGER} is empty: its parts were removed, or the run began anew"
        _refuse(run, rule, "Wait for the run's next checkpoint, or give another run.")
    return ledger


def _refuse(run: str, rule: str, fix: str) -> NoReturn:
    raise ConfigError([Problem("RUN", run, rule, fix)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray ledger",
        description=(
            "Print what happened to the prompts of a run, and check that each was"
            " trained exactly once, or rejected, over all restarts. A prompt has an"
            " ordinal: its running number in the run. Nothing is started or changed."
        ),
        epilog=(
            "examples:\n"
            f"  verl-ray ledger {OUTPUTS}/first\n"
            "  verl-ray ledger first --ordinal 17\n\n"
            "exit codes:\n"
            "  0  each was trained once or rejected, and none is missing\n"
            "  1  some were not; the message lists the first few\n"
            "  2  there is no such run, or it has no ledger\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help=RUN_HELP,
    )
    parser.add_argument(
        "--ordinal",
        type=int,
        metavar="N",
        help="print the events of this one",
    )
    return parser
