"""Calls as futures: nothing waits until an answer is asked for, and then only while the processes make progress.

One rule for every call: what makes progress is not late, however long it takes and however much is queued before it;
what makes none for `run.stall_s` seconds is named. The clock is the process's (`heartbeat.py`), so that of a queued
call does not run while its process is busy with those before it.

Invariant: the first failure of any rank ends the wait; where a process died, that is what is reported, not what its
death did to its peers; and of ranks that stand still it is the one that holds up the others, where that can be told.
Deliberately not here: which ranks are called with what (`group.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import ray

from verl_ray.cluster import failures
from verl_ray.cluster.failures import Member
from verl_ray.cluster.heartbeat import ASKED
from verl_ray.cluster.messages import Failure
from verl_ray.cluster.waiting import TICK_S, Background, wait
from verl_ray.errors import StaleIncarnation, WorkerDied, WorkerError, as_raised

T = TypeVar("T")

# After a rank's exception its peers are given this long: when one of them died, its death is the reason.
_GRACE_S = 2.0


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
class Flight:
    """One rank's part of a call: references to its stored batch and to its reply; of a stream, to its pieces alone."""

    member: Member
    method: str
    payload: Any
    reply: Any
    stall_s: float
    """How long the process may make no progress while this is under way."""
    since: float = field(default_factory=time.monotonic)

    @property
    def reference(self) -> Any:
        """What is waited for."""
        return self.payload if self.reply is None else self.reply


class Call(Generic[T]):
    """An answer to come."""

    def __init__(
        self, caller: Caller, flights: Sequence[Flight], assemble: Callable[[list[tuple[Any, Any]]], T]
    ) -> None:
        self._caller = caller
        self._incarnation = caller.incarnation
        self._flights = tuple(flights)
        self._assemble = assemble
        self._answer: tuple[T] | None = None

    def result(self) -> T:
        """The answer of all ranks.

        Raises what a rank raised on purpose, with its `origin`; WorkerError where a rank failed otherwise; WorkerDied,
        DeadlineExceeded; StaleIncarnation when the group was restarted meanwhile.
        """
        return wait_all([self])[0]

    def replied(self, timeout_s: float = 0.0) -> bool:
        """Whether all ranks have replied or failed, waiting for it up to `timeout_s`."""
        references = [flight.reply for flight in self._flights]
        if not references:
            return True
        return len(wait(references, len(references), timeout_s)) == len(references)

    def poll(self) -> bool:
        """Whether the answer is there; returns at once. Raises as `result` does once a rank has failed."""
        if self._answer is None:
            check_current(self._caller, self._incarnation)
            with failing([self._caller]):
                replies = arrived(self._flights)
            if replies is not None:
                self._finish(replies)
        return self._answer is not None

    def references(self) -> list[Any]:
        """What the answer is made of, as far as it is still to be waited for."""
        return [flight.reply for flight in self._flights]

    def _finish(self, replies: Sequence[Any]) -> None:
        self._answer = (self._assemble([(f.payload, reply) for f, reply in zip(self._flights, replies, strict=True)]),)
        self._flights = ()  # the answer holds the references that are wanted


def wait_all(
    calls: Sequence[Call[T]],
    watch: Callable[[], None] | None = None,
    background: Background | None = None,
) -> list[T]:
    """The answers of several calls, in order. A failure of any of them ends the wait, and so does one that makes no
    progress, and what `watch` raises, which is called now and then meanwhile. Those that have not answered may be
    waited for again. `background`: advanced meanwhile, as soon as it can be."""
    for call in calls:
        check_current(call._caller, call._incarnation)
    waiting = [call for call in calls if call._answer is None]
    with failing([call._caller for call in waiting]):
        replies = collect([flight for call in waiting for flight in call._flights], watch, background)
    start = 0
    for call in waiting:
        end = start + len(call._flights)
        call._finish(replies[start:end])
        start = end
    return [call._answer[0] for call in calls if call._answer is not None]


def look_after(calls: Sequence[Call[Any]]) -> None:
    """Raise DeadlineExceeded if one of the calls makes no progress; returns at once. One that has failed says so when
    its answer is asked for."""
    waiting = [call for call in calls if call._answer is None]
    flights = {flight.reply: flight for call in waiting for flight in call._flights}
    for reply in wait(list(flights), len(flights), 0.0) if flights else []:
        del flights[reply]
    with failing([call._caller for call in waiting]):
        refuse_stalled(list(flights.values()))


@contextlib.contextmanager
def failing(callers: Sequence[Caller]) -> Iterator[None]:
    """An error about a process of one of these: it refuses further calls. What a worker has raised on purpose is
    raised as it was there."""
    try:
        yield
    except WorkerError as error:
        for caller in callers:
            if caller.owns(error):
                caller.fail(error)
        raised = as_raised(error)
        if raised is error:
            raise
        raise raised from None


