"""The part of a call that one rank runs, its reply, and words for what it does.

Invariant: a failure of a rank is a value here, a `WorkerError`, and is raised by the
callers of this module. The words come from the last replies of the processes, which are
requested when a report is due soon (`verl_ray/profiling/phases.py`); nothing waits for
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from verl_ray.cluster import failures
from verl_ray.cluster.members import Member
from verl_ray.cluster.messages import Failure
from verl_ray.cluster.waiting import RAY_CALLS, wait
from verl_ray.errors import WorkerDied, WorkerError
from verl_ray.profiling.phases import PHASES
from verl_ray.profiling.progress import Progress

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
        return failures.raised(rank_call.member, rank_call.method, failure)
    except ray.exceptions.RayError as error:
        return failures.died(rank_call.member, rank_call.method, error)

    if isinstance(reply, Failure):
        return failures.raised(rank_call.member, rank_call.method, reply)
    return reply


def receive_or_raise(rank_call: RankCall, pending: Sequence[RankCall]) -> Any:
    """One rank's reply, which must be available; raise the root cause of a failure."""
    reply = receive(rank_call)
    if isinstance(reply, WorkerError):
        raise root_cause(reply, pending)
    return reply


def replies_within(rank_calls: Sequence[RankCall], timeout_s: float) -> list[Any]:
    """Replies that are available within `timeout_s` seconds, without failures."""
    ready = ready_replies(rank_calls, timeout_s)
    replies = [
        receive(rank_call) for rank_call in rank_calls if rank_call.reply in ready
    ]
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


def request_activity(rank_calls: Sequence[RankCall]) -> None:
    """Request the status of the processes, if a report is due soon."""
    if PHASES.is_due_soon:
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


def amount(progress: Progress) -> str:
    """Return how much a process has done: "3/16 micro-batches", "120 MiB read"."""
    if not progress.unit:
        return ""
    if progress.unit.startswith("bytes"):
        return f"{progress.done // _MIB} MiB{progress.unit.removeprefix('bytes')}"
    if progress.total is None:
        return f"{progress.done} {progress.unit}"
    return f"{progress.done}/{progress.total} {progress.unit}"
