"""Calls on several ranks as futures, and streams of the batches that they yield.

A call waits only when its result is requested, and then only while the processes make
progress (`stalls.py`).

Invariant: the first failure of any rank ends the wait. Where a process died, its death
is reported, and not what the death did to its peers. Every batch that a generator
method yields is received once, in its order; Ray stores it until then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from verl_ray.cluster.context import CONTROL
from verl_ray.cluster.rank_calls import (
    RankCall,
    activity,
    count_of,
    outside_wait,
    ready_replies,
    receive,
    receive_or_raise,
    request_activity,
)
from verl_ray.cluster.stalls import IDLE_PROCESSES, raise_if_stalled
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, Background, wait
from verl_ray.columns.batch import Batch
from verl_ray.columns.sharded import Sharded
from verl_ray.errors import StaleIncarnation, WorkerError, as_raised
from verl_ray.profiling.phases import PHASES, Count

T = TypeVar("T")
R = TypeVar("R", bound=Batch)


class CallOwner(Protocol):
    """Owner of a call. It learns of failures, and knows whether it was restarted."""

    role: str

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation."""
        ...

    def owns(self, error: WorkerError) -> bool:
        """Whether the error is about a process of this caller."""
        ...

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls, because a call failed with this error."""
        ...


class Call(Generic[T]):
    """Result that several ranks are computing.

    Args:
        caller: Owner of the call.
        rank_calls: Parts of the call, one per rank.
        assemble: Function that makes the result from the pairs (reference to the
            stored batch, reply) of all ranks.
    """

    def __init__(
        self,
        caller: CallOwner,
        rank_calls: Sequence[RankCall],
        assemble: Callable[[list[tuple[Any, Any]]], T],
    ) -> None:
        self._caller = caller
        self._incarnation = caller.incarnation
        self._rank_calls = tuple(rank_calls)
        self._assemble = assemble
        # A tuple, since the result itself may be None.
        self._result: tuple[T] | None = None

    def result(
        self,
        watch: Callable[[], None] | None = None,
        background: Background | None = None,
    ) -> T:
        """Wait for all ranks and return their result.

        The arguments are those of `wait_all`.

        Raises:
            VerlRayError: The error that a rank raised on purpose, with its `origin`.
            WorkerError: A rank failed in another way.
            WorkerDied: A process ended.
            DeadlineExceeded: A process makes no progress.
            StaleIncarnation: The group was restarted since the call.
        """
        return wait_all([self], watch, background)[0]

    def poll(self) -> bool:
        """Whether the result is available; returns at once.

        Raises:
            VerlRayError: A rank has failed, as in `result`.
        """
        if self._result is None:
            check_current(self._caller, self._incarnation)
            with reporting_failures_to([self._caller]):
                replies = replies_if_complete(self._rank_calls)
            if replies is not None:
                self._finish(replies)
        return self._result is not None

    def request_activity(self, *, at_once: bool = False) -> None:
        """Ask the processes where they are, if a report of the driver is due soon.

        Args:
            at_once: Whether to ask them in any case.
        """
        request_activity(self._rank_calls, at_once=at_once)

    def outside_wait(self) -> str:
        """Return what a process waits for outside of the run; empty for nothing."""
        return outside_wait(self._rank_calls)

    @property
    def is_stale(self) -> bool:
        """Whether the result will not come: its group was restarted since the call."""
        was_restarted = self._incarnation != self._caller.incarnation
        return self._result is None and was_restarted

    def references(self) -> list[Any]:
        """References to the replies that the result still depends on."""
        return [rank_call.reply for rank_call in self._rank_calls]

    def _finish(self, replies: Sequence[Any]) -> None:
        payloads = [rank_call.payload for rank_call in self._rank_calls]
        result = self._assemble(list(zip(payloads, replies, strict=True)))
        self._result = (result,)
        # The result holds the references that are still needed. Dropping the others
        # lets Ray free their objects.
        self._rank_calls = ()


def wait_all(
    calls: Sequence[Call[T]],
    watch: Callable[[], None] | None = None,
    background: Background | None = None,
) -> list[T]:
    """Wait for several calls and return their results in order.

    A failure of any call ends the wait, and so does a call that makes no progress. The
    calls without a reply may be waited for again.

    Args:
        calls: Calls to wait for.
        watch: Function that is called every half second meanwhile. An error that it
            raises ends the wait.
        background: Work that is advanced meanwhile as soon as it can be.
    """
    for call in calls:
        check_current(call._caller, call._incarnation)

    waiting = [call for call in calls if call._result is None]
    callers = [call._caller for call in waiting]
    rank_calls = [rank_call for call in waiting for rank_call in call._rank_calls]
    with reporting_failures_to(callers):
        replies = collect(rank_calls, watch, background)

    start = 0
    for call in waiting:
        end = start + len(call._rank_calls)
        call._finish(replies[start:end])
        start = end
    return [call._result[0] for call in calls if call._result is not None]


def check_progress(calls: Sequence[Call[Any]]) -> None:
    """Raise DeadlineExceeded if one of the calls makes no progress; return at once.

    A call that has failed raises its error when its result is requested, not here.
    """
    waiting = [call for call in calls if call._result is None]
    rank_calls = [rank_call for call in waiting for rank_call in call._rank_calls]
    ready = ready_replies(rank_calls, 0.0)
    pending = [rank_call for rank_call in rank_calls if rank_call.reply not in ready]

    with reporting_failures_to([call._caller for call in waiting]):
        raise_if_stalled(pending)


@contextlib.contextmanager
def reporting_failures_to(callers: Sequence[CallOwner]) -> Iterator[None]:
    """Make the caller that owns an error within the block refuse further calls.

    A caller that was restarted within the block is another one. An error that a worker
    raised on purpose is raised as the worker raised it.
    """
    incarnations = [caller.incarnation for caller in callers]
    try:
        yield
    except WorkerError as error:
        raised = as_raised(error)
        for caller, incarnation in zip(callers, incarnations, strict=True):
            is_present = caller.incarnation == incarnation
            if is_present and caller.owns(error) and not raised.spares_worker:
                caller.fail(error)
        if raised is error:
            raise
        raise raised from None


def collect(
    rank_calls: Sequence[RankCall],
    watch: Callable[[], None] | None = None,
    background: Background | None = None,
) -> list[Any]:
    """Wait for all replies and return them in the order of the calls.

    Raises:
        WorkerError: The first failure of any rank, or its root cause.
        Exception: Whatever `watch` or `background` raises.
    """
    pending = {rank_call.reply: rank_call for rank_call in rank_calls}
    replies: dict[Any, Any] = {}

    # A driver makes many short waits, which never come to the half-second look below.
    if background is not None:
        background.advance()

    def done() -> Count | None:
        if all(rank_call.starts for rank_call in rank_calls):
            return Count(len(replies), len(rank_calls), "processes")
        return count_of(list(pending.values()))

    with PHASES.detail(lambda: activity(list(pending.values())), done):
        _receive_all(pending, replies, watch, background)
    return [replies[rank_call.reply] for rank_call in rank_calls]


def _receive_all(
    pending: dict[Any, RankCall],
    replies: dict[Any, Any],
    watch: Callable[[], None] | None,
    background: Background | None,
) -> None:
    """Move every call from `pending` to `replies` as its reply arrives."""
    last_look = time.monotonic()

    # Consumes the pending replies. Waits for the next reply, for the background's
    # references, or for half a second. Ends when no reply is pending or one failed.
    while pending:
        background_references: list[Any] = []
        if background is not None:
            background_references = list(background.references())

        ready = wait([*pending, *background_references], 1, TICK_S)
        if ready and ready[0] in pending:
            rank_call = pending.pop(ready[0])
            still_pending = list(pending.values())
            replies[rank_call.reply] = receive_or_raise(rank_call, still_pending)
        elif ready and background is not None:
            background.advance()

        if time.monotonic() - last_look >= TICK_S:
            last_look = time.monotonic()
            if watch is not None:
                watch()
            if background is not None:
                # It may have work that no reference announces.
                background.advance()
            raise_if_stalled(list(pending.values()))
            IDLE_PROCESSES.raise_if_lost()
            request_activity(list(pending.values()))


def replies_if_complete(rank_calls: Sequence[RankCall]) -> list[Any] | None:
    """Replies in the order of the calls, or None while one is pending.

    The function returns at once. It raises as `collect` does.
    """
    ready = ready_replies(rank_calls, 0.0)
    pending = [rank_call for rank_call in rank_calls if rank_call.reply not in ready]
    replies = [
        receive_or_raise(rank_call, pending)
        for rank_call in rank_calls
        if rank_call.reply in ready
    ]
    if not pending:
        return replies

    raise_if_stalled(pending)
    return None


def check_current(caller: CallOwner, incarnation: int) -> None:
    """Raise StaleIncarnation if the caller was restarted after `incarnation`."""
    if incarnation == caller.incarnation:
        return
    raise StaleIncarnation(
        f"the result of a call on incarnation {incarnation} was requested, but the"
        f" group is at incarnation {caller.incarnation}",
        role=caller.role,
        rank=0,
        node="the driver",
    )


# ------------------------------------------------------------------------------ streams


class Stream(Generic[R]):
    """Batches of one process's generator method.

    A caller that does not wait for the stream loses nothing: batches are stored.

    Args:
        group: Owner of the stream.
        rank_call: The call, whose `payload` is Ray's generator of references.
        stream_id: Name of the stream in its process.
    """

    def __init__(self, group: CallOwner, rank_call: RankCall, stream_id: str) -> None:
        self.group = group
        self.rank_call = rank_call
        self._stream_id = stream_id

    def take(self) -> Sharded[R] | None:
        """Receive the next batch, which should be available (`ready_streams`).

        Returns:
            The batch, or None at the end of the stream.

        Raises:
            VerlRayError: The process failed, as in `Call.result`. The group refuses
                further calls then.
        """
        source = self.rank_call.payload
        with reporting_failures_to([self.group]):
            try:
                payload = RAY_CALLS.make(next, source)
            except StopIteration:
                return None

            # Each batch is followed by its receipt.
            wait_for_any([self])
            try:
                reply_reference = RAY_CALLS.make(next, source)
            except StopIteration:
                # The process ended between the two. The first reference holds the
                # reason.
                reply_reference = payload
            reply = receive(replace(self.rank_call, reply=reply_reference))
            if isinstance(reply, WorkerError):
                raise reply
        return Sharded.stored(payload, reply)

    def note_resumed(self) -> None:
        """Count from now on for how long the process makes no progress."""
        self.rank_call = replace(self.rank_call, since=time.monotonic())

    def abandon(self) -> None:
        """Stop the worker's generator, of which no further batch is received.

        The process calls the worker's `abort` if it has one.
        """
        actor = self.rank_call.member.actor
        control = actor.abandon_stream.options(concurrency_group=CONTROL)
        control.remote(self.group.role, self._stream_id)


def ready_streams(
    streams: Sequence[Stream[R]], timeout_s: float, *, paused: bool = False
) -> list[Stream[R]]:
    """The streams that have a batch, their end or a failure to take.

    Args:
        streams: Streams of any processes.
        timeout_s: For how long to wait for the first one, in seconds.
        paused: Whether the processes were told to make no progress.

    Raises:
        DeadlineExceeded: The process of one of the other streams makes no progress.
        WorkerError: A process that nobody waits for is lost (`stalls.py`).
    """
    by_source = {stream.rank_call.payload: stream for stream in streams}
    sources = list(by_source)
    available = wait(sources, 1, timeout_s)
    if available:
        # Others may have come together with the first one.
        available = wait(sources, len(sources), 0.0)
    ready = [by_source.pop(source) for source in available]
    if paused:
        return ready

    with reporting_failures_to([stream.group for stream in streams]):
        raise_if_stalled([stream.rank_call for stream in by_source.values()])
    IDLE_PROCESSES.raise_if_lost()
    return ready


def wait_for_any(streams: Sequence[Stream[R]]) -> Stream[R]:
    """Wait for the first stream that has something to take."""
    # Ends when a stream is ready, or when a process makes no progress.
    while True:
        ready = ready_streams(streams, TICK_S)
        if ready:
            return ready[0]


def iterate_streams(streams: Sequence[Stream[R]]) -> Iterator[Sharded[R]]:
    """Yield the batches of all streams as they arrive."""
    # Consumes every stream to its end. Waits for the next batch of any. A batch, an
    # end, a failure or a process without progress ends the wait. The loop ends when all
    # streams have ended or one has failed.
    running = list(streams)
    try:
        while running:
            stream = wait_for_any(running)
            batch = stream.take()
            if batch is None:
                running.remove(stream)
            else:
                yield batch
    finally:
        for stream in running:
            stream.abandon()
