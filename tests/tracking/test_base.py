"""The list of trackers: what every tracker receives, and what one failure does to a
run.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from verl_ray.errors import TrackingError
from verl_ray.tracking.base import Sample, Tracker, Trackers


class Recorder(Tracker):
    """Keeps what it receives; fails at `fails_at`."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name, self.fails_at = name, fails_at
        self.lines: list[dict[str, float]] = []
        self.closed: list[bool] = []

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise TrackingError(f"{self.name} broke")
        self.lines.append(dict(metrics))

    def close(self, failed: bool) -> None:
        self.closed.append(failed)

    def outputs(self) -> dict[str, str]:
        return {self.name: f"place of {self.name}"}

    def state(self) -> dict[str, str]:
        return {f"{self.name}_id": "7"}


class Essential(Recorder):
    required = True


def test_every_tracker_receives_plain_numbers_and_the_step() -> None:
    first, second = Recorder("a"), Recorder("b")
    Trackers([first, second]).log(
        3, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": 4, "d": np.int64(5)}
    )
    assert (
        first.lines
        == second.lines
        == [{"a": 0.5, "b": 2.0, "c": 4, "d": 5.0, "training/global_step": 3}]
    )
    assert {type(value) for value in first.lines[0].values()} == {float, int}


def test_a_failing_tracker_says_so_once_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, whole = Recorder("broken", fails_at=1), Recorder("whole")
    trackers = Trackers([broken, whole])
    for step in range(3):
        trackers.log(step, {"x": 1.0})
    trackers.close(failed=False)
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "Recorder" in complaint and "broken broke" in complaint
    assert len(broken.lines) == 1 and len(whole.lines) == 3
    assert broken.closed == [] and whole.closed == [False]


def test_a_required_tracker_that_fails_stops_the_run_after_the_others_were_told() -> (
    None
):
    other = Recorder("other")
    trackers = Trackers([Essential("record", fails_at=1), other])
    trackers.log(0, {"x": 1.0})
    with pytest.raises(TrackingError, match="record broke"):
        trackers.log(1, {"x": 1.0})
    assert [line["training/global_step"] for line in other.lines] == [0, 1]


def test_closing_twice_closes_once() -> None:
    one = Recorder("one")
    trackers = Trackers([one])
    trackers.close(failed=True)
    trackers.close(failed=False)
    assert one.closed == [True]


def test_outputs_and_state_are_those_of_all() -> None:
    trackers = Trackers([Recorder("a")])
    trackers.add(Recorder("b"))
    assert trackers.outputs() == {"a": "place of a", "b": "place of b"}
    assert trackers.state() == {"a_id": "7", "b_id": "7"}
