"""`verl-ray watch` shows a run from its folder alone."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands import watch
from controllers.commands.watch import FAILED, STOPPED, WatchedRun
from tests.controllers.commands.test_status import ROW, status_here
from tests.report.recorded_runs import drive_by
from tests.tracking.terminals import Terminal
from verl_ray.ownership import Owner
from verl_ray.profiling.phases import Count
from verl_ray.profiling.process_table import (
    RunStatus,
    read_status,
    uptime_s,
    write_status,
)
from verl_ray.tracking.history import begin_segment


def line(step: int, **metrics: float | None) -> str:
    names = {"training/global_step": step, "timing_s/step": 3.0, "actor/loss": 2.5}
    return json.dumps({**names, **metrics}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {total_steps: 9}")
    (folder / "metrics.jsonl").write_text(line(1) + line(2))
    write_status(folder, status_here())
    return folder


def status_of(folder: Path) -> RunStatus:
    status = read_status(folder)
    assert status is not None
    return status


def test_lines_are_read_once_and_whole_and_anew_where_the_file_is_replaced(
    run: Path,
) -> None:
    watched = WatchedRun(run, status_of(run))
    watched.look()
    # Lines of a file have no times: 3 s each, 7 to go.
    assert watched.take_lines() == [
        "step 1/9  loss 2.5  3.00 s  24s left",
        "step 2/9  loss 2.5  3.00 s  21s left",
    ]

    path = run / "metrics.jsonl"
    whole = line(3, **{"val-core/sums/acc/mean@1": None})
    with path.open("a") as file:
        file.write(whole[:20])
    watched.look()
    assert watched.take_lines() == []
    with path.open("a") as file:
        file.write(whole[20:] + "no line\n")
    watched.look()
    (shown,) = watched.take_lines()
    assert shown == "step 3/9  loss 2.5  held-out sums/acc/mean@1 nan  3.00 s  18s left"

    # The run goes on from step 1.
    (run / "other").write_text(line(1) + line(2, **{"timing_s/testing": 4.0}))
    (run / "other").rename(path)
    watched.look()
    assert watched.view.course is not None
    assert watched.take_lines()[1:] == ["step 2/9  loss 2.5  3.00 s  35s left"]
    assert watched.view.course.held_out == []

    # It is for fewer steps than before.
    config = run / "config.yaml"
    config.write_text("run: {total_steps: 5}")
    os.utime(config, ns=(0, config.stat().st_mtime_ns + 1))
    with path.open("a") as file:
        file.write(line(3))
    watched.look()
    (shown,) = watched.take_lines()
    assert shown.startswith("step 3/5  loss 2.5  3.00 s  ")


def test_the_block_is_that_of_the_status_and_the_history(run: Path) -> None:
    count = Count(3, 16, "responses scored")
    write_status(run, status_here(count=count, warnings=("the disk is full",)))
    assert status_of(run).count == count
    begin_segment(run, 0, begun_s=1.0)
    watched = WatchedRun(run, status_of(run))
    watched.look()
    assert watched.view.elapsed_s is not None and watched.view.elapsed_s > 1e9
    lines = [text.plain for text in watched.view.lines(199, 20)]
    assert lines[0].startswith("first  step 2/9  ━━━━━━╸")
    assert "step 3/5: updating  ━━━━━╸" in lines[1]
    assert lines[1].endswith("  3/16 responses scored")
    assert f"actor ×4 update {ROW.phase} 12 s" in lines[-2]
    assert lines[-1] == "warning   the disk is full"


@pytest.mark.parametrize(
    ("ended", "code"),
    [("ended", 0), ("ended: Interrupted", STOPPED), ("ended: WorkerDied", FAILED)],
)
def test_the_end_of_a_run_is_the_exit_code(
    ended: str, code: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No other driver follows one that has failed so long ago.
    minute_ago = uptime_s() - 61
    write_status(run, status_here(ended=ended, rows=(), uptime_s=minute_ago))
    assert main(["watch", str(run)]) == code
    last, state = capsys.readouterr().out.splitlines()
    assert last == "step 2/9  loss 2.5  3.00 s  21s left"
    assert state.startswith(f"the run has {ended}, ")


def test_another_driver_may_follow_one_that_was_killed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_here()
    # A process of this machine whose start was another one.
    gone = replace(status, driver=status.driver.rpartition("-")[0] + "-1")
    write_status(run, gone)
    watched = WatchedRun(run, gone)
    watched.look()
    assert not watched.has_ended
    assert "another driver may follow within 60 s" in watched.view.doing.text
    write_status(run, status)
    watched.look()
    assert watched.view.doing.text == status.phase

    # One that has failed says so. The next has begun before it writes its own status.
    write_status(run, replace(status, ended="ended: WorkerDied", rows=()))
    watched.look()
    assert not watched.has_ended
    assert "ended: WorkerDied, 0 s ago; another driver may" in watched.view.doing.text
    # Somebody has set the clock back in the meantime.
    begin_segment(run, 2, begun_s=time.time() - 3600)
    drive_by(run, Owner.of(os.getppid()))
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.0)
    watched.look()
    assert watched.view.doing.text == "starting" and not watched.has_ended

    other = Owner.parse(gone.driver)
    assert other is not None
    drive_by(run, other)
    write_status(run, gone)
    watched.look()
    assert "does not run any more" in watched.ending and watched.exit_code == FAILED


def test_a_terminal_keeps_the_last_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    terminal: io.StringIO = Terminal()
    write_status(run, status_here(ended="ended", rows=()))
    watched = WatchedRun(run, status_of(run))
    watched.look()
    watch._show_block(watched, terminal)
    assert terminal.getvalue().endswith("step 2/9  loss 2.5  3.00 s  21s left\n")


def test_what_is_no_run_cannot_be_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "this folder has no status.json" in capsys.readouterr().err
