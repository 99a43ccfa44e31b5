"""The record of a run, also of one that crashed, goes on, or has only begun."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.report.recorded_runs import (
    ACCURACY,
    drive_by,
    rollouts,
    write_run,
    write_trace,
)
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import RunStatus, write_status
from verl_ray.report import record, samples
from verl_ray.report.findings import findings
from verl_ray.report.lines import MainMetric
from verl_ray.report.record import fingerprint, read_run
from verl_ray.tracking.held_out_responses import HeldOutResponse
from verl_ray.tracking.history import HISTORY, begin_segment, wall_s
from verl_ray.tracking.jsonl import JsonlTracker
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
    sampled = run.sampled
    assert len(sampled.rows) == sampled.num_rows == 4 * 2 * 2 + 2 * 2
    assert sampled.num_steps == sampled.recorded_steps == 4 + 2
    row = next(
        row for row in sampled.rows if row.source == "training" and row.member == 1
    )
    assert (row.step, row.group, row.prompt, row.response) == (1, 100, "1+2=", "3")
    assert (row.reward, row.scores) == (1.0, {"reward": 1.0, "style": None})
    assert (row.finish, row.failure) == ("length", "style: timeout")
    assert row.output == "1+2="
    assert row.tokens is not None
    assert row.tokens.pieces == list("1+2=3")
    assert row.tokens.mask.tolist() == [False] * 4 + [True]
    assert row.tokens.rollout_log_probs[4] == -0.5 and row.tokens.versions[4] == 0
    assert np.isnan(row.tokens.rollout_log_probs[:4]).all()
    assert row.tokens.total == 5


def test_held_out_episodes_are_read_with_their_turns(tmp_path: Path) -> None:
    # The policy sampled "go" twice.
    episode = rollouts(3, [("ask", "go")], members=1, observation="ok").tokens
    single = HeldOutResponse(0, "sums", "1+1=", "2", "2", 1.0, "stop")
    several = HeldOutResponse(
        1, "games", "ask", "gookgo", "", 0.5, "stop", end="completed", num_turns=2,
        tokens=episode,
    )  # fmt: skip
    tracker = JsonlTracker(tmp_path)
    tracker.responses(3, [single, several])
    tracker.close(failed=False)

    first, second = read_run(tmp_path, most_rows=9).sampled.rows
    assert (first.num_turns, first.tokens, second.num_turns) == (1, None, 2)
    assert second.tokens is not None and second.tokens.pieces == list("askgookgo")
    assert second.tokens.mask.tolist() == [bool(int(bit)) for bit in "000110011"]
    assert second.tokens.rollout_log_probs[3] == -0.5


def test_few_rows_are_whole_groups_of_all_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"), most_rows=12)
    training = [row for row in run.sampled.rows if row.source == "training"]
    assert {row.step for row in training} == {1, 2, 3, 4}
    assert {row.group % 100 for row in training} == {0}
    assert [row.member for row in training] == [0, 1] * 4


def test_steps_are_chosen_evenly_where_there_are_many(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, most_mb=10)
    for step in range(1, 202):
        files.write(step, rollouts(step, [("a", "b")], members=1).encoded())
    sampled = read_run(tmp_path, most_rows=1000).sampled
    assert (sampled.num_rows, sampled.num_steps, sampled.recorded_steps) == (
        100,
        100,
        201,
    )
    steps = [row.step for row in sampled.rows]
    assert len(steps) == 100 and (steps[0], steps[-1]) == (1, 201)
    assert max(np.diff(steps)) == 3 and min(np.diff(steps)) == 2


def test_long_rows_are_read_within_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [("a" * 6, "b" * 4)] * 4
    RolloutFiles(tmp_path, most_mb=10).write(1, rollouts(1, texts).encoded())
    monkeypatch.setattr(samples, "MOST_TOKENS_OF_ROW", 8)
    monkeypatch.setattr(samples, "MOST_TOKENS", 25)
    # Three of the eight rows have their tokens, the first eight of ten each.
    rows = read_run(tmp_path, most_rows=8).sampled.rows
    tokens = [row.tokens for row in rows if row.tokens is not None]
    assert len(rows) == 8
    assert [(len(row.pieces), row.total) for row in tokens] == [(8, 10)] * 3

    # A row has eleven characters, so the fourth one is too long for 40 of them, and the
    # group that it belongs to goes with it.
    monkeypatch.setattr(samples, "MOST_CHARACTERS", 40)
    sampled = read_run(tmp_path, most_rows=8).sampled
    assert [(row.group, row.member) for row in sampled.rows] == [(100, 0), (100, 1)]
    assert sampled.num_rows == 8


def test_a_crashed_run_is_read_up_to_its_torn_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="crashed")
    ended = Owner.here()
    ended = Owner(ended.boot, ended.namespace, ended.pid, ended.started + 1)
    history = (folder / HISTORY).read_text()
    drive_by(folder, ended)
    write_status(folder, status_of(ended))
    # Its last line was written 500 s after it began.
    os.utime(folder / "metrics.jsonl", (1500.0, 1500.0))
    run = read_run(folder, most_rows=10)
    assert (run.state, run.step, run.damage) == ("killed", 4, [])
    assert [segment.ending for segment in run.segments] == ["killed"]
    assert wall_s(list(run.segments)) == 500.0
    (lost,) = [
        finding
        for finding in findings(run.lines, run.config, run.segments)
        if finding.kind == "restarts"
    ]
    assert "killed in 1 of its 1 starts" in lost.text and lost.step == 4
    # No file changes when a process is killed.
    seen = fingerprint(folder)

    (folder / HISTORY).write_text(history)
    write_status(folder, status_of(Owner.here()))
    run = read_run(folder)
    assert run.state == "running" and run.segments[-1].ended_s is None
    assert fingerprint(folder) != seen
    elsewhere = Owner(1, 2, os.getpid(), 3)
    os.utime(folder / "metrics.jsonl")
    drive_by(folder, elsewhere)
    write_status(folder, status_of(elsewhere))
    assert read_run(folder).state == "running"
    (folder / "status.json").unlink()
    old_s = time.time() - 700
    os.utime(folder / "metrics.jsonl", (old_s, old_s))
    run = read_run(folder)
    assert (run.state, run.segments[-1].ending) == ("silent", "killed")


def test_a_run_that_resumes_is_not_judged_by_the_driver_before(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="stopped")
    ended = Owner.here()
    ended = Owner(ended.boot, ended.namespace, ended.pid, ended.started + 1)
    write_status(folder, status_of(ended))
    begin_segment(folder, 4, time.time() + 1, "verl-ray train", {"torch": "2.11.0"})
    run = read_run(folder, most_rows=1)
    assert (run.state, run.status) == ("running", None)
    assert (run.command, run.versions) == ("verl-ray train", {"torch": "2.11.0"})


def test_files_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_trace(folder)
    faults = [{"time": 999.0, "step": 1}, {"time": 1001.0, "step": 2}]
    (folder / "faults.jsonl").write_text("\n".join(map(json.dumps, faults)))
    run = read_run(folder, most_rows=1)
    assert [fault["step"] for fault in run.faults] == [2] and run.trace
    os.utime(folder / "trace.json", (999.0, 999.0))
    assert read_run(folder, most_rows=1).trace == []


def test_a_large_trace_has_its_names_and_its_newest_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    write_trace(folder)
    size = (folder / "trace.json").stat().st_size
    whole = read_run(folder, most_rows=1)
    assert whole.skipped_trace_bytes == 0
    monkeypatch.setattr(record, "_TRACE_HEAD_BYTES", size // 2)
    monkeypatch.setattr(record, "_TRACE_BYTES", 150)
    run = read_run(folder, most_rows=1)
    assert run.skipped_trace_bytes == size - size // 2 - 150
    assert [event["name"] for event in run.trace if event["ph"] == "X"] == ["update"]
    assert any(event["name"] == "process_name" for event in run.trace)


def test_scores_are_those_of_recorded_evaluations(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    # A process ended between the scores of step 6 and its line.
    path = folder / "evaluations" / "step_000004.jsonl"
    shutil.copyfile(path, path.with_name("step_000006.jsonl"))
    assert list(read_run(folder, most_rows=1).scores) == [0, 4]


def test_the_main_metric_comes_first(tmp_path: Path) -> None:
    other = "val-core/a_source/reward/best@2/mean"
    aside = "val-aux/sums/score"
    folder = write_run(tmp_path / "run", extra={other: 1.0, aside: 2.0})
    assert [course.metric for course in read_run(folder).held_out] == [ACCURACY, other]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["run"] |= {"best_metric": aside, "best_is": "lowest"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    courses = read_run(folder).held_out
    assert [course.metric for course in courses] == [aside, other, ACCURACY]
    assert [course.should_fall for course in courses] == [True, False, False]
    assert courses[2].values == {0: 0.375, 4: 0.625} and courses[2].best_step == 4
    # The first of the best ones.
    values = {0: 2.0, 3: 1.0, 6: 1.0, 9: 2.0}
    assert record.HeldOutCourse("loss", True, values).best_step == 3
    assert record.HeldOutCourse("score", False, values).best_step == 0


def test_the_main_metric_is_that_of_the_task() -> None:
    assert {
        task: MainMetric.of({"task": task}).pattern
        for task in ("rl", "sft", "reward_model", "own.task", None)
    } == {
        "rl": "val-core/*/mean@*",
        "sft": "val-core/held_out/loss",
        "reward_model": "val-core/held_out/pair_accuracy",
        "own.task": "val-core/*",
        None: "val-core/*",
    }


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="failed")
    status = replace(status_of(Owner.here()), ended="ended: WorkerDied")
    write_status(folder, status)
    fault = {"role": "actor", "rank": 1, "kind": "died", "step": 3, "cause": "it left"}
    (folder / "faults.jsonl").write_text(json.dumps(fault))
    reason = read_run(folder, most_rows=1).reason
    assert reason == "WorkerDied; last fault: actor rank 1 died at step 3: it left"


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
    training = [row for row in run.sampled.rows if row.source == "training"]
    assert {row.step for row in training} == {1, 3, 4}
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


def test_metrics_that_cannot_be_read_are_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    huge = '{"training/global_step": 1, "a": %s}\n'
    metrics.write_text(huge % ("1" * 5000) + huge % ("1" * 400) + huge % "2")
    run = read_run(folder)
    assert run.lines == [{"training/global_step": 1.0, "a": 2.0}]
    assert run.damage == ["metrics.jsonl: 1 lines of 3 cannot be read"]
    metrics.unlink()
    # Nobody can read the memory of a process at address 0.
    metrics.symlink_to("/proc/self/mem")
    run = read_run(folder)
    assert run.lines == [] and "metrics.jsonl cannot be read" in run.damage[0]


def test_a_folder_without_a_record_is_a_run_that_is_new(tmp_path: Path) -> None:
    run = read_run(tmp_path, most_rows=10)
    assert (run.state, run.step, run.total_steps) == ("new", 0, None)
    assert run.sampled.rows == []


def test_errors_in_the_logs_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = ["all is well", "ValueError: 1 of 7", "ValueError: 2 of 7", "no error"]
    lines += ["  Error: x", "AssertionError", "an Error", "ERROR 12 failed"]
    lines += ["Traceback (most recent call last):", "0 ERRORS"]
    lines += ["WANDB_API_KEY=0123456789abcdef", '{"api_key": "abcdefgh1"}']
    lines += ["Authorization: Bearer abc.def.ghi", "http://me:hunter2@host/x"]
    lines += ["key hf_abcdefghijklmnopqrst", "api_key=None password: expected a string"]
    lines += ["WARNING 12 slow", "UserWarning: 1", "a warning", "WARNING 13 slow"]
    (logs / "actor-0.log").write_text("\n".join(lines))
    (logs / "old-0.log").write_text("a.OSError: old")
    os.utime(logs / "old-0.log", (1000.0, 1000.0))
    run = read_run(tmp_path, most_rows=10)
    warnings = [error for error in run.log_errors if error.is_warning]
    assert [(warning.text, warning.count) for warning in warnings] == [
        ("WARNING 13 slow", 2),
        ("UserWarning: 1", 1),
    ]
    assert [end.file for end in run.log_ends] == ["actor-0.log", "old-0.log"]
    assert run.log_ends[0].text.endswith("\nWARNING 13 slow")
    errors = [error for error in run.log_errors if not error.is_warning]
    assert [(error.file, error.text, error.count) for error in errors] == [
        ("old-0.log", "a.OSError: old", 1),
        ("actor-0.log", "ValueError: 2 of 7", 2),
        ("actor-0.log", "  Error: x", 1),
        ("actor-0.log", "AssertionError", 1),
        ("actor-0.log", "ERROR 12 failed", 1),
        ("actor-0.log", "Traceback (most recent call last):", 1),
    ]

    assert "password: expected" in run.log_ends[0].text
    hidden = {"abcdefgh1", "0123456789abcdef", "hunter2", "abc.def.ghi", "klmnopqrst"}
    assert not any(word in str(run.log_ends) for word in hidden)
    assert run.log_ends[0].text.count("(masked)") == len(hidden)

    monkeypatch.setattr(record, "_LOG_BYTES", 24)
    run = read_run(tmp_path, most_rows=10)
    assert [error.text for error in run.log_errors] == ["WARNING 13 slow"]
    assert "the 1 oldest were not searched" in run.damage[0]


def test_the_fingerprint_changes_with_the_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="crashed")
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x")
    assert fingerprint(folder) != before
