"""Processes that nobody waits for: their end and their silence are noticed as well.

A call reports the end of its process, and `stalls.py` finds out that the process of a
pending call is stuck. A process without a call has neither. Ray tells the driver of
each end (`_get_local_state`), so a look costs no call: it was measured to take 0.3
microseconds per process. A stopped process (SIGSTOP) has not ended. Each process is
asked for its status every eighth of `run.stall_s`, a few at a time.

Invariant: where a pending call can report a failure, the call does so first. Groups
whose owner looks at them are left to it: replicas
(`controllers/rollouts/supervisor.py`) and groups without state (`restarts.py`). A group
that is known to be lost is not looked at.
Deliberately not here: what is listed (`roster.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import ray
from ray.core.generated.gcs_pb2 import ActorTableData

from verl_ray.cluster import failures
from verl_ray.cluster.hangs import Hang
from verl_ray.cluster.heartbeat import QUERY_FRACTION
from verl_ray.cluster.members import Member
from verl_ray.cluster.roster import ROSTER
from verl_ray.cluster.waiting import TICK_S

if TYPE_CHECKING:  # it imports this module
    from verl_ray.cluster.role_processes import RoleProcesses

_Process = tuple["RoleProcesses", Member]


class IdleProcesses:
    """Looks at the processes of groups now and then, whenever the driver waits."""

    def __init__(
        self, groups: Callable[[], Iterable[RoleProcesses]] | None = None
    ) -> None:
        """Begin without a look.

        Args:
            groups: Returns the groups to look at, no two of which share processes; None
                for all that have no owner.
        """
        self._groups = groups or _without_owner
        self._last_look = float("-inf")
        self._ended: set[int] = set()
        """Ids of the handles of processes that had ended at the last look."""
        self._turn = 0
        """Number of the process that is asked next."""
        self._is_off = False

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leave it to a later wait to raise: what is done now needs none of them."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def raise_if_lost(self) -> None:
        """Raise if a process has ended or does not reply; looks every half second.

        Raises:
            WorkerDied: A process has ended, and no call has reported it.
            DeadlineExceeded: A process has not replied for `run.stall_s`.
        """
        now = time.monotonic()
        since_last_s = now - self._last_look
        if self._is_off or since_last_s < TICK_S:
            return
        self._last_look = now

        processes = [
            (group, member) for group in self._groups() for member in group.members()
        ]
        self._raise_if_ended(processes)
        self._raise_if_silent(processes, since_last_s)

    def _raise_if_ended(self, processes: Sequence[_Process]) -> None:
        ended = [process for process in processes if _has_ended(process[1])]
        known = self._ended
        self._ended = {id(member.actor) for _, member in ended}
        for group, member in ended:
            # Ray fails the calls of a process just after it notes the end. They have
            # until the next look to report it.
            if id(member.actor) in known:
                _report_end(group, member)

    def _raise_if_silent(
        self, processes: Sequence[_Process], since_last_s: float
    ) -> None:
        """Ask some processes for their status, and look for replies that are due."""
        waiting = [
            process for process in processes if process[1].heartbeat.unanswered_s
        ]
        for group, member in (*waiting, *self._next(processes, since_last_s)):
            interval_s = QUERY_FRACTION * group.stall_s
            # A pending call is reported an eighth of the limit after the request.
            deadline_s = group.stall_s + interval_s + 2 * TICK_S
            try:
                # A turn that comes a moment early must not be left out.
                if member.heartbeat.poll(interval_s / 2, deadline_s):
                    continue
            except ray.exceptions.RayError:
                # The next look reports the end.
                continue
            since = time.monotonic() - member.heartbeat.unanswered_s
            hang = Hang()
            error = failures.stalled(
                [member],
                "the control group",
                f"run.stall_s = {group.stall_s:g}",
                since=since,
                mute=True,
                gather=hang.gather,
            )
            hang.report(error)
            group.fail(error)
            raise error

    def _next(
        self, processes: Sequence[_Process], since_last_s: float
    ) -> list[_Process]:
        """Return the processes whose turn it is, so that all get one in time."""
        if not processes:
            return []
        shortest_s = min(group.stall_s for group, _ in processes)
        share = min(1.0, since_last_s / (QUERY_FRACTION * shortest_s))
        count = math.ceil(share * len(processes))
        chosen = [
            processes[(self._turn + offset) % len(processes)] for offset in range(count)
        ]
        self._turn = (self._turn + count) % len(processes)
        return chosen


def _without_owner() -> list[RoleProcesses]:
    """Return a group for each set of processes that nobody else looks at."""
    return [group for group in ROSTER.hosts if group.is_checked_while_idle]


def _has_ended(member: Member) -> bool:
    """Whether Ray has told this driver that the process has ended."""
    return bool(member.actor._get_local_state() == ActorTableData.DEAD)


def _report_end(group: RoleProcesses, member: Member) -> None:
    """Raise WorkerDied with Ray's reason, which a call of the process returns."""
    reason = failures.reason_of_end(member)
    error = failures.died(member, None, reason)
    group.fail(error)
    raise error


IDLE_PROCESSES = IdleProcesses()
