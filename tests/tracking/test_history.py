"""How long the processes of a run took, and on what."""

import math
import os
from pathlib import Path

import pytest

from verl_ray.errors import TrackingError
from verl_ray.tracking.history import (
    HISTORY,
    PREPARING,
    REST,
    REST_OF_STEPS,
    STARTING,
    begin_segment,
    end_segment,
    phase_durations,
    preparing_s,
    read_history,
    ready_segment,
    starting_s,
    wall_s,
)


def test_the_processes_of_a_run_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("verl_ray.tracking.history.time.time", lambda: now[0])

    begin_segment(tmp_path, 0, 1000.0)
    now[0] = 1007.0
    ready_segment(tmp_path, 0, preparing_s=3.0)
    now[0] = 1030.0
    end_segment(tmp_path, 5, "stopped")

    # This one is killed after it wrote a line at 1120.
    begin_segment(tmp_path, 5, 1100.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    os.utime(metrics, (1120, 1120))

    begin_segment(tmp_path, 7, 1200.0)
    now[0] = 1240.0
    history = read_history(tmp_path)
    assert [segment.ending for segment in history] == ["stopped", "killed", "running"]
    assert [segment.first_step for segment in history] == [0, 5, 7]
    assert wall_s(history) == 30 + 20 + 40
    assert starting_s(history) == 4 and preparing_s(history) == 3

    # A driver that was killed before its first checkpoint was of this run, and so was
    # one that its supervisor has replaced.
    end_segment(tmp_path, 8, "finished")
    begin_segment(tmp_path, 0, 1240.0)
    begin_segment(tmp_path, 0, 1240.0)
    assert [segment.ending for segment in read_history(tmp_path)] == [
        "killed",
        "running",
    ]
    end_segment(tmp_path, 0, "failed")
    begin_segment(tmp_path, 0, 1240.0, follows=True)
    endings = [segment.ending for segment in read_history(tmp_path)]
    assert endings == ["killed", "failed", "running"]

    # A run that begins anew has no past.
    end_segment(tmp_path, 0, "failed")
    begin_segment(tmp_path, 0, 1240.0, "verl-ray train", {"torch": "2.11.0"})
    (begun,) = read_history(tmp_path)
    assert begun.command == "verl-ray train" and begun.versions == {"torch": "2.11.0"}
    # Processes of earlier versions noted neither.
    assert history[0].command == "" and history[0].versions == {}


def test_a_damaged_history_is_named_and_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / HISTORY).write_text("[1]\n")
    with pytest.raises(TrackingError, match=r"history\.jsonl: cannot be read"):
        read_history(tmp_path)
    assert read_history(tmp_path / "elsewhere") == []

    begin_segment(tmp_path, 4, 1.0)
    assert "history.jsonl: cannot be read" in capsys.readouterr().err
    assert [segment.first_step for segment in read_history(tmp_path)] == [4]
    (tmp_path / HISTORY).unlink()
    end_segment(tmp_path, 5, "finished")


def test_the_phases_of_a_run() -> None:
    lines = [
        {"training/global_step": 0, "timing_s/testing": 4.0},
        {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/controller": 0.1},
        {"timing_s/step": 10.0, "timing_s/gen": 7.0, "timing_s/save_checkpoint": 1.0},
        {"timing_s/gen/part": 3.0},
        # These go on while all else does, or lie within it.
        {"timing_s/queue": 9.0, "timing_s/rollouts": 9.0},
        {"timing_s/record_rollouts": 2.0, "timing_s/adv": math.nan},
    ]
    assert phase_durations(lines, 40.0, 8.0) == {
        STARTING: 8,
        REST: 40 - 20 - 4 - 1 - 8,
        "generation": 13,
        REST_OF_STEPS: 7,
        "evaluation": 4,
        "checkpoints": 1,
    }
    with_inputs = phase_durations(lines, 40.0, 5.0, 3.0)
    assert (with_inputs[STARTING], with_inputs[PREPARING]) == (5.0, 3.0)
    assert with_inputs[REST] == 40 - 20 - 4 - 1 - 8
    # Phases that ran at the same time, and lines of a process whose end is not known.
    overlapping = [{"timing_s/step": 10.0, "timing_s/ref": 8.0, "timing_s/values": 9.0}]
    assert phase_durations(overlapping, 5.0) == {
        "values": 9,
        "reference log-probs": 8,
    }
