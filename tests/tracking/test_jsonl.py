"""The run's own record: one whole line per step, through kills, resumes and full disks."""

import contextlib
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.errors import Interrupted, TrackingError
from verl_ray.tracking.base import Sample, Trackers
from verl_ray.tracking.held_out_responses import HeldOutResponse, first_responses
from verl_ray.tracking.jsonl import (
    JsonlTracker,
    format_ranges,
    newest_samples,
    parse_ranges,
    read_metrics,
    repair,
)

SAMPLE = Sample(
    prompt="1+1=",
    response="2\u2028",
    answer="2",
    data_source="sums",
    score=1.0,
    truncated=False,
    entries={"pred": "2"},
)


RESPONSE = HeldOutResponse(
    problem=0,
    data_source="sums",
    prompt="1+1=",
    response="2\u2028",
    answer="2",
    score=1.0,
    finish="stop",
    entries={"pred": "2"},
    response_tokens=2,
)


def write_steps(run_dir: Path, steps: range, committed_step: int | None = None) -> None:
    trackers = Trackers([JsonlTracker(run_dir, committed_step)])
    for step in steps:
        trackers.log(step, {"critic/rewards/mean": step / 10})
    trackers.close(failed=False)


def steps_in(run_dir: Path) -> list[float]:
    return [
        line["training/global_step"] for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def test_one_json_object_per_step(tmp_path: Path) -> None:
    write_steps(tmp_path, range(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"critic/rewards/mean": step / 10, "training/global_step": step}
        for step in range(3)
    ]


def test_a_number_that_json_lacks_is_null_and_reads_back_as_nan(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": 1.0, "training/global_step": 0})
    tracker.close(failed=False)
    path = tmp_path / "metrics.jsonl"
    assert (
        path.read_text()
        == '{"a": null, "b": null, "c": 1.0, "training/global_step": 0}\n'
    )
    (line,) = read_metrics(path)
    assert math.isnan(line["a"]) and math.isnan(line["b"]) and line["c"] == 1.0


def test_a_stop_while_responses_are_read_leaves_the_record_open(tmp_path: Path) -> None:
    def stopped() -> Iterator[HeldOutResponse]:
        yield RESPONSE
        raise Interrupted("stopped by SIGINT")

    trackers = Trackers([JsonlTracker(tmp_path)])
    with pytest.raises(Interrupted):
        trackers.responses(0, stopped())
    assert not (tmp_path / "evaluations").exists()
    trackers.responses(0, [RESPONSE])
    trackers.log(0, {"a": 1.0})
    trackers.close(failed=False)
    assert newest_samples(tmp_path, 9) == [SAMPLE] and steps_in(tmp_path) == [0]


def test_a_resumed_run_has_one_line_per_step(tmp_path: Path) -> None:
    write_steps(tmp_path, range(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"critic/rewards/mean": 0.6, "training/glo')  # torn by a kill
    write_steps(tmp_path, range(4, 8), committed_step=3)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]


def line(step: int, **metrics: float) -> bytes:
    return json.dumps({**metrics, "training/global_step": step}).encode() + b"\n"


WHOLE = [line(step, loss=step / 10) for step in range(6)]


def continued(
    run_dir: Path, content: bytes | None, committed_step: int = 5, recorded: str = "0-5"
) -> JsonlTracker:
    """The tracker of a run that goes on after `committed_step` and finds a
    metrics.jsonl with this content.
    """
    if content is not None:
        (run_dir / "metrics.jsonl").write_bytes(content)
    return JsonlTracker(run_dir, committed_step, {"recorded_steps": recorded})


@pytest.mark.parametrize(
    ("content", "left", "told"),
    [
        (b"".join(WHOLE), WHOLE, ""),
        (b"".join(WHOLE)[:-1], WHOLE, ""),  # a whole line without its newline
        (None, [], "step 0-5 has no line: its metrics are lost, and nothing else is"),
        (b"", [], "step 0-5 has no line: its metrics are lost, and nothing else is"),
        (
            b"".join(WHOLE[:2] + WHOLE[3:4]),
            WHOLE[:2] + WHOLE[3:4],
            "step 2,4-5 has no line: ",
        ),
        (
            b"".join(WHOLE[:4]) + bytes(300),
            WHOLE[:4],
            "it ended in 300 zero bytes, as a loss of power leaves them, which were cut off; step 4-5 has no line: ",
        ),
        (
            b"".join(WHOLE) + bytes(7),
            WHOLE,
            "it ended in 7 zero bytes, as a loss of power leaves them, ",
        ),
        (
            b"".join(WHOLE)[:-9],
            WHOLE[:5],
            "its last line was torn and was cut off; step 5 has no line: ",
        ),
        (
            b"".join([WHOLE[1], WHOLE[0], *WHOLE[2:]]),
            WHOLE,
            "its lines were not in the order of the steps",
        ),
    ],
)
def test_a_resume_mends_the_record(tmp_path: Path, capsys, content, left, told) -> None:
    tracker = continued(tmp_path, content)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(left)
    shown = capsys.readouterr()
    assert shown.out == ""
    if told:
        assert (
            shown.err.startswith(f"warning: {tmp_path / 'metrics.jsonl'}: {told}")
            and shown.err.count("\n") == 1
        )
    else:
        assert shown.err == ""
    tracker.log(6, {"training/global_step": 6})
    state = tracker.state()
    tracker.close(failed=False)
    steps = [json.loads(one)["training/global_step"] for one in left]
    assert steps_in(tmp_path) == [*steps, 6]
    JsonlTracker(tmp_path, 6, state).close(failed=False)
    assert capsys.readouterr().err == ""  # what is lost is said once


@pytest.mark.parametrize("twice", [1, 5])
def test_of_a_step_that_ran_twice_the_last_line_stays(
    tmp_path: Path, capsys, twice: int
) -> None:
    content = b"".join(
        [*WHOLE[: twice + 1], line(twice, loss=7.0), *WHOLE[twice + 1 :]]
    )
    continued(tmp_path, content).close(failed=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(
        [*WHOLE[:twice], line(twice, loss=7.0), *WHOLE[twice + 1 :]]
    )
    (aside,) = tmp_path.glob("metrics.*.jsonl")
    assert aside.read_bytes() == content
    told = f"step {twice} had several lines, of which the last was kept; the file as it was is {aside.name}\n"
    assert capsys.readouterr().err.endswith(f": {told}")


@pytest.mark.parametrize(
    "damage",
    [b"{not json\n", b"[1]\n", b'{"no": "step"}\n', b"\0\xff\n", line(True), line(-1)],
)
def test_a_damaged_line_keeps_no_run_from_going_on(
    tmp_path: Path, capsys, damage: bytes
) -> None:
    content = b"".join([*WHOLE[:3], damage, *WHOLE[4:]])
    continued(tmp_path, content).close(failed=False)
    assert steps_in(tmp_path) == [0, 1, 2, 4, 5]
    (aside,) = tmp_path.glob("metrics.*.jsonl")
    assert aside.read_bytes() == content
    told = capsys.readouterr().err
    assert (
        "no JSON object with training/global_step was in line 4, which was left out; step 3 has no line"
        in told
    )


def test_lines_of_steps_that_run_again_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    continued(tmp_path, b"".join(WHOLE), committed_step=3, recorded="0-4").close(
        failed=False
    )
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    shown = capsys.readouterr()
    assert shown.err == "" and "the lines of step 4-5 are written again" in shown.out
    assert list(tmp_path.glob("metrics.*.jsonl")) == []


def test_a_record_that_begins_later_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went on from a checkpoint in another folder has no lines of the steps
    before.
    """
    write_steps(tmp_path, range(4, 6), committed_step=3)
    continued(tmp_path, None, recorded="4-5").close(failed=False)
    assert steps_in(tmp_path) == [4, 5] and capsys.readouterr().err == ""


def test_the_state_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is flushed before its steps are counted: the state goes into the
    checkpoint's manifest after that.
    """
    flushed: list[Path] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    tracker = JsonlTracker(tmp_path)
    for step in (0, 1, 2):
        tracker.log(step, {"training/global_step": step})
    monkeypatch.setattr(os, "fsync", seen)
    tracker.sync()
    assert tracker.state() == {"recorded_steps": "0-2"}
    assert flushed == [tmp_path / "metrics.jsonl", tmp_path]
    tracker.close(failed=False)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_they_were_given(numbers: set[int]) -> None:
    text = format_ranges(numbers)
    assert parse_ranges(text) == sorted(numbers)
    assert text.count(",") + bool(numbers) == sum(
        number - 1 not in numbers for number in numbers
    )


@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, 40))
def test_any_damage_leaves_lines_of_the_run(
    content: bytes, place: int, cut: int
) -> None:
    """Whatever was written over the file: it is mended to whole lines of rising steps,
    and mending it again does nothing.
    """
    whole = b"".join(WHOLE)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(whole[:place] + content + whole[place + cut :])
        steps = repair(path, 5, range(6))
        mended = path.read_bytes()
        assert (
            steps
            == sorted(set(steps))
            == [int(one["training/global_step"]) for one in read_metrics(path)]
        )
        assert repair(path, 5, steps) == steps and path.read_bytes() == mended


def test_a_run_from_the_beginning_keeps_nothing_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    write_steps(tmp_path, range(6))
    write_steps(tmp_path, range(2))
    assert steps_in(tmp_path) == [0, 1]


def test_responses_and_rollouts_beyond_the_committed_step_are_dropped(
    tmp_path: Path,
) -> None:
    failed = replace(RESPONSE, score=math.nan, member=1, failure="reward: timeout")
    tracker = JsonlTracker(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in (0, 10, 20):
        tracker.responses(step, [RESPONSE, failed] * 200)
        (tmp_path / "rollouts" / f"step_{step:06d}.parquet").touch()
    tracker.close(failed=True)
    notes = tmp_path / "evaluations" / "step_notes.parquet"
    notes.touch()  # a person's
    JsonlTracker(tmp_path, committed_step=10).close(failed=False)
    notes.unlink()
    remaining = ["step_000000.parquet", "step_000010.parquet"]
    for folder in ("evaluations", "rollouts"):
        files = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert files == remaining, folder

    path = tmp_path / "evaluations" / remaining[1]
    first, second, *others = first_responses(path, 1000)
    assert (first, len(others)) == (RESPONSE, 398)
    assert math.isnan(second.score) and replace(second, score=1.0) == replace(
        failed, score=1.0
    )
    path.write_text("no parquet")
    with pytest.raises(TrackingError, match=r"step_000010\.parquet: cannot be read"):
        newest_samples(tmp_path, 5)


def test_a_step_twice_is_refused(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, committed_step=5)
    with pytest.raises(TrackingError, match="step 5 logged after step 5"):
        tracker.log(5, {"training/global_step": 5})
    tracker.close(failed=True)


@pytest.mark.processes
def test_a_logged_line_outlives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from verl_ray.tracking.jsonl import JsonlTracker\n"
        "JsonlTracker(Path(sys.argv[1])).log(0, {'training/global_step': 0}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert steps_in(tmp_path) == [0]


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """A limit on the size of files stands for a full disk: both take half a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_line_and_writes_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(0, {"training/global_step": 0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(size + 10):
        tracker.responses(1, [RESPONSE])
        for step in (1, 2):
            tracker.log(step, {"training/global_step": step})
        assert (tmp_path / "metrics.jsonl").stat().st_size == size + 10
        assert steps_in(tmp_path) == [0]
        # A checkpoint would count lines that are not on the disk.
        with pytest.raises(
            TrackingError, match=r"metrics\.jsonl: cannot be written.*run\.dir"
        ):
            tracker.sync()

    tracker.log(3, {"training/global_step": 3})
    assert tracker.state() == {"recorded_steps": "0-3"}
    tracker.close(failed=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"training/global_step": step} for step in range(4)
    ]
    assert newest_samples(tmp_path, 5) == [SAMPLE]
    warning, relief = capsys.readouterr().err.splitlines()
    assert "the run goes on" in warning and relief.endswith("the record is whole")


def test_lines_that_find_no_room_until_the_end_are_an_error(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    with full_disk(0):
        tracker.log(0, {"training/global_step": 0})
        with pytest.raises(TrackingError, match=r"cannot be written.*run\.dir"):
            tracker.close(failed=False)
        tracker.close(failed=False)


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match="cannot be written"):
        JsonlTracker(tmp_path / "file" / "run")


@pytest.mark.parametrize("damage", ["{not json", "[1]", '{"no": "step"}'])
def test_a_damaged_line_is_named_instead_of_dropped(
    tmp_path: Path, damage: str
) -> None:
    write_steps(tmp_path, range(2))
    path = tmp_path / "metrics.jsonl"
    path.write_text(damage + "\n" + path.read_text())
    with pytest.raises(
        TrackingError,
        match=r"metrics.jsonl, line 1: not a JSON object with training/global_step",
    ):
        read_metrics(path)


def test_dropping_lines_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, range(4))

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TrackingError):
        JsonlTracker(tmp_path, committed_step=1)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
