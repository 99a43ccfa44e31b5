"""One drill: a run under its supervisor, watched from outside, and what became of it.

Deliberately not here: which drills there are (`tests/drill_choice.py`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from controllers.run.faults import FAULTS
from tests.drill_choice import Drill
from tests.faults import BEGUN, HAPPENED, OUTSIDE, SUPERVISED
from tests.kills import ROOT, Run
from tests.layouts import Layout, differing, recorded
from tests.surroundings import Surroundings
from verl_ray.checkpoint.snapshot_files import left_by
from verl_ray.tracking.jsonl import METRICS

PATIENCE_S = 180.0
"""Longest time in seconds without a new step or a word of the run."""

_NOTICED = "starts again"
"""What a run says of every process that it has lost, its driver included."""


@dataclass
class Course:
    """What was seen of a run, with times in seconds since 1970.

    Attributes:
        lines: What it said: the time of each line, and its text.
        finished: The time at which each step was first recorded.
        code: Its exit code; None if it did not end by itself.
        ended: The time of its end.
        rest: The beginning of a line that is being written.
    """

    lines: list[tuple[float, str]] = field(default_factory=list)
    finished: dict[int, float] = field(default_factory=dict)
    code: int | None = None
    ended: float = 0.0
    rest: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """A line of the table; seconds count from the fault.

    Attributes:
        layout: Name of the layout of the run.
        process: Name of the process.
        kind: What the process is.
        fault: What happened to it.
        phase: When it happened.
        happened: Whether the phase came, and the process was there.
        went_on: Whether the run came to its end by itself.
        noticed_s: Until the run recorded it or said so; None if it did neither.
        next_step_s: Until the next new step was recorded; None if there was none.
        end_s: Until the end of the run.
        replayed: Number of steps that were trained again.
        cures: What the run did, by its record, and the drivers that followed.
        differs: What has other bits than without the fault, among metrics, weights and
            states of the optimizer, what is left in shared memory, and what was wrong
            around the run; None where the run did not come to its end.
        said: The final output of a run that did not go on.
    """

    layout: str
    process: str
    kind: str
    fault: str
    phase: str
    happened: bool
    went_on: bool
    noticed_s: float | None
    next_step_s: float | None
    end_s: float | None
    replayed: int
    cures: list[str]
    differs: list[str] | None
    said: str


def follow(
    run: Run, fault: str, output: Path, environment: Mapping[str, str]
) -> Course:
    """Make a run with a fault; return what was seen of it."""
    course = Course()
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with output.open("wb") as written, output.open("rb") as said:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tests.faults", SUPERVISED, fault, "--", *run.arguments],
            cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _watch(supervisor, run, said, course)
        finally:
            # Of a run that does not go on, or where the program is interrupted.
            if supervisor.poll() is None:
                _end(supervisor)
        course.ended = time.time()
        look(run, said, course)
    return course


def _watch(
    supervisor: subprocess.Popen[bytes], run: Run, said: BinaryIO, course: Course
) -> None:
    """Note what is seen of a run until its end, or until nothing comes any more."""
    news = time.monotonic()
    while supervisor.poll() is None:
        time.sleep(0.02)
        if look(run, said, course):
            news = time.monotonic()
        if time.monotonic() - news > PATIENCE_S:
            return
    course.code = supervisor.returncode


def look(run: Run, said: BinaryIO, course: Course) -> bool:
    """Note new lines and new steps; return whether there are any."""
    now = time.time()
    *lines, course.rest = (course.rest + said.read()).split(b"\n")
    course.lines += [(now, line.decode(errors="replace")) for line in lines]
    path = run.folder / METRICS
    is_new = bool(lines)
    if path.exists():
        written = path.stat().st_mtime
        # The first line is of step 0, and a last one may be half written.
        for step in range(path.read_text().count("\n")):
            if step not in course.finished:
                course.finished[step] = written
                is_new = True
    return is_new


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    """Kill a run that does not go on, all of its processes."""
    family = psutil.Process(supervisor.pid).children(recursive=True)
    # Nobody starts another driver then.
    supervisor.kill()
    supervisor.wait()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def make(
    drill: Drill, layout: Layout, whole: Run, surroundings: Surroundings, output: Path
) -> Outcome:
    """Make one drill; return what became of it.

    Args:
        drill: The drill.
        layout: Its layout.
        whole: The run of the same layout that nothing happened to.
        surroundings: What the run stands on.
        output: File for what the run says.
    """
    folder = surroundings.folder
    run = layout.run(whole.inputs, folder)
    with surroundings.acting():
        course = follow(run, drill.happening, output, surroundings.environment)
    happened = recorded(folder / HAPPENED)
    began = float(str(happened[0]["time"])) if happened else course.ended

    def since(times: list[float]) -> float | None:
        later = [moment - began for moment in times if moment > began]
        return round(min(later), 2) if happened and later else None

    notices = [(moment, line) for moment, line in course.lines if _NOTICED in line]
    faults = recorded(folder / FAULTS)
    drivers = [line for _, line in notices if "the driver ended" in line]
    went_on = course.code == 0
    said = "\n".join(line for _, line in course.lines)
    return Outcome(
        layout=drill.layout,
        process=drill.process,
        kind=drill.kind,
        fault=drill.fault,
        phase=drill.phase,
        happened=bool(happened)
        and (happened[0]["found"] != 0 or drill.fault in OUTSIDE),
        went_on=went_on,
        noticed_s=since(
            [
                *(float(str(fault["time"])) for fault in faults),
                *(moment for moment, _ in notices),
            ]
        ),
        next_step_s=since(list(course.finished.values())),
        end_s=since([course.ended]),
        replayed=_replayed(run, layout),
        cures=[
            *(str(fault["cure"]) for fault in faults),
            *("another driver" for _ in drivers),
        ],
        differs=[
            *differing(layout, whole, run),
            *(f"{path} is left" for path in left_by(str(folder))),
            *surroundings.wrong,
        ]
        if went_on
        else None,
        said="" if went_on else said[-4000:],
    )


def _replayed(run: Run, layout: Layout) -> int:
    """Return how many steps came to their training again, after they had before."""
    phases = [str(begun["phase"]) for begun in recorded(run.folder / BEGUN)]
    return max(0, phases.count("switching to training") - layout.steps)
