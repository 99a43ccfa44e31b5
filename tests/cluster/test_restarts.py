"""Groups that start again in place while calls of other groups go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.crew import Echo, hasten, rows_of
from tests.waiting import PATIENCE_S, until
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.restarts import InPlaceRestarts, RepeatedCall
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import LogProbs, Rows
from verl_ray.errors import DeadlineExceeded, VerlRayError, WorkerDied, WorkerError
from verl_ray.profiling.progress import touch

pytestmark = pytest.mark.cluster

Crew = Callable[..., WorkerGroup[Any]]
STEP = 3
STALL_S = 2.0
ROWS = rows_of([3, 1, 2, 5])


class Frail(Echo):
    """Halves tokens, but fails once as the file of an order says."""

    def halve(self, rows: Rows) -> LogProbs:
        (order,) = self.args
        assert isinstance(order, Path)
        if order.exists():
            how = order.read_text()
            order.unlink()
            if how == "mistake":
                raise ValueError(how)
            os.kill(os.getpid(), signal.Signals[how])
            # Other threads may be stopped first, while this one goes on for a moment.
            time.sleep(0.5)
        return super().halve(rows)


class Busy(Echo):
    """Works until a file is there, and knows how often it was asked to."""

    def plod_until(self, gate: Path, step: int) -> bool:
        self.remember(step)
        end = time.monotonic() + PATIENCE_S
        while not gate.exists() and time.monotonic() < end:
            time.sleep(0.1)
            touch()
        return gate.exists()


class Work:
    """A frail group and a busy one, and what was decided about their failures."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.order, self.gate = folder / "order", folder / "gate"
        self.frail = crew(Frail, 1, self.order)
        self.busy = crew(Busy, 1)
        self.decided: list[tuple[type[VerlRayError], int]] = []
        self.restarts = InPlaceRestarts(self._may_restart)
        self.restarts.own([self.frail])

    def _may_restart(self, failure: VerlRayError, step: int) -> bool:
        self.decided.append((type(failure), step))
        # A start shows no progress for longer than a test waits for a call.
        self.frail._processes.stall_s = 60
        return isinstance(failure, WorkerDied | DeadlineExceeded)

    def halved(self) -> RepeatedCall[Sharded[LogProbs]]:
        rows = put(ROWS)
        return self.restarts.call(
            self.frail, lambda: self.frail.scatter(Frail.halve, rows), STEP
        )

    def plodded(self, step: int) -> Call[bool]:
        """Call the busy group, which works until the gate is open."""
        self.gate.unlink(missing_ok=True)
        return self.busy.rank_zero(Busy.plod_until, self.gate, step)

    def watch(
        self, opens_after: int, *calls: Call[Any] | RepeatedCall[Any]
    ) -> Callable[[], None]:
        """Return a watch, which opens the gate after so many failures."""

        def check() -> None:
            self.restarts.check(calls, STEP)
            if len(self.decided) >= opens_after:
                self.gate.touch()

        return check


@pytest.fixture
def work(crew: Crew, tmp_path: Path) -> Iterator[Work]:
    made = Work(crew, tmp_path)
    yield made
    made.restarts.close()


def is_right(halved: Sharded[LogProbs]) -> bool:
    return bool((read(halved, 60).log_probs == ROWS.tokens / 2).all())


def test_a_stopped_group_is_asked_again_while_the_call_of_another_goes_on(
    work: Work,
) -> None:
    work.order.write_text("SIGSTOP")
    plodding, halving = work.plodded(1), work.halved()
    until(lambda: not work.order.exists())
    stopped = halving.present()
    assert stopped is not None
    hasten(stopped, STALL_S)
    watch = work.watch(1, plodding, halving)
    # The restart begins while the other call is waited for, which is made once.
    assert plodding.result(watch)
    assert work.decided == [(DeadlineExceeded, STEP)] and work.frail.incarnation == 2
    assert is_right(halving.result(watch))
    assert work.busy.rank_zero(Busy.remembered).result() == [1]
    assert work.restarts.num_started == 1


def test_a_group_that_dies_with_or_without_a_call_starts_again(work: Work) -> None:
    work.order.write_text("SIGKILL")
    plodding, halving = work.plodded(1), work.halved()
    assert is_right(halving.result(work.watch(1, plodding)))
    assert plodding.result()
    assert work.decided == [(WorkerDied, STEP)]

    process_info = work.frail.members()[0].process_info
    assert process_info is not None
    os.kill(process_info.pid, signal.SIGKILL)
    assert work.plodded(2).result(work.watch(2))
    assert work.decided == [(WorkerDied, STEP)] * 2 and work.frail.incarnation == 3

    # It gets no call while it starts, and whoever waits for it learns of other failures.
    halving = work.halved()
    with pytest.raises(VerlRayError, match="of the watch"):
        halving.result(failing_watch)
    assert is_right(halving.result())

    work.order.write_text("mistake")
    with pytest.raises(WorkerError, match="halve raised ValueError: mistake"):
        work.halved().result()
    assert work.decided[2:] == [(WorkerError, STEP)] and work.frail.incarnation == 3

    # Nobody may start the busy group again, so nothing is decided about it.
    dying = work.restarts.call(work.busy, lambda: work.busy.rank_zero(Busy.die, 0), 4)
    with pytest.raises(WorkerDied, match="died during die"):
        dying.result()
    assert len(work.decided) == 3


def failing_watch() -> None:
    raise VerlRayError("of the watch")


def test_the_call_of_former_processes_does_not_fail_the_new_ones(work: Work) -> None:
    """It ends after the watch has begun to start them."""

    def watch() -> None:
        if work.frail.incarnation == 1 and not work.order.exists():
            node = work.frail.members()[0].node
            died = WorkerDied("lost", role="frail", rank=0, node=node)
            work.restarts.begin(died, STEP)

    work.order.write_text("SIGSTOP")
    assert is_right(work.halved().result(watch))
    assert work.decided == [(WorkerDied, STEP)] and work.frail.incarnation == 2
