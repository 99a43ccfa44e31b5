"""Late processes: clocks with chosen times, and calls of processes with known replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from verl_ray.cluster.context import Status
from verl_ray.cluster.members import Heartbeat, Member, ProgressClock
from verl_ray.cluster.rank_calls import RankCall
from verl_ray.cluster.stalls import causes
from verl_ray.profiling.progress import Progress

LIMIT = 10.0
TICK = 0.5


def named_at(moved: Callable[[float], float], *, since: float = 0.0, mute_from: float = 1e9, until: float = 60.0,
             looks: Callable[[float], bool] = lambda now: True) -> tuple[float | None, int]:  # fmt: skip
    """Time at which the driver finds a process late, and the number of its requests.

    The driver looks every half second. `moved(now)` is the time of the process's last
    progress. The process replies at once until `mute_from`, and the driver receives the
    reply at its next look.
    """
    clock, now, requests = ProgressClock(), 0.0, 0
    idle_s: float | None = None
    while now < until:
        if looks(now):
            if idle_s is not None:
                clock.record_reply(idle_s)
                idle_s = None
            if clock.is_due(since, now, LIMIT):
                clock.record_request(now)
                requests += 1
                idle_s = now - moved(now) if now < mute_from else None
            if clock.is_late(since, now, LIMIT):
                return now, requests
        now += TICK
    return None, requests


def test_a_process_that_makes_progress_is_never_late_and_has_few_requests() -> None:
    for pause in (0.1, 3.0, 9.5):
        late, requests = named_at(
            lambda now, pause=pause: now // pause * pause, until=1000.0
        )
        assert late is None and 0 < requests <= 2 * 1000 / (LIMIT / 8)
    assert (
        named_at(lambda now: now, until=LIMIT / 8)[1] == 0
    )  # a short call causes no request


@pytest.mark.parametrize("stops", [0.0, 0.5, 7.0, 21.0, 33.5])
@pytest.mark.parametrize("mute", [False, True])
def test_a_hang_is_named_within_one_and_a_half_limits(stops: float, mute: bool) -> None:
    late, _ = named_at(lambda now: min(now, stops), mute_from=stops if mute else 1e9)
    assert late is not None and stops + LIMIT <= late <= stops + 1.25 * LIMIT


def test_an_idle_process_has_the_whole_limit() -> None:
    late, _ = named_at(
        lambda now: -500.0, since=20.0
    )  # nothing was asked of it for long
    assert late is not None and 30.0 <= late <= 31.0


def test_a_driver_that_looks_away_makes_nobody_late() -> None:
    def away(now: float) -> bool:
        return not 3.0 < now < 43.0

    assert named_at(lambda now: now, looks=away, until=100.0)[0] is None
    late, _ = named_at(lambda now: min(now, 5.0), looks=away)
    assert late == 43.5  # it had stood still for long when somebody looked


def test_a_reply_from_before_a_call_does_not_make_it_late() -> None:
    clock = ProgressClock()
    clock.record_request(0.0)
    clock.record_reply(300.0)
    assert not clock.is_late(since=5.0, now=20.0, stall_s=LIMIT)
    assert clock.is_due(since=5.0, now=20.0, stall_s=LIMIT)
    clock.record_request(20.0)
    clock.record_reply(320.0)
    assert clock.is_late(since=5.0, now=20.0, stall_s=LIMIT)


def rank_call(rank: int, *, waits: bool = False, mute: bool = False) -> RankCall:
    heartbeat = Heartbeat(lambda: None)
    heartbeat.status = Status(
        ("actor", "update", 12.0),
        Progress(3, 16, "micro-batches", 11.0, waits),
        {},
    )
    if mute:
        heartbeat._clock.record_request(-1e6)
    return RankCall(
        Member("actor", rank, object(), None, heartbeat),
        "update",
        None,
        object(),
        LIMIT,
    )


def test_of_the_calls_of_one_process_the_first_is_named() -> None:
    """A reply that arrives between two looks makes the later call late alone."""
    actors = rank_call(0)
    member = dataclasses.replace(actors.member, role="critic")
    critics = dataclasses.replace(actors, member=member, reply=object())
    assert causes([critics], [actors, critics]) == [actors, critics]


def test_the_one_that_holds_up_the_others_is_named() -> None:
    stuck, waiting, other, mute = (
        rank_call(0),
        rank_call(1, waits=True),
        rank_call(2, waits=True),
        rank_call(3, mute=True),
    )
    assert causes([], [stuck, waiting]) == []
    assert causes([stuck, waiting], [stuck, waiting, other]) == [stuck]
    everybody = [stuck, waiting, mute]
    assert causes(everybody, everybody) == [mute]  # before anybody who still answers
    assert (
        causes([stuck, waiting], everybody) == []
    )  # it may be getting on, and the others wait for it
    assert (
        causes([waiting], [waiting, stuck]) == []
    )  # it may wait for the other one, which gets on
    assert causes([waiting, other], [waiting, other]) == [
        waiting,
        other,
    ]  # for each other, or for nobody here
