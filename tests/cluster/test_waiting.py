"""Work of the driver during a wait, and requests that do not wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.crew import Echo, rows_of
from tests.leftovers import left_in_shared_memory
from verl_ray.cluster.calls import Stream, ready_streams, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import TICK_S, put
from verl_ray.columns.stages import LogProbs
from verl_ray.errors import WorkerError

Crew = Callable[..., WorkerGroup[Any]]
pytestmark = pytest.mark.cluster


class StreamTaker:
    """Takes the batches of a stream in the background, and records the times."""

    def __init__(
        self, stream: Stream[LogProbs], at_its_end: Callable[[], object] = lambda: None
    ) -> None:
        self._stream: Stream[LogProbs] | None = stream
        self._at_its_end = at_its_end
        self.taken_s: list[float] = []

    def references(self) -> list[Any]:
        return [] if self._stream is None else [self._stream.rank_call.payload]

    def advance(self) -> None:
        while self._stream is not None and ready_streams([self._stream], 0.0):
            if self._stream.take() is None:
                self._stream = None
                self._at_its_end()
            else:
                self.taken_s.append(time.monotonic())


def test_pieces_are_taken_while_a_call_is_waited_for(crew: Crew) -> None:
    draws, learns = crew(Echo, 1), crew(Echo, 1)
    pieces = StreamTaker(
        draws.open_stream(Echo.one_by_one, put(rows_of([1] * 20)), 0.1),
        at_its_end=lambda: learns.rank_zero(Echo.open_the_gate),
    )
    learning = learns.rank_zero(Echo.wait_at_the_gate)
    assert wait_all([learning], background=pieces) == [True]
    taken_s = pieces.taken_s
    assert len(taken_s) == 20
    # They were taken as they came, and not at ticks: these would bring several at once.
    apart = [later - sooner for sooner, later in itertools.pairwise(taken_s)]
    num_ticks = (taken_s[-1] - taken_s[0]) / TICK_S
    assert sum(gap > 0.02 for gap in apart) > num_ticks + 2


def test_what_fails_in_the_background_ends_the_wait(crew: Crew) -> None:
    draws, learns = crew(Echo, 1), crew(Echo, 1)
    pieces = StreamTaker(draws.open_stream(Echo.one_then_fail, put(rows_of([1] * 6))))
    with pytest.raises(WorkerError, match="one_then_fail"):
        wait_all([learns.rank_zero(Echo.wait_at_the_gate)], background=pieces)
    assert len(pieces.taken_s) == 1


def test_a_poll_waits_for_nothing(crew: Crew) -> None:
    group = crew(Echo, 2)
    call = group.broadcast(Echo.wait_at_the_gate)
    assert not call.poll() and len(call.references()) == 2
    group.broadcast(Echo.open_the_gate).result()
    while not call.poll():
        time.sleep(0.02)
    assert call.references() == [] and call.result() == [True, True]

    failing = group.broadcast(Echo.fail, 1)
    with pytest.raises(WorkerError, match="the reason"):
        while not failing.poll():
            time.sleep(0.02)


def test_a_restart_is_under_way_while_others_work(crew: Crew) -> None:
    group, other = crew(Echo, 1), crew(Echo, 1)
    before = group.rank_zero(Echo.pid).result()
    remains = left_in_shared_memory()
    restart = group.restart()
    assert not restart.poll()
    while not restart.poll():
        assert other.rank_zero(Echo.plod, 1).result() == 1
    assert group.incarnation == 2 and group.rank_zero(Echo.pid).result() != before
    # A process that starts removes what the dead of its node have left.
    assert not any(path.exists() for path in remains)