def collect(
    flights: Sequence[Flight], watch: Callable[[], None] | None = None, background: Background | None = None
) -> list[Any]:
    """The replies, in the order of the flights. Raises the first failure of any rank, or its root cause, or what
    `watch` or `background` raises."""
    pending = {flight.reply: flight for flight in flights}
    replies: dict[Any, Any] = {}
    looked = time.monotonic()
    if background is not None:
        background.advance()  # waits may be short, and many
    while pending:
        beside = [] if background is None else list(background.references())
        ready = wait([*pending, *beside], 1, TICK_S)
        if ready and ready[0] in pending:
            flight = pending.pop(ready[0])
            replies[flight.reply] = _received(flight, list(pending.values()))
        elif ready and background is not None:
            background.advance()
        if time.monotonic() - looked >= TICK_S:
            looked = time.monotonic()
            if watch is not None:
                watch()
            if background is not None:
                background.advance()  # it may have more to do than to take what is there
            refuse_stalled(list(pending.values()))
    return [replies[flight.reply] for flight in flights]


def arrived(flights: Sequence[Flight]) -> list[Any] | None:
    """The replies, in the order of the flights, once all are there; None before. Returns at once. Raises as `collect`
    does."""
    there = set(wait([flight.reply for flight in flights], len(flights), 0.0)) if flights else set()
    pending = [flight for flight in flights if flight.reply not in there]
    replies = [_received(flight, pending) for flight in flights if flight.reply in there]
    if not pending:
        return replies
    refuse_stalled(pending)
    return None


def _received(flight: Flight, pending: Sequence[Flight]) -> Any:
    """The reply, which is there; raises the failure that it amounts to, or that of a rank that died beside it."""
    reply = receive(flight)
    if isinstance(reply, WorkerError):
        raise root_cause(reply, pending)
    return reply


def answered(flights: Sequence[Flight], within_s: float) -> list[Any]:
    """The replies that come within so many seconds; failures and what is late are left out."""
    there = set(wait([flight.reply for flight in flights], len(flights), within_s)) if flights else set()
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
        ready = wait(list(flights), 1, max(0.0, until - time.monotonic()))
        if not ready:
            break
        reply = receive(flights.pop(ready[0]))
        if isinstance(reply, WorkerDied):
            return reply
    return first


def refuse_stalled(flights: Sequence[Flight]) -> None:
    """Raise DeadlineExceeded if one of these makes no progress. Asks the processes now and then; never waits long."""
    late = [flight for flight in flights if flight.member.heartbeat.is_late(flight.since, flight.stall_s)]
    if not late:
        return
    # What is there and has not been taken yet, because the driver was busy, is not late.
    there = set(wait([flight.reference for flight in flights], len(flights), 0.0))
    flights = [flight for flight in flights if flight.reference not in there]
    named = causes([flight for flight in late if flight in flights], flights)
    if named:
        silent = [*named, *(flight for flight in flights if flight not in named)]
        by_process: dict[int, Member] = {}  # under the role that was called first
        for flight in silent:
            by_process.setdefault(id(flight.member.actor), flight.member)
        members = list(by_process.values())
        others = {id(flight.member.actor) for flight in named}
        raise failures.stalled(
            [member for member in members if id(member.actor) in others],
            named[0].method,
            f"run.stall_s = {named[0].stall_s:g}",
            beside=[member for member in members if id(member.actor) not in others],
            since=named[0].since,
            mute=is_mute(named[0]),
        )


def causes(late: Sequence[Flight], flights: Sequence[Flight]) -> list[Flight]:
    """Of those that are late the ones that hold up the others: whose process does not answer; else those that do not
    say that they wait for other processes. Who waits is to blame only where nobody else is and all stand still; and
    nobody is while one does not answer that is not late itself, since it may be getting on."""
    if not late:
        return []
    mute = [one for one in flights if is_mute(one)]
    if mute:
        return [one for one in mute if one in late]
    told = [(one, one.member.heartbeat.status) for one in late]
    stuck = [one for one, status in told if status is None or not status.progress.waits_for_others]
    return stuck or (list(late) if len(late) == len(flights) else [])


def is_mute(flight: Flight) -> bool:
    """Whether its process does not answer on the control lane either."""
    return flight.member.heartbeat.unanswered_s >= ASKED * flight.stall_s


def check_current(caller: Caller, incarnation: int) -> None:
    """Raise StaleIncarnation when the caller was restarted after `incarnation`."""
    if incarnation != caller.incarnation:
        raise StaleIncarnation(
            f"an answer of incarnation {incarnation} was asked for, the group is at {caller.incarnation}",
            role=caller.role,
            rank=0,
            node="the driver",
        )
