"""Calls whose processes make no progress, and the process that is the cause.

One rule holds for every call. A process that makes progress is not late, however long
the call takes and however many calls are queued before it. A process that makes none
for `run.stall_s` seconds is reported. The process itself counts its progress
(`heartbeat.py`), so a queued call has no clock of its own.

Invariant: of several ranks that stand still, the error names those that hold up the
others as far as that can be known. Deliberately not here: failures that a process
reports itself (`rank_calls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_ray.cluster import failures
from verl_ray.cluster.hangs import Hang
from verl_ray.cluster.heartbeat import QUERY_FRACTION
from verl_ray.cluster.members import Member
from verl_ray.cluster.rank_calls import RankCall
from verl_ray.cluster.waiting import wait
from verl_ray.errors import DeadlineExceeded


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
    error = failures.stalled(
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
