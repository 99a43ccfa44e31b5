"""The part of a call that one rank runs: its reply, what it does, and its failure.

Invariant: a failure of a rank is a value here, a `WorkerError`, and is raised by the
callers of this module. It says who failed, where, why, and with what last output; the
search for the reason never hangs, since every question has a limit of seconds, and it
never hides the failure itself. The words come from the last replies of the processes,
which are requested when a report is due soon (`verl_ray/profiling/phases.py`); nothing
waits for them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from verl_ray.cluster.context import CONTROL, Failure
from verl_ray.cluster.members import Member
from verl_ray.cluster.process_control import REPLY_S, examine
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, wait
from verl_ray.errors import (
    ClusterError,
    DeadlineExceeded,
    StaleIncarnation,
    WorkerDied,
    WorkerError,
)
from verl_ray.profiling.phases import PHASES, Count
from verl_ray.profiling.progress import READS, Progress

# The peers of a rank that raised get this long to reply. If one of them died in the
# meantime, its death is the root cause.
_GRACE_S = 2.0

_MOST = 3
"""Processes that a report names."""
_MIB = 1 << 20

START = "start ("
"""Beginning of the names of calls that start a process."""


@dataclass(frozen=True)
class RankCall:
    """One rank's part of a call.

    Attributes:
        member: Process that runs the call.
        method: Name of the method, for messages.
        payload: Reference to the batch that the rank stores. For a stream it is the
            source of the batches.
        reply: Reference to the rank's reply; None for a stream.
        stall_s: Seconds for which the process may make no progress meanwhile.
        since: Time at which the call was made, in seconds of the monotonic clock.
    """

    member: Member
    method: str
    payload: Any
    reply: Any
    stall_s: float
    since: float = field(default_factory=time.monotonic)

    @property
    def starts(self) -> bool:
        """Whether the call is a part of the start of its process."""
        return self.method.startswith(START)

    @property
    def reference(self) -> Any:
        """Reference that Ray can wait for."""
        if self.reply is None:
            return self.payload
        return self.reply


def ready_replies(rank_calls: Sequence[RankCall], timeout_s: float) -> set[Any]:
    """References to the replies that are available within `timeout_s` seconds."""
    if not rank_calls:
        return set()
    references = [rank_call.reply for rank_call in rank_calls]
    return set(wait(references, len(references), timeout_s))


def receive(rank_call: RankCall) -> Any:
    """One rank's reply, which must be available, or the error that it reports."""
    try:
        reply = RAY_CALLS.make(ray.get, rank_call.reply)
    except ray.exceptions.RayTaskError as error:
        # The method returned, but its result cannot be pickled.
        failure = Failure(str(error.cause or error), str(error), "", None)
        return raised(rank_call.member, rank_call.method, failure)
    except ray.exceptions.RayError as error:
        return died(rank_call.member, rank_call.method, error)

    if isinstance(reply, Failure):
        return raised(rank_call.member, rank_call.method, reply)
    return reply


def receive_or_raise(rank_call: RankCall, pending: Sequence[RankCall]) -> Any:
    """One rank's reply, which must be available; raise the root cause of a failure."""
    reply = receive(rank_call)
    if isinstance(reply, WorkerError):
        raise root_cause(reply, pending)
    return reply


def replies_within(rank_calls: Sequence[RankCall], timeout_s: float) -> list[Any]:
    """Replies that are available within `timeout_s` seconds, without failures."""
    return take_ready(list(rank_calls), timeout_s)


def take_ready(rank_calls: list[RankCall], timeout_s: float) -> list[Any]:
    """Take out the calls whose replies are available within `timeout_s` seconds.

    Returns:
        Their replies, without failures.
    """
    ready = ready_replies(rank_calls, timeout_s)
    taken = [rank_call for rank_call in rank_calls if rank_call.reply in ready]
    rank_calls[:] = [call for call in rank_calls if call.reply not in ready]
    replies = [receive(rank_call) for rank_call in taken]
    return [reply for reply in replies if not isinstance(reply, WorkerError)]


def root_cause(first: WorkerError, pending: Sequence[RankCall]) -> WorkerError:
    """The death of another rank if there was one, else the error `first`.

    A rank whose peer dies usually raises an error of its own, and may do so earlier
    than Ray notices the death.
    """
    if isinstance(first, WorkerDied):
        return first

    deadline = time.monotonic() + _GRACE_S
    by_reply = {rank_call.reply: rank_call for rank_call in pending}

    # Consumes the pending replies. Waits for the next one until the deadline. Ends at a
    # death, at the deadline, or when no reply is pending.
    while by_reply:
        remaining_s = max(0.0, deadline - time.monotonic())
        ready = wait(list(by_reply), 1, remaining_s)
        if not ready:
            break
        reply = receive(by_reply.pop(ready[0]))
        if isinstance(reply, WorkerDied):
            return reply
    return first


# ---------------------------------------------------------- what processes do meanwhile


