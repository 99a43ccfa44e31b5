"""Processes that make no progress, and the one that is the cause.

One rule holds for every call. A process that makes progress is not late, however long
the call takes and however many calls are queued before it. A process that makes none
for `run.stall_s` seconds is reported. The process itself counts its progress
(`members.py`), so a queued call has no clock of its own.

A process without a call is noticed as well. Ray tells the driver of each end
(`_get_local_state`), so a look costs no call: it was measured to take 0.3 microseconds
per process. A stopped process (SIGSTOP) has not ended. Each process is asked for its
status every eighth of `run.stall_s`, a few at a time.

When the limit is exceeded, one table is printed. It says of every process what it does,
for how long, what it waits for, and at which line of ours. The stacks of all processes
go to a file in the run's folder of logs, since there may be hundreds.

Invariant: of several ranks that stand still, the error names those that hold up the
others as far as that can be known. Where a pending call can report a failure, the call
does so first. Groups whose owner looks at them are left to it: replicas
(`controllers/rollouts/supervisor.py`) and groups without state (`restarts.py`). A group
that is known to be lost is not looked at. A report that cannot be written or printed
does not hide the error that it is about.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import ray
from ray.core.generated.gcs_pb2 import ActorTableData

from verl_ray.cluster.members import QUERY_FRACTION, Member
from verl_ray.cluster.rank_calls import (
    RankCall,
    died,
    reason_of_end,
    stacks_of,
    stacks_text,
    stalled,
)
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.cluster.whereabouts import REGISTRY, ListedGroup, ProcessPoll
from verl_ray.errors import DeadlineExceeded
from verl_ray.profiling.process_table import ProcessRow, table_text

_ANSWERS_S = 1.0
_Process = tuple[ListedGroup, Member]


def raise_if_stalled(rank_calls: Sequence[RankCall]) -> None:
    """Raise DeadlineExceeded if one of the calls makes no progress.

    The function requests the status of the processes now and then. It never waits
    long.
    """
    late = [
        rank_call
        for rank_call in rank_calls
        if rank_call.member.heartbeat.is_late(rank_call.since, rank_call.stall_s)
    ]
    if not late:
        return

    # A reply that is available was only not received yet, because the driver was busy.
    references = [rank_call.reference for rank_call in rank_calls]
    ready = set(wait(references, len(references), 0.0))
    pending = [
        rank_call for rank_call in rank_calls if rank_call.reference not in ready
    ]
    late = [rank_call for rank_call in late if rank_call in pending]

    culprits = causes(late, pending)
    if culprits:
        raise _stall_error(culprits, pending)


def _stall_error(
    culprits: Sequence[RankCall], pending: Sequence[RankCall]
) -> DeadlineExceeded:
    """Error that names the culprits; a table of all processes is printed."""
    others = [rank_call for rank_call in pending if rank_call not in culprits]

    # Roles may share a process. It is named by the role that was called first.
    member_of_actor: dict[int, Member] = {}
    for rank_call in (*culprits, *others):
        member_of_actor.setdefault(id(rank_call.member.actor), rank_call.member)

    culprit_actors = {id(rank_call.member.actor) for rank_call in culprits}
    named: list[Member] = []
    waiting: list[Member] = []
    for actor, member in member_of_actor.items():
        if actor in culprit_actors:
            named.append(member)
        else:
            waiting.append(member)

    first = culprits[0]
    hang = Hang()
    error = stalled(
        named,
        first.method,
        f"run.stall_s = {first.stall_s:g}",
        waiting=waiting,
        since=first.since,
        mute=is_mute(first),
        gather=hang.gather,
    )
    hang.report(error)
    return error


def causes(late: Sequence[RankCall], pending: Sequence[RankCall]) -> list[RankCall]:
    """Late calls that hold up the others.

    Of the calls of a process that is late, the first one holds up the rest.

    1. Processes that do not reply to the driver are the cause. While there is one that
       is not late itself, nobody is named: it may still make progress.
    2. Else late processes that do not report that they wait for other processes.
    3. Else all late processes, but only if every pending one is late: a process that
       waits for one that makes progress is not to blame.

    Args:
        late: Calls whose processes have made no progress for too long.
        pending: All calls without a reply, the late ones included.
    """
    if not late:
        return []

    # The calls of a process share its progress. Its reply may have arrived after one
    # call was looked at and before the next one was.
    late_processes = {id(rank_call.member.actor) for rank_call in late}
    late = [
        rank_call
        for rank_call in pending
        if id(rank_call.member.actor) in late_processes
    ]

    # A mute process may be late itself, or about to be: then the others wait for it.
    mute = [rank_call for rank_call in pending if is_mute(rank_call)]
    if mute:
        return [rank_call for rank_call in mute if rank_call in late]

    stuck = [rank_call for rank_call in late if not _waits_for_others(rank_call)]
    if stuck:
        return stuck

    if len(late) == len(pending):
        return list(late)
    return []


def is_mute(rank_call: RankCall) -> bool:
    """Whether the process does not reply in the control group either."""
    unanswered_s = rank_call.member.heartbeat.unanswered_s
    return unanswered_s >= QUERY_FRACTION * rank_call.stall_s


def _waits_for_others(rank_call: RankCall) -> bool:
    """Whether the process last reported that it waits for another process."""
    status = rank_call.member.heartbeat.status
    return status is not None and status.progress.waits_for_others


# --------------------------------------------------------------------------- the report


class Hang:
    """All processes of this driver at the moment at which a limit was exceeded."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._rows: list[ProcessRow] = []
        self._stacks: dict[int, str] = {}

    def gather(self, involved: Sequence[Member]) -> dict[int, str]:
        """Ask all processes of the registry where they are, and for their stacks.

        It takes a few seconds where processes do not reply.

        Args:
            involved: Processes that the error is about, which may be starting.

        Returns:
            The stacks, by the identity of the process's handle (`stacks_of`).
        """
        by_actor = {id(member.actor): member for member in involved}
        for group in REGISTRY.hosts:
            for member in group.members():
                by_actor.setdefault(id(member.actor), member)
        self._members = list(by_actor.values())
        self._rows = ProcessPoll().take(_ANSWERS_S, involved).rows
        self._stacks = stacks_of(self._members)
        return self._stacks

    def report(self, error: DeadlineExceeded) -> None:
        """Print the table, and write the stacks to a file that the error then names."""
        table = table_text(
            f"{error.role} rank {error.rank} on {error.node}: {error.message}",
            self._rows,
        )
        with contextlib.suppress(OSError):
            print(table, file=sys.stderr, flush=True)

        log_dirs = [group.log_dir for group in REGISTRY.hosts]
        # While processes start for the first time, their error shows the stacks.
        if not log_dirs:
            return
        name = time.strftime("stacks-%Y%m%d-%H%M%S.txt")
        path = Path(log_dirs[0]) / name
        text = f"{table}\n\n{stacks_text(self._members, self._stacks)}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as failure:
            error.add_note(f"the stacks of all processes were not written: {failure}")
        else:
            error.add_note(f"the stacks of all processes are in {path}")


# ------------------------------------------------------ processes that nobody waits for


class IdleProcesses:
    """Looks at the processes of groups now and then, whenever the driver waits."""

    def __init__(
        self, groups: Callable[[], Iterable[ListedGroup]] | None = None
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
            error = stalled(
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


def _without_owner() -> list[ListedGroup]:
    """Return a group for each set of processes that nobody else looks at."""
    return [group for group in REGISTRY.hosts if group.is_checked_while_idle]


def _has_ended(member: Member) -> bool:
    """Whether Ray has told this driver that the process has ended."""
    return bool(member.actor._get_local_state() == ActorTableData.DEAD)


def _report_end(group: ListedGroup, member: Member) -> None:
    """Raise WorkerDied with Ray's reason, which a call of the process returns."""
    reason = reason_of_end(member)
    error = died(member, None, reason)
    group.fail(error)
    raise error


IDLE_PROCESSES = IdleProcesses()
