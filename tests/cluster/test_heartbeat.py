"""Who is late: clocks with given times, and calls of processes of which it is known what they said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from verl_ray.cluster.calls import Flight, causes
from verl_ray.cluster.failures import Member
from verl_ray.cluster.heartbeat import Clock, Heartbeat
from verl_ray.cluster.messages import Status
from verl_ray.profiling.progress import Progress

LIMIT = 10.0
TICK = 0.5


def named_at(moved: Callable[[float], float], *, since: float = 0.0, mute_from: float = 1e9, until: float = 60.0,
             looks: Callable[[float], bool] = lambda now: True) -> tuple[float | None, int]:  # fmt: skip
    """When the driver, which looks every half second, finds a process late, and how often it has asked. `moved(now)`:
    when the process last made progress; it answers at once until `mute_from`, and is heard at the next look."""
    clock, now, asked = Clock(), 0.0, 0
    answer: float | None = None
    while now < until:
        if looks(now):
            if answer is not None:
                clock.answer(answer)
                answer = None
            if clock.is_due(since, now, LIMIT):
                clock.ask(now)
                asked += 1
                answer = now - moved(now) if now < mute_from else None
            if clock.is_late(since, now, LIMIT):
                return now, asked
        now += TICK
    return None, asked


def test_what_goes_on_is_never_late_and_hardly_asked() -> None:
    for pause in (0.1, 3.0, 9.5):
        late, asked = named_at(lambda now, pause=pause: now // pause * pause, until=1000.0)
        assert late is None and 0 < asked <= 2 * 1000 / (LIMIT / 8)
    assert named_at(lambda now: now, until=LIMIT / 8)[1] == 0  # what answers soon is not asked at all


@pytest.mark.parametrize("stops", [0.0, 0.5, 7.0, 21.0, 33.5])
@pytest.mark.parametrize("mute", [False, True])
def test_a_hang_is_named_within_one_and_a_half_limits(stops: float, mute: bool) -> None:
    late, _ = named_at(lambda now: min(now, stops), mute_from=stops if mute else 1e9)
    assert late is not None and stops + LIMIT <= late <= stops + 1.25 * LIMIT


def test_an_idle_process_has_the_whole_limit() -> None:
    late, _ = named_at(lambda now: -500.0, since=20.0)  # nothing was asked of it for long
    assert late is not None and 30.0 <= late <= 31.0


def test_a_driver_that_looks_away_makes_nobody_late() -> None:
    def away(now: float) -> bool:
        return not 3.0 < now < 43.0

    assert named_at(lambda now: now, looks=away, until=100.0)[0] is None
    late, _ = named_at(lambda now: min(now, 5.0), looks=away)
    assert late == 43.5  # it had stood still for long when somebody looked


def test_an_earlier_answer_says_nothing_of_a_call() -> None:
    clock = Clock()
    clock.ask(0.0)
    clock.answer(300.0)
    assert not clock.is_late(since=5.0, now=20.0, stall_s=LIMIT)
    assert clock.is_due(since=5.0, now=20.0, stall_s=LIMIT)
    clock.ask(20.0)
    clock.answer(320.0)
    assert clock.is_late(since=5.0, now=20.0, stall_s=LIMIT)


def flight(rank: int, *, waits: bool = False, mute: bool = False) -> Flight:
    heartbeat = Heartbeat(lambda: None)
    heartbeat.status = Status(1, 0, ("actor", "update", 12.0), Progress(3, 16, "micro-batches", 11.0, waits), {})
    if mute:
        heartbeat._clock.ask(-1e6)
    return Flight(Member("actor", rank, object(), None, heartbeat), "update", None, object(), LIMIT)


def test_the_one_that_holds_up_the_others_is_named() -> None:
    stuck, waiting, other, mute = flight(0), flight(1, waits=True), flight(2, waits=True), flight(3, mute=True)
    assert causes([], [stuck, waiting]) == []
    assert causes([stuck, waiting], [stuck, waiting, other]) == [stuck]
    everybody = [stuck, waiting, mute]
    assert causes(everybody, everybody) == [mute]  # before anybody who still answers
    assert causes([stuck, waiting], everybody) == []  # it may be getting on, and the others wait for it
    assert causes([waiting], [waiting, stuck]) == []  # it may wait for the other one, which gets on
    assert causes([waiting, other], [waiting, other]) == [waiting, other]  # for each other, or for nobody here