def request_activity(rank_calls: Sequence[RankCall], *, at_once: bool = False) -> None:
    """Request the status of the processes, if a report is due soon or at once."""
    if at_once or PHASES.needs_details():
        for heartbeat in {rank_call.member.heartbeat for rank_call in rank_calls}:
            heartbeat.request()


def activity(rank_calls: Sequence[RankCall]) -> str:
    """Return what the processes of pending calls do: "actor 3/16 micro-batches".

    Of each role the process is named whose call was made first. Processes that have
    not said anything yet are left out, unless they are starting.
    """
    by_process = {
        rank_call.member.heartbeat: rank_call for rank_call in rank_calls[::-1]
    }
    texts: dict[str, str] = {}
    for heartbeat, rank_call in reversed(by_process.items()):
        status = heartbeat.status_since(rank_call.since)
        if status is None and not rank_call.starts:
            continue
        role = rank_call.member.role
        text = role
        if status is not None:
            if status.running is not None:
                role = status.running[0]
            text = f"{role} {amount(status.progress)}".strip()
        texts.setdefault(role, text)
    return ", ".join(list(texts.values())[:_MOST])


def outside_wait(rank_calls: Sequence[RankCall]) -> str:
    """Return what a process of pending calls waits for outside of the run, if any."""
    for rank_call in rank_calls:
        status = rank_call.member.heartbeat.status_since(rank_call.since)
        if status is not None and status.progress.waits_for:
            return f"waiting for {status.progress.waits_for}"
    return ""


def count_of(rank_calls: Sequence[RankCall]) -> Count | None:
    """Return how much the processes of pending calls have done together.

    Only those count that know the size of their work, and do the same as the first of
    them. None if there is no such process.
    """
    by_process = {rank_call.member.heartbeat: rank_call for rank_call in rank_calls}
    count: Count | None = None
    for heartbeat, rank_call in by_process.items():
        status = heartbeat.status_since(rank_call.since)
        if status is None or status.progress.total is None:
            continue
        done, total = status.progress.done, status.progress.total
        unit = status.progress.unit
        if count is None:
            count = Count(done, total, unit)
        elif count.unit == unit:
            count = Count(count.done + done, count.total + total, unit)
    return count


def amount(progress: Progress) -> str:
    """Return how much a process has done: "3/16 micro-batches", "120 MiB"."""
    if not progress.unit:
        return ""
    if progress.unit == READS:
        return "reading files"
    if progress.total is not None:
        return str(Count(progress.done, progress.total, progress.unit))
    if progress.unit.startswith("bytes"):
        return f"{progress.done // _MIB} MiB{progress.unit.removeprefix('bytes')}"
    return f"{progress.done} {progress.unit}"


# ----------------------------------------------------------------------------- failures

_MOST_WAITING = 4
"""Processes that wait for others whose stacks an error shows."""


def raised(member: Member, method: str, failure: Failure) -> WorkerError:
    """Error for a worker's method that raised an exception."""
    # The call was sent to an earlier incarnation; the worker itself has not failed.
    if isinstance(failure.error, StaleIncarnation):
        return failure.error

    detail = failure.trace
    if failure.error is not None and member.process_info is not None:
        detail = f"its stack is in {member.process_info.log_path}"

    error = WorkerError(
        f"{method} raised {failure.message}",
        role=member.role,
        rank=member.rank,
        node=member.node,
        detail=detail,
        output=failure.output,
    )
    # `as_raised` raises the cause instead where it is an error of this project.
    error.__cause__ = failure.error
    return error


def died(member: Member, method: str | None, error: Exception) -> WorkerDied:
    """Error for a worker's process that ended, or that cannot be reached.

    Args:
        member: The process.
        method: Method that was called; None if no call of it was waited for.
        error: Error that Ray raised for the call.
    """
    # Ray notices the broken connection before it knows the reason. A second call raises
    # an error with the reason.
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        error = reason_of_end(member, error)

    ((_, output),) = examine([member], stacks=False)
    detail = _explanation_by_ray(error)
    if member.process_info is not None:
        pid = member.process_info.pid
        log_path = member.process_info.log_path
        if output:
            detail += f"\nProcess {pid} wrote to {log_path}"
        else:
            detail += f"\nProcess {pid} wrote nothing to {log_path}"

    when = "while no call of it was waited for"
    if method is not None:
        when = f"during {method}"
    return WorkerDied(
        f"the process died {when}",
        role=member.role,
        rank=member.rank,
        node=member.node,
        detail=detail,
        output=output,
    )


def reason_of_end(member: Member, known: Exception | None = None) -> Exception:
    """Ray's reason for the end of a process, which a new call of it raises.

    Args:
        member: The process.
        known: Error that is returned if the call does not tell the reason.
    """
    explanation: Exception = ClusterError("Ray does not say why")
    try:
        status = member.actor.status.options(concurrency_group=CONTROL).remote()
        wait([status], 1, REPLY_S)
        RAY_CALLS.make(ray.get, status, timeout=TICK_S)
    except ray.exceptions.ActorDiedError as actor_died:
        return cast(Exception, actor_died)
    except Exception as other:
        explanation = other

    if known is None:
        return explanation
    known.add_note(f"a second call raised {type(explanation).__name__}")
    return known


