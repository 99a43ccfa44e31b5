"""The trace of a run, where processes reply late or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from controllers.watch.trace import TraceTracker
from verl_ray.errors import ClusterError, Interrupted
from verl_ray.profiling.trace import ProcessSpans, Span, read_trace


class Replies:
    """Groups whose processes reply with these, one after another."""

    def __init__(self, *replies: list[ProcessSpans] | Exception) -> None:
        self.replies = list(replies)
        self.limits_s: list[float] = []

    def take_spans(self, within_s: float) -> list[ProcessSpans]:
        """The next reply; nothing behind the last."""
        self.limits_s.append(within_s)
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
    *of_steps, first_s, second_s = groups.limits_s
    assert of_steps == [2.0] * 4 and 29 < second_s <= first_s <= 30
    events = read_trace(tmp_path / "trace.json")
    calls = [event["ts"] for event in events if event["name"] == "actor.update"]
    assert calls == [1.0, 5.0]
