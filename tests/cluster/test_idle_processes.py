"""Processes that die or stop while the driver waits for others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.crew import Echo, rows_of
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.members import Heartbeat, Member
from verl_ray.cluster.stalls import IdleProcesses
from verl_ray.cluster.waiting import put
from verl_ray.cluster.whereabouts import REGISTRY
from verl_ray.errors import DeadlineExceeded, WorkerDied, WorkerError

Crew = Callable[..., WorkerGroup[Any]]


class Idle(Echo):
    """The worker that nobody calls."""


class Busy(Echo):
    """The worker that the driver waits for."""


def waits_for_a_call(busy: WorkerGroup[Any]) -> None:
    try:
        wait_all([busy.rank_zero(Busy.wait_at_the_gate)])
    finally:
        busy.rank_zero(Busy.open_the_gate).result()


def waits_for_a_stream(busy: WorkerGroup[Any]) -> None:
    for _ in busy.stream(Busy.one_by_one, put(rows_of([1] * 100)), 0.3):
        pass


@pytest.mark.cluster
@pytest.mark.parametrize("waits", [waits_for_a_call, waits_for_a_stream])
def test_the_death_of_an_idle_process_ends_a_wait_for_others(
    crew: Crew, waits: Callable[[WorkerGroup[Any]], None]
) -> None:
    idle, busy = crew(Idle, 2), crew(Busy, 1)
    pids = idle.broadcast(Idle.pid).result()
    os.kill(pids[1], signal.SIGKILL)
    # What the others do has not ended by itself, or nothing would be raised.
    with pytest.raises(WorkerDied, match="while no call of it was waited") as caught:
        waits(busy)
    assert (caught.value.role, caught.value.rank) == ("idle", 1)
    assert "echo 1 is here" in caught.value.output
    assert f"Process {pids[1]} wrote to" in caught.value.detail
    assert "Ray says that its worker process has died" in caught.value.detail
    with pytest.raises(WorkerDied, match="the group failed earlier"):
        idle.broadcast(Idle.pid)

    # Its group is known to be lost, so the others may be waited for.
    assert busy.rank_zero(Busy.plod, 8).result() == 8
    idle.restart().wait()
    assert busy.rank_zero(Busy.plod, 8).result() == 8


@pytest.mark.cluster
def test_an_idle_process_that_is_stopped_ends_a_wait_for_others(crew: Crew) -> None:
    limit_s = 4.0
    idle, busy = crew(Idle, 2, stall_s=limit_s), crew(Busy, 1)
    pids = idle.broadcast(Idle.pid).result()
    os.kill(pids[0], signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"run.stall_s = 4\)") as caught:
        waits_for_a_call(busy)
    assert time.monotonic() - stopped > limit_s
    assert (caught.value.role, caught.value.rank) == ("idle", 0)
    assert "the process is stopped (SIGSTOP)" in caught.value.detail


@pytest.mark.cluster
def test_the_call_of_a_process_reports_its_end_if_it_has_one(crew: Crew) -> None:
    idle, busy = crew(Idle, 1), crew(Busy, 1)
    calls = [busy.rank_zero(Busy.plod, 20), idle.rank_zero(Idle.stick, 1)]
    os.kill(idle._processes.members[0].process_info.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="the process died during stick"):
        wait_all(calls)


# ----------------------------------------------------------------------- without Ray


class Handle:
    """A process that lives, and counts how often it is looked at."""

    looks = 0

    def _get_local_state(self) -> int:
        self.looks += 1
        return 2


class ManyProcesses:
    """A group of 512 processes that have just been asked for their status."""

    role, stall_s = "many", 600.0
    is_first_role = is_checked_while_idle = True

    def __init__(self) -> None:
        self.handle = Handle()
        self.requests = 0
        self._members = [
            Member("many", rank, self.handle, None, Heartbeat(self.request))
            for rank in range(512)
        ]

    def request(self) -> None:
        self.requests += 1

    def members(self) -> list[Member]:
        return self._members

    def fail(self, error: WorkerError) -> None:
        raise error


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ManyProcesses:
    """The only group; those that other tests share are not asked."""
    group: Any = ManyProcesses()
    monkeypatch.setattr(REGISTRY, "_groups", (group,))
    return group


def test_processes_are_asked_a_few_at_a_time(
    many: ManyProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    idle = IdleProcesses()
    idle.raise_if_lost()
    assert many.requests == 512  # nobody has looked for ever
    for member in many.members():
        member.heartbeat._clock.record_reply(0.0)

    counts = []
    for _ in range(1200):  # looks in 150 s, twice an eighth of the limit
        now_s += 0.125
        before = many.requests
        idle.raise_if_lost()
        counts.append(many.requests - before)
        for member in many.members():
            if member.heartbeat.unanswered_s:
                member.heartbeat._clock.record_reply(0.0)
    assert many.handle.looks == 512 * 301  # every half second
    assert max(counts) <= 4
    assert 500 <= sum(counts[600:]) <= 600
