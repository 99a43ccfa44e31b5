"""The table of drills: that its faults can happen, and that nothing is left out."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import psutil
import pytest

from tests.controllers.runs import Inputs
from tests.drill_choice import (
    COMMON_PROCESSES,
    FAULTS,
    PHASES,
    Drill,
    chosen_drills,
    every_drill,
)
from tests.drill_course import Course, Outcome, look
from tests.drills import row, summary
from tests.faults import HAPPENED, OUTSIDE, Fault
from tests.kills import Run
from tests.layouts import LAYOUTS, SURROUNDED, recorded
from tests.surroundings import HOUR_S, ScoringService, hindrance, surrounding
from tests.waiting import PATIENCE_S, until
from verl_ray.tracking.jsonl import METRICS

# Asks for memory at each word.
ASKS = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    try:
        bytearray(2**30)
        print("had it", flush=True)
    except MemoryError:
        print("had none", flush=True)
"""


def test_the_table_has_each_process_fault_and_phase() -> None:
    chosen, every = list(chosen_drills()), set(every_drill())
    assert len(set(chosen)) == len(chosen) and set(chosen) <= every
    assert {drill.fault for drill in chosen} == {*FAULTS, *OUTSIDE}
    assert {drill.kind for drill in chosen} == {drill.kind for drill in every}
    assert {drill.layout for drill in chosen} == set(LAYOUTS | SURROUNDED)
    for process in ("actor-0", "rollout-0", "driver"):
        killed = [drill.phase for drill in chosen if drill.process == process]
        assert set(PHASES) <= set(killed)
    assert set(COMMON_PROCESSES) <= {drill.process for drill in chosen}


def test_every_drill_can_be_written_and_read() -> None:
    for drill in every_drill():
        fault = Fault.parse(drill.happening)
        assert (fault.action, fault.process) == (drill.fault, drill.process)
        assert str(fault) == drill.happening


@pytest.mark.processes
def test_a_process_is_slow_and_has_no_memory(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "actor-0.log"
    with log.open("w") as output:
        asking = subprocess.Popen(
            [sys.executable, "-c", ASKS],
            stdin=subprocess.PIPE,
            stdout=output,
            text=True,
        )
    assert asking.stdin is not None
    try:
        _wait_for(log, "ready")
        print("go", file=asking.stdin, flush=True)
        _wait_for(log, "had it")

        Fault("updating", 1, "starve", "actor-0").happen(logs)
        print("go", file=asking.stdin, flush=True)
        _wait_for(log, "had none")

        Fault("updating", 1, "slow", "actor-0").happen(logs)
        statuses = set()
        end = time.monotonic() + PATIENCE_S
        while not statuses >= {psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING}:
            assert time.monotonic() < end, statuses
            statuses.add(psutil.Process(asking.pid).status())
    finally:
        asking.kill()
        asking.wait()
    found = [line["found"] for line in recorded(tmp_path / HAPPENED)]
    assert found == [1, 1]


NOW = "import psutil, time; print(time.time(), psutil.boot_time())"


@pytest.mark.processes
def test_the_clock_and_the_start_of_the_machine_are_set(tmp_path: Path) -> None:
    drill = Drill("long", "clock", "hour", "learn")
    reason = hindrance(drill, tmp_path)
    if reason is not None:
        pytest.skip(reason)
    run = Run(Inputs(tmp_path, tmp_path, tmp_path), tmp_path / "run", "synchronous", 2)
    with ScoringService() as service, surrounding(drill, run, service) as surroundings:
        (shift,) = tmp_path.glob("*.shift")
        shift.write_bytes(struct.pack("=q", HOUR_S))
        output = subprocess.check_output(
            [sys.executable, "-c", NOW],
            env={**os.environ, **surroundings.environment}, text=True,
        )  # fmt: skip
    clock, start = map(float, output.split())
    assert clock - time.time() == pytest.approx(HOUR_S, abs=60)
    assert start - psutil.boot_time() == pytest.approx(HOUR_S, abs=2)


def _wait_for(log: Path, last: str) -> None:
    until(lambda: log.read_text().endswith(f"{last}\n"))


def test_words_and_steps_are_seen_once_they_are_whole(tmp_path: Path) -> None:
    run = Run(Inputs(tmp_path, tmp_path, tmp_path), tmp_path, "synchronous", 2)
    course = Course()
    assert look(run, BytesIO(b"a\nstarts"), course)
    # It ends within a letter.
    assert not look(run, BytesIO(b" again \xc3"), course)
    assert look(run, BytesIO(b"\xa4\n"), course)
    assert [line for _, line in course.lines] == ["a", "starts again \u00e4"]

    (tmp_path / METRICS).write_text("step 0\nste")
    assert look(run, BytesIO(b""), course)
    assert not look(run, BytesIO(b""), course)
    assert course.finished.keys() == {0}


def test_rows_and_the_summary_say_what_was_seen() -> None:
    equal = Outcome(
        layout="small", process="actor-0", kind="actor", fault="kill", phase="learn", happened=True, went_on=True,
        noticed_s=0.5, next_step_s=8.0, end_s=12.0, replayed=1, cures=["go back"], differs=[], said="",
    )  # fmt: skip
    cells = "small actor-0 kill learn yes 0.5 8.0 12.0 1 equal (go back)"
    assert row(equal).split() == cells.split()

    other = replace(equal, differs=["step 3/loss: 1 and 2"], next_step_s=10.0)
    assert row(other).endswith("DIFFERS step 3/loss: 1 and 2 (go back)")
    ended = replace(
        equal,
        went_on=False,
        next_step_s=None,
        differs=None,
        cures=[],
        said="a\nWorkerDied: b\nc\n",
    )
    cells = "small actor-0 kill learn NO 0.5 - 12.0 1 WorkerDied: b"
    assert row(ended).split() == cells.split()
    missed = replace(equal, happened=False)
    assert "did not happen" in row(missed)
    assert summary([equal, other, ended, missed]) == (
        "4 drills, 3 happened: 2 went on, 1 had equal bits; seconds until the next"
        " step, median/largest: actor 9.0/10.0"
    )
