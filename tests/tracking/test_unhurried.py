"""A tracker that takes its time, or fails, and a run that does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from verl_ray.errors import TrackingError
from verl_ray.tracking.base import Sample, Tracker, Trackers, UnhurriedTracker


class GatedTracker(Tracker):
    """Takes nothing until its gate is open; one that is given up fails."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.gate = threading.Event()
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True
        self.gate.set()

    def _take(self, what: object) -> None:
        self.gate.wait()
        if self.is_given_up:
            self.is_given_up = False
            raise OSError("no connection")
        self.taken.append(what)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._take(("samples", step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._take(dict(metrics))

    def close(self, failed: bool) -> None:
        self._take("failed" if failed else "finished")

    def outputs(self) -> dict[str, str]:
        return {"here": "there"}

    def state(self) -> dict[str, str]:
        return {"id": "abc"}


def test_calls_arrive_late_in_their_order() -> None:
    gated = GatedTracker()
    tracker = UnhurriedTracker(gated, gated.give_up)
    metrics = {"x": 1.0}
    tracker.samples(1, [])
    tracker.log(1, metrics)
    metrics["x"] = 2.0
    assert gated.taken == []
    assert (tracker.outputs(), tracker.state()) == ({"here": "there"}, {"id": "abc"})
    gated.gate.set()
    tracker.close(failed=True)
    tracker.close(failed=True)
    assert gated.taken == [("samples", 1), {"x": 1.0}, "failed"]


def test_a_call_that_lasts_too_long_is_given_up_and_costs_the_run_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gated = GatedTracker()
    trackers = Trackers([UnhurriedTracker(gated, gated.give_up, patience_s=0.05)])
    step = 0
    while not gated.gate.is_set():
        step += 1
        trackers.log(step, {})
    trackers.close(failed=False)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "is off from here; the run goes on: OSError" in warning


def test_the_end_waits_for_no_longer_than_the_limit() -> None:
    gated = GatedTracker()
    tracker = UnhurriedTracker(gated, gated.give_up, patience_s=0.05)
    tracker.log(1, {})
    with pytest.raises(OSError, match="no connection"):
        tracker.close(failed=False)


def test_what_cannot_even_be_given_up_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verl_ray.tracking.base._ABORT_S", 0.05)
    gated = GatedTracker()
    tracker = UnhurriedTracker(gated, lambda: None, patience_s=0.05)
    tracker.log(1, {})
    with pytest.raises(TrackingError, match="has not taken its last lines"):
        tracker.close(failed=False)
    gated.gate.set()
