"""The record of a run, also of one that crashed, goes on, or has only begun."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np

from tests.report.recorded_runs import ACCURACY, rollouts, write_run
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import RunStatus, write_status
from verl_ray.report.record import fingerprint, read_run
from verl_ray.tracking.rollouts import RolloutFiles


def status_of(owner: Owner) -> RunStatus:
    return RunStatus(
        driver=str(owner),
        pid=owner.pid,
        host=socket.gethostname(),
        written=time.time(),
        interval_s=3.0,
        ended="",
        phase="step 3/4: updating",
        rows=(),
        processes=(),
    )


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = read_run(folder, most_rows=100)
    assert (run.name, run.state, run.step, run.total_steps) == (
        "sums",
        "finished",
        4,
        4,
    )
    assert run.evaluations == {0: {ACCURACY: 0.375}, 4: {ACCURACY: 0.625}}
    assert list(run.scores) == [0, 4] and run.damage == []

    # Two groups of two in each of four steps, and two problems in each evaluation.
    assert len(run.rows) == run.recorded_rows == 4 * 2 * 2 + 2 * 2
    row = next(row for row in run.rows if row.source == "training" and row.member == 1)
    assert (row.step, row.group, row.prompt, row.response) == (1, 100, "1+2=", "3")
    assert (row.reward, row.scores) == (1.0, {"reward": 1.0, "style": None})
    assert (row.finish, row.failure) == ("length", "style: timeout")
    assert row.tokens is not None
    assert row.tokens.pieces == list("1+2=3")
    assert row.tokens.mask.tolist() == [False] * 4 + [True]
    assert row.tokens.rollout_log_probs[4] == -0.5 and row.tokens.versions[4] == 0
    assert np.isnan(row.tokens.rollout_log_probs[:4]).all()


def test_few_rows_are_whole_groups_of_all_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"), most_rows=12)
    training = [row for row in run.rows if row.source == "training"]
    assert {row.step for row in training} == {1, 2, 3, 4}
    assert {row.group % 100 for row in training} == {0}
    assert [row.member for row in training] == [0, 1] * 4


def test_steps_are_chosen_evenly_where_there_are_many(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, most_mb=10)
    for step in range(1, 202):
        files.write(step, rollouts(step, [("a", "b")], members=1).encoded())
    steps = [row.step for row in read_run(tmp_path, most_rows=1000).rows]
    assert len(steps) == 100 and (steps[0], steps[-1]) == (1, 201)
    assert max(np.diff(steps)) == 3 and min(np.diff(steps)) == 2


def test_a_crashed_run_is_read_up_to_its_torn_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="crashed")
    ended = Owner.here()
    ended = Owner(ended.boot, ended.namespace, ended.pid, ended.started + 1)
    write_status(folder, status_of(ended))
    run = read_run(folder, most_rows=10)
    assert (run.state, run.step, run.damage) == ("killed", 4, [])

    write_status(folder, status_of(Owner.here()))
    assert read_run(folder).state == "running"
    elsewhere = Owner(1, 2, os.getpid(), 3)
    write_status(folder, status_of(elsewhere))
    assert read_run(folder).state == "running"
    (folder / "status.json").unlink()
    old_s = time.time() - 700
    os.utime(folder / "metrics.jsonl", (old_s, old_s))
    assert read_run(folder).state == "silent"


def test_what_is_damaged_is_named_and_hides_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[2] = '{"training/global_st\0'
    metrics.write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text("a: [")
    (folder / "history.jsonl").write_text("[]\n")
    (folder / "status.json").write_text("{")
    (folder / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1")
    (folder / "evaluations" / "step_000004.jsonl").write_text("{}\n")
    (folder / "faults.jsonl").write_text('{"step": 3, "kind": "died"}\n{"st')

    run = read_run(folder, most_rows=100)
    assert [line["training/global_step"] for line in run.lines] == [0, 1, 3, 4]
    assert run.name == "run" and run.config == {} and run.state == "silent"
    assert {row.step for row in run.rows if row.source == "training"} == {1, 3, 4}
    assert [fault["step"] for fault in run.faults] == [3]
    named = [
        "config.yaml",
        "history.jsonl",
        "status.json",
        "step_000002",
        "step_000004",
    ]
    for name in ["1 lines of 5", *named]:
        assert any(name in text for text in run.damage), name


def test_a_folder_without_a_record_is_a_run_that_is_new(tmp_path: Path) -> None:
    run = read_run(tmp_path, most_rows=10)
    assert (run.state, run.step, run.total_steps, run.rows) == ("new", 0, None, [])


def test_errors_in_the_logs_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "logs").mkdir()
    lines = ["all is well", "ValueError: 1 of 7", "ValueError: 2 of 7", "no error"]
    (folder / "logs" / "actor-0.log").write_text("\n".join(lines))
    (error,) = read_run(folder, most_rows=10).log_errors
    assert (error.file, error.text, error.count) == (
        "actor-0.log",
        "ValueError: 2 of 7",
        2,
    )


def test_the_fingerprint_changes_with_the_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="crashed")
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x")
    assert fingerprint(folder) != before
