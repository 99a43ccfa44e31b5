"""`verl-ray status` says what a run does, whatever has become of its driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controllers.command_line import main
from tests.kills import ROOT
from tests.waiting import PATIENCE_S, until
from verl_ray.ownership import Owner
from verl_ray.profiling.phases import Count
from verl_ray.profiling.process_table import (
    STATUS,
    Located,
    ProcessRow,
    RunStatus,
    read_status,
    uptime_s,
    write_status,
)

DRIVER = """
import sys, time
from pathlib import Path
from verl_ray.cluster.whereabouts import keeping_status
from verl_ray.profiling.phases import phase

with phase("step 3/5"), phase("updating"), keeping_status(Path(sys.argv[1])):
    sys.stdin.read()
"""

ROW = ProcessRow(
    "actor",
    (0, 1, 2, 5),
    ("a (10.0.0.1)", "b (10.0.0.2)"),
    "update",
    "3/16 micro-batches",
    12.5,
    "nccl:all_reduce 7: not entered by rank 4",
    "workers/actor.py:88 update",
)


def status_here(*processes: Located, **changes: object) -> RunStatus:
    status = RunStatus(
        driver=str(Owner.here()),
        pid=os.getpid(),
        host=socket.gethostname(),
        written=time.time(),
        interval_s=3.0,
        ended="",
        phase="step 3/5: updating",
        rows=(ROW,),
        processes=processes,
        uptime_s=uptime_s(),
    )
    return replace(status, **changes)


def said(capsys: pytest.CaptureFixture[str], run: Path, code: int = 0) -> str:
    assert main(["status", str(run)]) == code
    return capsys.readouterr().out


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver whose main thread is stuck."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + PATIENCE_S
        while not (tmp_path / STATUS).exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        yield process
        process.kill()


@pytest.mark.processes
def test_a_driver_that_is_stuck_stopped_and_killed(
    driver: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, tmp_path)
    assert f"driver {driver.pid} on {socket.gethostname()} runs\n" in text
    assert "\nstep 3/5: updating, " in text
    first = read_status(tmp_path)
    # A thread writes it, every three seconds.
    until(lambda: read_status(tmp_path) != first)

    stop(driver.pid)
    assert "is stopped (SIGSTOP), and has written nothing for" in said(capsys, tmp_path)
    driver.kill()
    driver.wait()
    text = said(capsys, tmp_path, code=1)
    assert f"driver {driver.pid} on" in text
    assert "does not run any more, and has not said why" in text
    assert "step 3/5: updating" in text  # its last output


@pytest.mark.processes
def test_a_run_that_has_ended_says_so(
    driver: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.communicate("")
    assert driver.returncode == 0
    assert said(capsys, tmp_path).startswith("the run has ended, ")


@pytest.mark.processes
def test_processes_of_this_node_are_looked_at_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def located(rank: int, process: subprocess.Popen[bytes]) -> Located:
        return Located("actor", rank, str(Owner.of(process.pid)))

    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(command) for _ in range(4)]
    try:
        status = status_here(*map(located, range(4), children))
        children[0].kill()
        children[1].kill()
        stop(children[2].pid)
        children[1].wait()
        assert write_status(tmp_path, status)
        text = said(capsys, tmp_path)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert text.splitlines()[-2:] == [
        "now: actor rank 0-1 has ended",
        "now: actor rank 2 is stopped (SIGSTOP)",
    ]
    (row,) = [line for line in text.splitlines() if line.startswith("actor")]
    cells = "actor 0-2,5 2 nodes update 3/16 micro-batches 12"
    assert row.split() == f"{cells} {ROW.waits_for} {ROW.line}".split()


def test_counts_and_warnings_are_part_of_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = Count(2 << 20, 7 << 20, "bytes")
    status = status_here(count=count, warnings=("the disk is \x1b[1mfull",))
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    lines = said(capsys, tmp_path).splitlines()
    assert lines[1].startswith("step 3/5: updating (2/7 MiB), ")
    assert lines[-1] == "warning: the disk is \\x1b[1mfull"


def test_a_clock_that_was_set_makes_no_driver_late_and_no_process_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an hour, which is what the two times of the same moment differ by."""
    here = Located("actor", 0, str(Owner.here()))
    for hours in (-1, 1):
        status = status_here(here, written=time.time() + hours * 3600)
        write_status(tmp_path, status)
        state, facts, *_, last = said(capsys, tmp_path).splitlines()
        assert state == f"driver {os.getpid()} on {socket.gethostname()} runs"
        assert facts == "step 3/5: updating, 0 s ago"
        assert last.startswith("actor ")


def test_a_driver_of_another_machine_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_here(driver="1-2-3-4", host="elsewhere")
    write_status(tmp_path, replace(status, written=time.time() - 5))
    assert said(capsys, tmp_path).startswith(f"driver {os.getpid()} on elsewhere ran 5")
    write_status(tmp_path, replace(status, written=time.time() - 100))
    assert "ask on its node whether it still runs" in said(capsys, tmp_path)


def test_a_full_disk_leaves_the_old_status(tmp_path: Path) -> None:
    first = status_here()
    assert write_status(tmp_path, first)
    (tmp_path / f"{STATUS}.part").symlink_to("/dev/full")
    assert not write_status(tmp_path, status_here(phase="later"))
    assert read_status(tmp_path) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [STATUS]


def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 2
    assert f"this folder has no {STATUS}" in capsys.readouterr().err
    (tmp_path / STATUS).write_text('{"rows": []}')
    assert main(["status", str(tmp_path)]) == 2
    assert (
        f"{STATUS} cannot be read: it is of another version" in capsys.readouterr().err
    )
