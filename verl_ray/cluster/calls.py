"""Calls as futures: nothing waits until an answer is asked for, and then never past the deadline.

Invariant: the first failure of any rank ends the wait; where a process died, that is what is reported, not what its
death did to its peers. Deliberately not here: which ranks are called with what (`group.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import ray

from verl_ray.cluster import failures
from verl_ray.cluster.failures import Member
from verl_ray.cluster.host import Failure
from verl_ray.errors import StaleIncarnation, WorkerDied, WorkerError

T = TypeVar("T")

# After a rank's exception its peers are given this long: when one of them died, its death is the reason.
_GRACE_S = 2.0

_TICK_S = 0.5


class Caller(Protocol):
    """Who a call belongs to: it learns of failures, and tells when it has been restarted since."""

    role: str

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation."""
        ...

    def owns(self, error: WorkerError) -> bool:
        """Whether it is about one of its processes."""
        ...

    def fail(self, error: WorkerError) -> None:
        """A call failed: refuse further ones."""
        ...


@dataclass(frozen=True)
class Deadline:
    """Seconds allowed from `started` (monotonic clock), and the config key that sets them."""

    started: float
    allowed_s: float
    key: str

    @classmethod
    def of(cls, allowed_s: float, key: str) -> Deadline:
        """One that runs from now."""
        return cls(time.monotonic(), allowed_s, key)

    @property
    def left_s(self) -> float:
        """Seconds until it expires; 0 once it has."""
        return max(0.0, self.started + self.allowed_s - time.monotonic())


@dataclass(frozen=True)
class Flight:
    """One rank's part of a call: references to its stored batch and to its reply."""

    member: Member
    method: str
    payload: Any
    reply: Any
    deadline: Deadline


class Call(Generic[T]):
    """An answer to come. The deadline runs from the moment the call was made."""

    def __init__(
        self, caller: Caller, flights: Sequence[Flight], assemble: Callable[[list[tuple[Any, Any]]], T]
    ) -> None:
        self._caller = caller
        self._incarnation = caller.incarnation
        self._flights = tuple(flights)
        self._assemble = assemble
        self._answer: tuple[T] | None = None

    def result(self, deadline_s: float | None = None) -> T:
        """The answer of all ranks. `deadline_s` seconds from now replaces the deadline the call was made with.

        Raises WorkerError, WorkerDied, DeadlineExceeded, or StaleIncarnation when the group was restarted meanwhile.
        """
        if deadline_s is not None:
            deadline = Deadline.of(deadline_s, "the limit given for this answer")
            self._flights = tuple(replace(flight, deadline=deadline) for flight in self._flights)
        return wait_all([self])[0]

    def replied(self, timeout_s: float = 0.0) -> bool:
        """Whether all ranks have replied or failed, waiting for it up to `timeout_s`."""
        references = [flight.reply for flight in self._flights]
        if not references:
            return True
        ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        return len(ready) == len(references)

    def _finish(self, replies: Sequence[Any]) -> None:
        self._answer = (self._assemble([(f.payload, reply) for f, reply in zip(self._flights, replies, strict=True)]),)
        self._flights = ()  # the answer holds the references that are wanted


def wait_all(calls: Sequence[Call[T]], watch: Callable[[], None] | None = None) -> list[T]:
    """The answers of several calls, in order. A failure or an expired deadline of any of them ends the wait, and so
    does what `watch` raises, which is called now and then meanwhile. Those that have not answered may be waited for
    again."""
    for call in calls:
        check_current(call._caller, call._incarnation)
    waiting = [call for call in calls if call._answer is None]
    try:
        replies = collect([flight for call in waiting for flight in call._flights], watch)
    except WorkerError as error:
        for call in waiting:
            if call._caller.owns(error):
                call._caller.fail(error)
        raise
    start = 0
    for call in waiting:
        end = start + len(call._flights)
        call._finish(replies[start:end])
        start = end
    return [call._answer[0] for call in calls if call._answer is not None]


def collect(flights: Sequence[Flight], watch: Callable[[], None] | None = None) -> list[Any]:
    """The replies, in the order of the flights. Raises the first failure of any rank, or its root cause, or what
    `watch` raises."""
    pending = {flight.reply: flight for flight in flights}
    replies: dict[Any, Any] = {}
    while pending:
        left = min(flight.deadline.left_s for flight in pending.values())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=left if watch is None else min(left, _TICK_S))
        if not ready:
            if watch is None or left <= _TICK_S:
                raise late(list(pending.values()))
            watch()
            continue
        flight = pending.pop(ready[0])
        reply = receive(flight)
        if isinstance(reply, WorkerError):
            raise root_cause(reply, list(pending.values()))
        replies[flight.reply] = reply
    return [replies[flight.reply] for flight in flights]


def answered(flights: Sequence[Flight]) -> list[Any]:
    """The replies that come within their deadlines; failures and what is late are left out."""
    left = min((flight.deadline.left_s for flight in flights), default=0.0)
    ready, _ = ray.wait([f.reply for f in flights], num_returns=len(flights), timeout=left) if flights else ([], [])
    there = set(ready)
    replies = [receive(flight) for flight in flights if flight.reply in there]
    return [reply for reply in replies if not isinstance(reply, WorkerError)]


def receive(flight: Flight) -> Any:
    """One rank's reply, which is there already, or the error it amounts to."""
    try:
        reply = ray.get(flight.reply)
    except ray.exceptions.RayTaskError as error:  # an answer that cannot be pickled
        return failures.raised(flight.member, flight.method, Failure(str(error.cause or error), str(error), "", None))
    except ray.exceptions.RayError as error:
        return failures.died(flight.member, flight.method, error)
    return failures.raised(flight.member, flight.method, reply) if isinstance(reply, Failure) else reply


def root_cause(first: WorkerError, pending: Sequence[Flight]) -> WorkerError:
    """The death of another rank, if there was one, instead of what it did to this one."""
    until = time.monotonic() + _GRACE_S
    flights = {flight.reply: flight for flight in pending}
    while flights and not isinstance(first, WorkerDied):
        ready, _ = ray.wait(list(flights), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        reply = receive(flights.pop(ready[0]))
        if isinstance(reply, WorkerDied):
            return reply
    return first


def late(flights: Sequence[Flight]) -> WorkerError:
    """The error for the flights that have waited past their deadline: those of the call whose deadline is first."""
    first = min(flights, key=lambda flight: flight.deadline.left_s)
    waited_s = time.monotonic() - first.deadline.started
    members = [flight.member for flight in flights if flight.deadline is first.deadline]
    return failures.late(members, first.method, waited_s, first.deadline.key)


def check_current(caller: Caller, incarnation: int) -> None:
    """Raise StaleIncarnation when the caller was restarted after `incarnation`."""
    if incarnation != caller.incarnation:
        raise StaleIncarnation(
            f"an answer of incarnation {incarnation} was asked for, the group is at {caller.incarnation}",
            role=caller.role,
            rank=0,
            node="the driver",
        )
