"""The run's own record: one whole line per step, through kills, resumes and full disks."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ray.errors import TrackingError
from verl_ray.tracking.base import Sample, Trackers
from verl_ray.tracking.jsonl import JsonlTracker, read_metrics

SAMPLE = Sample(prompt="1+1=", response="2\u2028", answer="2", data_source="sums", score=1.0, truncated=False)


def write_steps(run_dir: Path, steps: range, committed_step: int | None = None) -> None:
    trackers = Trackers([JsonlTracker(run_dir, committed_step)])
    for step in steps:
        trackers.log(step, {"critic/rewards/mean": step / 10})
    trackers.close(failed=False)


def steps_in(run_dir: Path) -> list[float]:
    return [line["training/global_step"] for line in read_metrics(run_dir / "metrics.jsonl")]


def test_one_json_object_per_step(tmp_path: Path) -> None:
    write_steps(tmp_path, range(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"critic/rewards/mean": step / 10, "training/global_step": step} for step in range(3)
    ]


def test_a_number_that_json_lacks_is_null_and_reads_back_as_nan(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": 1.0, "training/global_step": 0})
    tracker.close(failed=False)
    path = tmp_path / "metrics.jsonl"
    assert path.read_text() == '{"a": null, "b": null, "c": 1.0, "training/global_step": 0}\n'
    (line,) = read_metrics(path)
    assert math.isnan(line["a"]) and math.isnan(line["b"]) and line["c"] == 1.0


def test_a_resumed_run_has_one_line_per_step(tmp_path: Path) -> None:
    write_steps(tmp_path, range(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"critic/rewards/mean": 0.6, "training/glo')  # torn by a kill
    write_steps(tmp_path, range(4, 8), committed_step=3)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_run_from_the_beginning_keeps_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    write_steps(tmp_path, range(6))
    write_steps(tmp_path, range(2))
    assert steps_in(tmp_path) == [0, 1]


def test_samples_beyond_the_committed_step_are_dropped(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in (0, 10, 20):
        tracker.samples(step, [SAMPLE, SAMPLE])
    tracker.close(failed=True)
    JsonlTracker(tmp_path, committed_step=10).close(failed=False)
    files = sorted((tmp_path / "samples").iterdir())
    assert [file.name for file in files] == ["step_000000.jsonl", "step_000010.jsonl"]
    first, second = files[0].read_text().split("\n")[:-1]
    assert json.loads(first) == json.loads(second) == {**vars(SAMPLE)}


def test_a_step_twice_is_refused(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, committed_step=5)
    with pytest.raises(TrackingError, match="step 5 logged after step 5"):
        tracker.log(5, {"training/global_step": 5})
    tracker.close(failed=True)


def test_a_logged_line_outlives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from verl_ray.tracking.jsonl import JsonlTracker\n"
        "JsonlTracker(Path(sys.argv[1])).log(0, {'training/global_step': 0}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert steps_in(tmp_path) == [0]


def test_a_full_disk_is_a_typed_error_that_names_the_key(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker._file.close()
    tracker._file = open("/dev/full", "a")  # noqa: PTH123, SIM115 - a real device without room, in place of the file
    with pytest.raises(TrackingError, match=r"metrics.jsonl: cannot be written.*No space left.*run\.dir"):
        tracker.log(0, {"training/global_step": 0})


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match="cannot be written"):
        JsonlTracker(tmp_path / "file" / "run")


@pytest.mark.parametrize("damage", ["{not json", "[1]", '{"no": "step"}'])
def test_a_damaged_line_is_named_instead_of_dropped(tmp_path: Path, damage: str) -> None:
    write_steps(tmp_path, range(2))
    path = tmp_path / "metrics.jsonl"
    path.write_text(damage + "\n" + path.read_text())
    with pytest.raises(TrackingError, match=r"metrics.jsonl, line 1: not a JSON object with training/global_step"):
        read_metrics(path)


def test_dropping_lines_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, range(4))

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TrackingError):
        JsonlTracker(tmp_path, committed_step=1)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
