"""The pieces of generator methods, taken as they come.

Invariant: a piece that was yielded is kept until it is taken, and each is taken once. Deliberately not here: which
process is called (`group.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from verl_ray.cluster.calls import Caller, Flight, failing, receive, refuse_stalled
from verl_ray.cluster.lanes import CONTROL
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Sharded
from verl_ray.errors import WorkerError

R = TypeVar("R", bound=Batch)


class Stream(Generic[R]):
    """The pieces of one process's generator method. Nothing is lost by not waiting for it: pieces are kept."""

    def __init__(self, group: Caller, flight: Flight, stream_id: str) -> None:
        self.group = group
        self.flight = flight
        self._stream_id = stream_id

    def take(self) -> Sharded[R] | None:
        """The next piece, which should be there already (`next_stream`); None at the end.

        Raises as `Call.result` does, after which the group refuses further calls.
        """
        source = self.flight.payload
        with failing([self.group]):
            try:
                payload = next(source)
            except StopIteration:
                return None
            any_of([self])
            try:
                reply = receive(replace(self.flight, reply=next(source)))
            except StopIteration:  # the process ended between the two; the reason lies in the first
                reply = receive(replace(self.flight, reply=payload))
            if isinstance(reply, WorkerError):
                raise reply
        return Sharded.stored(payload, reply)

    def end(self) -> None:
        """Nobody listens any more: the worker's `abort`, if it has one, and no further piece."""
        lane = self.flight.member.actor.end_stream.options(concurrency_group=CONTROL)
        lane.remote(self.group.role, self._stream_id)


def next_stream(streams: Sequence[Stream[R]], timeout_s: float) -> Stream[R] | None:
    """The first of these that has a piece, an end or a failure to take; None when none has for `timeout_s` seconds.

    Raises DeadlineExceeded when the process of one of them makes no progress.
    """
    by_source = {stream.flight.payload: stream for stream in streams}
    ready = wait(list(by_source), 1, timeout_s)
    found = by_source.pop(ready[0]) if ready else None
    with failing([stream.group for stream in streams]):
        refuse_stalled([stream.flight for stream in by_source.values()])
    return found


def any_of(streams: Sequence[Stream[R]]) -> Stream[R]:
    """The first of these that has something to take; waits for it."""
    while True:
        ready = next_stream(streams, TICK_S)
        if ready is not None:
            return ready


def pieces(streams: Sequence[Stream[R]]) -> Iterator[Sharded[R]]:
    """What all of them yield, as it comes."""
    # Consumes every stream to its end; waits for the next piece of any; unblocked by a piece, an end, a failure or
    # a process that makes no progress; stops when all streams have ended or one has failed.
    running = list(streams)
    try:
        while running:
            stream = any_of(running)
            piece = stream.take()
            if piece is None:
                running.remove(stream)
            else:
                yield piece
    finally:
        for stream in running:
            stream.end()
