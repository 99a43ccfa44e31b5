"""Spans by a hand-driven clock."""

import pytest

from verl_ray.profiling.phases import PHASES, Timers


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_and_the_drivers_own_share() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers("step"):
        clock.now_s += 1  # the driver's own
        with timers("gen"), timers.waiting():
            clock.now_s += 4
        with timers("update_actor"):
            clock.now_s += 0.5  # the driver's own
            with timers.waiting():
                clock.now_s += 2
    assert timers.take() == {
        "timing_s/step": 7.5,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 2.5,
        "timing_s/controller": 1.5,
    }


def test_several_spans_add_and_nested_ones_of_a_name_count_once() -> None:
    clock = Clock()
    timers = Timers(clock)
    for _ in range(3):
        with timers("gen"):
            clock.now_s += 1
            with timers("gen"):
                clock.now_s += 2
    assert timers.take() == {"timing_s/gen": 9.0}


def test_overlapping_spans_of_a_name_are_their_union() -> None:
    clock = Clock()
    timers = Timers(clock)
    first, second = timers("reward"), timers("reward")
    first.__enter__()
    clock.now_s += 1
    second.__enter__()
    clock.now_s += 1
    first.__exit__(None, None, None)
    clock.now_s += 1
    second.__exit__(None, None, None)
    assert timers.take() == {"timing_s/reward": 3.0}


def test_waits_that_nest_count_once_and_those_outside_a_step_not_at_all() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers.waiting():
        clock.now_s += 100
    with timers("step"), timers.waiting():
        clock.now_s += 1
        with timers.waiting():
            clock.now_s += 1
    with timers.waiting():
        clock.now_s += 100
    assert timers.take() == {"timing_s/step": 2.0, "timing_s/controller": 0.0}


def test_a_timed_phase_is_announced_counted_and_waited_in() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers("step"):
        with timers.timed("updating", "update_actor", waits=True) as opened:
            assert PHASES.glance().text == "updating"
            opened.reach(1, 2, "updates")
            clock.now_s += 3
        with timers.timed("assigning credit", "adv"):
            clock.now_s += 1
    assert PHASES.glance().text == ""
    assert timers.take() == {
        "timing_s/step": 4, "timing_s/update_actor": 3, "timing_s/adv": 1, "timing_s/controller": 1,
    }  # fmt: skip


def test_a_span_that_ends_in_an_exception_counts() -> None:
    clock = Clock()
    timers = Timers(clock)
    with pytest.raises(ValueError), timers("gen"):
        clock.now_s += 3
        raise ValueError
    assert timers.take() == {"timing_s/gen": 3.0}


def test_taking_forgets() -> None:
    timers = Timers(Clock())
    with timers("gen"):
        pass
    timers.take()
    assert timers.take() == {}


def test_taking_inside_a_span_is_a_mistake() -> None:
    timers = Timers()
    with timers("gen"), pytest.raises(AssertionError, match="gen"):
        timers.take()
