"""Streams: the batches of generator methods, received as they arrive.

Invariant: every batch that a generator yields is received once, in its order; Ray
stores it until then. Deliberately not here: the choice of processes (`group.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from verl_ray.cluster.calls import CallOwner, reporting_failures_to
from verl_ray.cluster.concurrency_groups import CONTROL
from verl_ray.cluster.idle_processes import IDLE_PROCESSES
from verl_ray.cluster.rank_calls import RankCall, receive
from verl_ray.cluster.ray_calls import RAY_CALLS
from verl_ray.cluster.stalls import raise_if_stalled
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Sharded
from verl_ray.errors import WorkerError

R = TypeVar("R", bound=Batch)


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
        WorkerError: A process that nobody waits for is lost (`idle_processes.py`).
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
