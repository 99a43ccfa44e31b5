"""Shares of idle time and overlap, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.rollouts import time_at_work
from controllers.rollouts.time_at_work import Occupancy

NAMES = ("trainers_idle", "rollouts_idle", "overlap", "both_idle")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time_at_work, "time", made)
    yield made


def shares(watch: Occupancy) -> list[float]:
    metrics = watch.take()
    return [metrics[f"perf/{name}"] for name in NAMES]


def test_a_synchronous_step_takes_turns(clock: Clock) -> None:
    """6 s of rollouts, in the last 2 of which half of the engines work, then 2 s of
    training.
    """
    watch = Occupancy()
    with watch.trainers_wait():
        watch.note_rollouts(1.0, 0.0)
        clock.now_s += 4
        watch.note_rollouts(0.5, 0.0)
        clock.now_s += 2
        watch.note_rollouts(0.0, 0.0)
    clock.now_s += 2
    assert shares(watch) == pytest.approx([6 / 8, 3 / 8, 0, 1 / 8])


def test_an_overlapping_step(clock: Clock) -> None:
    """10 s of rollouts; the trainers wait for 3 s of them, and pause them for 1 s."""
    watch = Occupancy()
    watch.note_rollouts(1.0, 0.0)
    with watch.trainers_wait():
        clock.now_s += 3
    clock.now_s += 7
    watch.note_rollouts(0.0, 0.0)
    clock.now_s += 1
    watch.note_rollouts(1.0, 0.0)
    assert shares(watch) == pytest.approx([3 / 11, 1 / 11, 7 / 11, 0], abs=1e-12)
    # The next step begins in the state that this one left.
    clock.now_s += 5
    assert shares(watch) == [0, 0, 1, 0]


def test_a_wait_that_fails_ends_too(clock: Clock) -> None:
    watch = Occupancy()
    watch.note_rollouts(1.0, 0.0)
    with pytest.raises(KeyError), watch.trainers_wait():
        clock.now_s += 1
        raise KeyError
    clock.now_s += 3
    assert shares(watch) == [1 / 4, 0, 3 / 4, 0]


EVENTS = st.lists(
    st.tuples(st.floats(0, 9), st.sampled_from([0.0, 0.25, 1.0, None])), min_size=1
)


@given(EVENTS, st.floats(0.1, 9))
def test_the_shares_add_up_to_one(
    events: list[tuple[float, float | None]], last_s: float
) -> None:
    """None lets the trainers wait or go on; numbers are of the engines."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time_at_work, "time", clock)
        watch = Occupancy()
        waiting = None
        for passed_s, share in events:
            clock.now_s += passed_s
            if share is not None:
                watch.note_rollouts(share, 0.0)
            elif waiting is None:
                waiting = watch.trainers_wait()
                waiting.__enter__()
            else:
                waiting.__exit__(None, None, None)
                waiting = None
        clock.now_s += last_s
        trainers, rollouts, overlap, both = shares(watch)
    assert trainers + rollouts - both + overlap == pytest.approx(1)
    for share in (trainers, rollouts, overlap, both):
        assert -1e-9 <= share <= 1 + 1e-9
    assert both <= min(trainers, rollouts) + 1e-9


def test_rollouts_to_learn_from_count_between_the_steps_too(clock: Clock) -> None:
    """2 s in a step, then 3 s on half of the engines beside an evaluation."""
    watch = Occupancy()
    watch.note_rollouts(1.0, 1.0)
    clock.now_s += 2
    watch.note_rollouts(1.0, 0.5)
    watch.take()
    clock.now_s += 3
    watch.note_rollouts(1.0, 0.0)
    clock.now_s += 5
    watch.take()
    assert watch.take_rollouts_s() == pytest.approx(3.5)
    assert watch.take_rollouts_s() == 0
