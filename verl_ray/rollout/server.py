"""A rollout engine for many callers at once, each with its own requests and replies.

Invariant: a caller gets the replies to its own requests, each token once. Only the
engine's thread touches the engine: every call here queues a task for it. Preemptible
requests belong to callers outside of the run, so the run never waits for them, and
never aborts them by id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from verl_ray.errors import EngineFailed, RolloutError
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_thread import (
    Caller,
    EngineThread,
    PauseMode,
    PauseRequest,
    Reply,
    ServerHealth,
)
from verl_ray.rollout.requests import Chunk, GenerationRequest

T = TypeVar("T")


class ChunkStream(Iterator[list[Chunk]]):
    """Chunks of a caller's requests, in the order in which they were sampled.

    The iterator consumes replies of the engine's thread and waits for the next of them.
    It ends when no request is pending, or with the error of a failed engine. A stream
    that is deleted early aborts its requests.

    Attributes:
        close: Aborts the pending requests from any thread, without waiting. A thread
            that iterates over the stream still gets the tokens that they have.
    """

    def __init__(
        self,
        caller: Caller,
        replies: queue.SimpleQueue[Reply],
        close: Callable[[], None],
    ) -> None:
        self._caller = caller
        self._replies = replies
        # This is an attribute and no method: whoever keeps it, to close the stream
        # later, does not keep the stream itself alive.
        self.close = close

    @property
    def has_ended(self) -> bool:
        """Whether no request is pending."""
        return not self._caller.pending

    def take(self, timeout_s: float | None = None) -> list[Chunk]:
        """Return the next chunks; none if there are none within `timeout_s` seconds."""
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return self._caller.take(reply)

    def __next__(self) -> list[Chunk]:
        if self.has_ended:
            raise StopIteration
        return self.take()

    def __del__(self) -> None:
        self.close()


class RolloutServer:
    """A rollout engine whose methods any thread may call."""

    def __init__(self, start: Callable[[], RolloutEngine]) -> None:
        """Start the engine's thread and wait for the engine.

        Args:
            start: Returns the engine. It is called on the engine's thread; an exception
                that it raises is raised here.
        """
        self._numbers = itertools.count()
        self._engine_thread = EngineThread(start)

    def respond(
        self,
        requests: Sequence[GenerationRequest],
        *,
        abortable_by_id: bool = False,
    ) -> ChunkStream:
        """Continue token sequences.

        The requests are queued at once, not with the first `next`. While generation is
        paused this waits for `resume`.

        Args:
            requests: The requests, with ids that are unique in this call.
            abortable_by_id: Others may abort these requests by their ids, which are
                then unique among all requests of this kind.

        Returns:
            The chunks of all requests, in the order in which they were sampled. Closing
            the stream early aborts the requests that are pending.

        Raises:
            RolloutError: A request cannot be served, the engine cannot generate now, or
                an id is in flight already.
            EngineFailed: The engine failed; what was not yielded yet is lost.
        """
        # The engine's thread fills this queue, and the stream consumes it.
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        caller = self._new_caller(requests, replies.put, abortable_by_id)
        self._submit(caller).result()
        return ChunkStream(caller, replies, functools.partial(self._abandon, caller))

    async def respond_async(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[Chunk], None]:
        """Continue token sequences, for a coroutine; otherwise like `respond`.

        The requests are queued with the first `anext`. The generator waits for replies
        of the engine's thread and ends when no request is pending; cancelling it aborts
        the pending requests.
        """
        loop = asyncio.get_running_loop()
        replies: asyncio.Queue[Reply] = asyncio.Queue()

        def deliver(reply: Reply) -> None:
            # The loop raises this error once it is closed, and then nobody listens.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(replies.put_nowait, reply)

        caller = self._new_caller(requests, deliver, abortable_by_id=False)
        try:
            await asyncio.wrap_future(self._submit(caller))
            while caller.pending:
                yield caller.take(await replies.get())
        finally:
            self._abandon(caller)

    def run(
        self, act: Callable[[RolloutEngine], T], *, waits_for_others: bool = False
    ) -> T:
        """Do something with the engine between two steps, and wait for the result.

        Weight updates, sleep and wake are done this way.

        Args:
            act: What is called with the engine, on its thread.
            waits_for_others: Whether it waits for other processes. Its lack of progress
                is then not a sign that this engine is stuck.
        """
        task = self._engine_thread.queue_task(act, waits_for_others=waits_for_others)
        result: T = task.result()
        return result

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """End requests early; each caller gets the tokens that there are.

        Preemptible requests are left alone.

        Args:
            request_ids: Ids of requests that are abortable by id; None = all requests.
        """
        self.run(lambda engine: self._engine_thread.abort(engine, request_ids))

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; new requests wait for `resume`.

        It returns when nothing is being sampled, or when another pause or `resume` has
        replaced this pause.

        Args:
            mode: "abort" ends the requests in flight. "wait" lets them end by
                themselves, except that it aborts preemptible ones. "keep" leaves them
                in flight: they continue after `resume`, with whatever policy version is
                committed by then. "recompute" does so, too, but frees their KV cache,
                which that version computes again; meanwhile the engine may sleep.
        """
        pause = PauseRequest(mode)
        self.run(lambda engine: self._engine_thread.begin_pause(engine, pause))
        pause.done.result()

    def resume(self) -> None:
        """Generate again. Without a pause it has no effect."""
        self.run(self._engine_thread.resume)

    def health(self) -> ServerHealth:
        """Return the server's present state. It never waits."""
        return self._engine_thread.health

    def close(self, *, process_exits: bool = False) -> None:
        """Close the engine and end its thread. Calling it again has no effect.

        Callers that wait get `EngineFailed`.

        Args:
            process_exits: Whether the process exits next; see `RolloutEngine.close`.
        """
        self._engine_thread.close(process_exits)

    def _new_caller(
        self,
        requests: Sequence[GenerationRequest],
        deliver: Callable[[Reply], None],
        abortable_by_id: bool,
    ) -> Caller:
        ids = {request.request_id for request in requests}
        if len(ids) != len(requests):
            raise RolloutError("request ids must be unique in one call")

        # Ids of different callers may be equal, so the engine gets numbers instead.
        numbered = {next(self._numbers): request for request in requests}
        return Caller(numbered, deliver, abortable_by_id)

    def _submit(self, caller: Caller) -> Future[None]:
        return self._engine_thread.queue_task(
            lambda engine: self._engine_thread.submit(engine, caller),
            waits_for_resume=True,
        )

    def _abandon(self, caller: Caller) -> None:
        """Abort the pending requests of a caller that takes no more chunks."""
        if caller.pending:
            # A failed engine has no requests in flight.
            with contextlib.suppress(EngineFailed):
                self._engine_thread.queue_task(
                    lambda engine: engine.abort(caller.pending)
                )