def _explanation_by_ray(error: Exception) -> str:
    """Ray's explanation of an actor's end.

    Ray's own name of the actor is left out, and so is its advice, which concerns
    settings that a run does not have.
    """
    text = str(error)
    pattern = r"The actor is dead because (.*?)( Some common causes include|$)"
    match = re.search(pattern, text, re.DOTALL)
    if match is None:
        return text
    return f"Ray says that {match[1].strip()}"


def stalled(
    members: Sequence[Member],
    method: str,
    limit: str,
    waiting: Sequence[Member] = (),
    *,
    since: float = float("-inf"),
    mute: bool = False,
    gather: Callable[[Sequence[Member]], Mapping[int, str]] | None = None,
) -> DeadlineExceeded:
    """Error for processes that make no progress, with their stacks.

    Args:
        members: Processes that make no progress, at least one.
        method: Method that they were called with.
        limit: Setting and value that define for how long they may make no progress.
        waiting: Processes that wait for `members`; the stacks of a few are shown.
        since: Time at which the first member was called (monotonic clock). Earlier
            replies of it are about other work.
        mute: Whether the first member does not reply in its control group either.
        gather: Function that returns the stacks of these processes, at least; None for
            `stacks_of`.
    """
    # An error has one rank; the message names the others.
    first, *others = members
    last_activity = _last_activity(first, method, since, mute)
    message = f"{method} makes no progress: {last_activity} ({limit})"
    if others:
        other_ranks = [member.rank for member in others]
        message += f" (nor do ranks {other_ranks})"

    shown = [*members, *waiting[:_MOST_WAITING]]
    stacks = (gather or stacks_of)(shown)
    return DeadlineExceeded(
        message,
        role=first.role,
        rank=first.rank,
        node=first.node,
        detail=stacks_text(shown, stacks),
    )


def _last_activity(member: Member, method: str, since: float, mute: bool) -> str:
    """Last activity of a process according to its own reports."""
    status = member.heartbeat.status_since(since)
    silent_s = member.heartbeat.silent_s(since)
    if status is None:
        return f"the process has not replied for {silent_s:.1f} s"

    # The call may be queued behind another one, which is the one that is stuck.
    before = ""
    if status.running is not None:
        running_role, running_method, _ = status.running
        if method not in (running_method, f"start ({running_method})"):
            before = f"{running_method} of {running_role} comes first, and "

    done = str(status.progress)
    if mute:
        return (
            f"{before}the process, which had done {done}, has not replied for"
            f" {silent_s:.1f} s"
        )

    idle = f"{status.progress.idle_s:.1f} s"
    if status.progress.waits_for_others:
        idle += " while it waited for others"
    if done == "nothing":
        return f"{before}the process has done nothing for {idle}"
    return f"{before}the process did {done}, then nothing for {idle}"


def stacks_of(members: Sequence[Member]) -> dict[int, str]:
    """Stacks of each process, or its state where it does not reply.

    Returns:
        A text by the identity of the process's handle.
    """
    texts = _stacks_by_reply(members)

    silent = [index for index in range(len(members)) if index not in texts]
    states = examine([members[index] for index in silent], stacks=True)
    for index, (state, text) in zip(silent, states, strict=True):
        texts[index] = f"the control group does not reply either: {state}\n{text}"

    return {id(member.actor): texts[index] for index, member in enumerate(members)}


def stacks_text(members: Sequence[Member], stacks: Mapping[int, str]) -> str:
    """The stacks of these processes, each behind a line that names it.

    Args:
        members: The processes.
        stacks: Their stacks, as `stacks_of` returns them.
    """
    sections = []
    for member in members:
        header = f"--- {member.role} rank {member.rank} on {member.node}"
        sections.append(f"{header}\n{stacks[id(member.actor)].rstrip()}")
    return "\n".join(sections)


def _stacks_by_reply(members: Sequence[Member]) -> dict[int, str]:
    """Stacks that the processes report themselves, by position in `members`."""
    requests = [
        member.actor.stacks.options(concurrency_group=CONTROL).remote()
        for member in members
    ]

    # Processes that have not replied for a while will not reply to this either.
    lively = [
        request
        for member, request in zip(members, requests, strict=True)
        if member.heartbeat.unanswered_s <= REPLY_S
    ]
    if lively:
        wait(lively, len(lively), REPLY_S)
    replied = wait(requests, len(requests), TICK_S)

    texts: dict[int, str] = {}
    for index, request in enumerate(requests):
        if request not in replied:
            continue
        try:
            texts[index] = RAY_CALLS.make(ray.get, request)
        except ray.exceptions.RayError as error:
            texts[index] = f"the process cannot report its stacks: {error}"
    return texts
