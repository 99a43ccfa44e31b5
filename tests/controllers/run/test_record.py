"""Trackers that look at a run: its trace, and the warning that it learns nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from controllers.run.record import LearningWatch, TraceTracker
from scripts.configuration import compose
from verl_ray.errors import ClusterError, Interrupted
from verl_ray.profiling.trace import ProcessSpans, Span, read_trace

SAME = {
    "critic/score/max": 1.0,
    "critic/score/min": 1.0,
    "reward_health/ok": 32.0,
    "frac_reward_zero_std": 1.0,
    "actor/grad_norm": 0.0,
}


class Replies:
    """Groups whose processes reply with these, one after another."""

    def __init__(self, *replies: list[ProcessSpans] | Exception) -> None:
        self.replies = list(replies)
        self.limits_s: list[float] = []
        self.waits_for_late: list[bool] = []

    def take_spans(
        self, within_s: float, *, waits_for_late: bool
    ) -> list[ProcessSpans]:
        """The next reply; nothing behind the last."""
        self.limits_s.append(within_s)
        self.waits_for_late.append(waits_for_late)
        reply = self.replies.pop(0) if self.replies else []
        if isinstance(reply, Exception):
            raise reply
        return reply


def spans_of(begin_ns: int) -> ProcessSpans:
    """A trainer with one span."""
    noted = [Span("actor.update", "call", 7, begin_ns, begin_ns + 1000)]
    return ProcessSpans("trainer-0", 9, "a", 0, noted, forgotten=0)


def test_a_step_without_replies_ends_neither_the_run_nor_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ClusterError("Ray has not returned")
    stop = Interrupted("SIGTERM")
    groups = Replies(late, late, stop, [spans_of(1000)], [], [spans_of(5000)])
    tracker = TraceTracker(tmp_path, cast(Any, groups), continues=False)
    for step in range(1, 5):
        tracker.log(step, {})
    warnings = capsys.readouterr().err
    assert warnings.count("lacks what processes did in this step") == 1

    # At the end there is time, also for the last spans of those that were late.
    tracker.close(failed=False)
    *step_limits_s, first_s, second_s = groups.limits_s
    assert step_limits_s == [2.0] * 4 and 29 < second_s <= first_s <= 30
    assert groups.waits_for_late == [False] * 4 + [True] * 2
    events = read_trace(tmp_path / "trace.json")
    calls = [event["ts"] for event in events if event["name"] == "actor.update"]
    assert calls == [1.0, 5.0]


def test_a_warning_is_printed_once_and_a_resumed_run_prints_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = ("model.path=m", "data.train_path=t", "data.validation_path=v")
    config = compose("grpo", [*paths, "run.total_steps=100"])
    steps = [{**SAME, "training/global_step": number} for number in range(1, 6)]
    watch = LearningWatch(config, [])
    warnings = []
    for line in steps:
        watch.log(int(line["training/global_step"]), line)
        warnings.append(capsys.readouterr().err)
    assert [bool(warning) for warning in warnings] == [False, False, True, False, False]
    assert warnings[2].startswith(
        "warning: all scores are equal, so nothing sets a good"
    )
    assert warnings[2].endswith("(3 steps, 1 to 3)\n")

    # The first two lines are on the disk, and the third step runs again.
    resumed = LearningWatch(config, steps[:2])
    resumed.log(3, steps[2])
    assert capsys.readouterr().err == warnings[2]
