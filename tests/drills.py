"""Drills: a process of a real run dies, stops or starves in a phase, or what the run
stands on gives way, and nobody comes.

As a program this file makes a run for each drill, and prints a line for each: whether
the run went on by itself, the seconds until it said so, until the next new step and
until its end, how many steps were trained again, what the run did, and whether metrics,
weights and the optimizer have the bits of a run that nothing happened to::

    python -m tests.drills [--layout NAME] [--process NAME] [--fault NAME] [--phase NAME]
        [--all] [--list] [--json FILE]

Without `--all` it makes the drills of a fixed choice. `--list` only says which. `--json`
appends a line for each to a file, as soon as it is made. `tests/test_drills.py` makes a
fixed sample. A drill that this machine cannot make
is left out, with the reason. Deliberately not here: how a fault happens
(`tests/faults.py`, `tests/surroundings.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from tests.controllers.runs import make_inputs
from tests.drill_choice import FAULTS, PHASES, Drill, chosen_drills, every_drill
from tests.drill_course import Outcome, make
from tests.faults import OUTSIDE
from tests.kills import Run
from tests.layouts import LAYOUTS, SURROUNDED
from tests.surroundings import ScoringService, hindrance, surrounding

STALL_S = 45
"""Limit of a process without progress, which a start keeps on an idle machine."""

NOT_THERE = "rollout's child: there is none, since vLLM's engine runs in its replica"

_ERROR = re.compile(r"^[A-Z][a-z]+[A-Z]\w+: .*", re.MULTILINE)
"""A failure as a run says it at its end: the name of its class, and the cause."""

_ROW = "{:8}{:21}{:8}{:18}{:8}{:>8}{:>10}{:>8}{:>9}  {}"
_TITLES = _ROW.format(
    "layout", "process", "fault", "phase", "went on", "noticed", "next step", "end",
    "replayed", "bits; what the run did",
)  # fmt: skip


def row(outcome: Outcome) -> str:
    """Return the line of the table."""
    if not outcome.happened:
        result = "did not happen"
    elif outcome.differs is None:
        errors = _ERROR.findall(outcome.said)
        result = errors[0] if errors else outcome.said.strip().rpartition("\n")[2]
    else:
        result = "DIFFERS " + "; ".join(outcome.differs) if outcome.differs else "equal"
    did = f" ({', '.join(outcome.cures)})" if outcome.cures else ""
    return _ROW.format(
        outcome.layout, outcome.process, outcome.fault, outcome.phase,
        "yes" if outcome.went_on else "NO",
        _seconds(outcome.noticed_s), _seconds(outcome.next_step_s), _seconds(outcome.end_s),
        outcome.replayed, result + did,
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def summary(outcomes: list[Outcome]) -> str:
    """Return what all drills come to: how many went on, with which bits, how soon."""
    happened = [outcome for outcome in outcomes if outcome.happened]
    went_on = sum(outcome.went_on for outcome in happened)
    equal = sum(outcome.differs == [] for outcome in happened)
    by_kind: dict[str, list[float]] = {}
    for outcome in happened:
        if outcome.next_step_s is not None:
            by_kind.setdefault(outcome.kind, []).append(outcome.next_step_s)
    parts = [
        f"{kind} {statistics.median(times):.1f}/{max(times):.1f}"
        for kind, times in by_kind.items()
    ]
    return (
        f"{len(outcomes)} drills, {len(happened)} happened: {went_on} went on, {equal}"
        " had equal bits; seconds until the next step, median/largest: "
        + (", ".join(parts) or "none")
    )


def wanted(options: argparse.Namespace) -> list[Drill]:
    """Return the drills that the options choose."""
    drills = every_drill() if options.all else chosen_drills()
    return [
        drill
        for drill in drills
        if options.layout in (None, drill.layout)
        and options.process in (None, drill.process)
        and options.fault in (None, drill.fault)
        and options.phase in (None, drill.phase)
    ]


def make_all(drills: list[Drill], folder: Path, record: Path | None) -> list[Outcome]:
    """Make drills one after another; print and record each."""
    (folder / "inputs").mkdir()
    inputs = make_inputs(folder / "inputs")
    whole: dict[str, Run] = {}
    outcomes = []
    with ScoringService() as service:
        for number, drill in enumerate(drills):
            reason = hindrance(drill, folder)
            if reason is not None:
                print(f"{drill.layout:8}{drill.happening} is not made: {reason}")
                continue

            layout = replace((LAYOUTS | SURROUNDED)[drill.layout], stall_s=STALL_S)
            if layout.grader == "service":
                changes = (*layout.changes, f"reward.url='{service.url}'")
                layout = replace(layout, changes=changes)
            if drill.layout not in whole:
                whole[drill.layout] = layout.run(inputs, folder / drill.layout)
                code, output = whole[drill.layout].process([])
                assert code == 0, output

            log = folder / f"drill-{number}.log"
            run = layout.run(inputs, folder / f"drill-{number}")
            with surrounding(drill, run, service) as surroundings:
                outcome = make(drill, layout, whole[drill.layout], surroundings, log)
            outcomes.append(outcome)
            print(row(outcome), flush=True)
            if record is not None:
                with record.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=LAYOUTS | SURROUNDED)
    parser.add_argument("--process")
    parser.add_argument("--fault", choices=(*FAULTS, *OUTSIDE))
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--all", action="store_true", help="not only the fixed choice")
    parser.add_argument("--list", action="store_true", help="say which drills, only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to append to")
    options = parser.parse_args()

    drills = wanted(options)
    if options.list:
        for drill in drills:
            print(f"{drill.layout:8}{drill.happening}")
        return 0
    if not drills:
        parser.error("no drill has this layout, process, fault and phase; see --list")

    print(NOT_THERE, _TITLES, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        outcomes = make_all(drills, Path(name), options.json)
    print(summary(outcomes))
    return any(not each.happened or each.differs != [] for each in outcomes)


if __name__ == "__main__":
    sys.exit(main())
