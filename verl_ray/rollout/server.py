"""A rollout engine in a thread, for many callers at once, each with its own requests.

Invariant: only the engine's thread touches the engine: every call here queues a task
for it. Tasks run between two steps, in the order in which they were queued, except that
new requests wait while generation is paused. Whoever waits for the engine gets a result
or an error, also when the engine fails. A caller gets the replies to its own requests,
each token once. Preemptible requests belong to callers outside of the run, so the run
never waits for them, and never aborts them by id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from verl_ray.errors import EngineFailed, RolloutError
from verl_ray.profiling.progress import waiting_for_others
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk, EngineLoad, GenerationRequest

# ------------------------------------------------------------------ the engine's thread

PauseMode = Literal["abort", "wait", "keep", "recompute"]

_CLOSED = "the rollout engine can no longer be used; start another: it was closed"


@dataclass(frozen=True)
class ServerHealth:
    """State of a rollout server, known at once also while a step takes long.

    Attributes:
        policy_version: The version that tokens are sampled from, if there is one.
        in_flight: Number of requests in flight, or ended and not delivered yet.
        steps: Number of steps that sampled tokens.
        failure: Why the engine can no longer be used; None = it can.
        load: How busy the engine is.
    """

    policy_version: int | None
    in_flight: int
    steps: int
    failure: str | None = None
    load: EngineLoad = field(default_factory=EngineLoad)


Reply = list[Chunk] | Exception
"""Chunks of a caller's requests, or the error after which no more chunks follow."""


@dataclass(eq=False)
class Caller:
    """A call with requests in flight.

    A caller gets replies to its own requests only, under its own request ids. The
    engine knows a request by a number that is unique in the server.

    Attributes:
        requests: The call's requests by their numbers in the server.
        deliver: Hands a reply to the thread that waits for it. It is called on the
            engine's thread and must not wait.
        abortable_by_id: Whether others may abort the requests by their ids.
        pending: Numbers of the requests whose last chunk was not taken yet.
    """

    requests: dict[int, GenerationRequest]
    deliver: Callable[[Reply], None]
    abortable_by_id: bool
    pending: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pending = set(self.requests)

    def take(self, reply: Reply) -> list[Chunk]:
        """Return the chunks of a reply under the caller's ids, or raise its error."""
        if isinstance(reply, Exception):
            self.pending.clear()
            raise reply

        self.pending.difference_update(
            chunk.request_id for chunk in reply if chunk.finish is not None
        )
        return [
            replace(chunk, request_id=self.requests[chunk.request_id].request_id)
            for chunk in reply
        ]


@dataclass(frozen=True)
class PauseRequest:
    """A pause that has not taken effect yet, and whoever waits for it."""

    mode: PauseMode
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class _Task:
    """Work on the engine, and where its result goes.

    Attributes:
        act: What is called with the engine.
        result: The result of `act`, or its error.
        waits_for_resume: Whether a pause of generation delays the task.
        waits_for_others: Whether the task waits for other processes, so that its lack
            of progress is not a sign that this process is stuck.
    """

    act: Callable[[RolloutEngine], Any]
    result: Future[Any]
    waits_for_resume: bool
    waits_for_others: bool = False


class EngineThread:
    """An engine on its own thread.

    Attributes:
        health: The engine's state after the last task or step. It is replaced as a
            whole, so any thread may read it.
        tasks: Work that the thread has not begun yet; None ends the thread.
        pause_request: A pause that has not taken effect yet.
        routing_shape: As of the engine.
    """

    routing_shape: tuple[int, int] | None

    def __init__(self, start: Callable[[], RolloutEngine]) -> None:
        """Start the thread, create the engine on it, and wait for the engine.

        Args:
            start: Returns the engine. An exception that it raises is raised here.
        """
        self.health = ServerHealth(None, 0, 0)
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

        # The lock keeps tasks from being queued behind the one that ends the thread,
        # where nobody would do them.
        self._lock = threading.Lock()
        self._closed = False

        # Everything below is touched by the engine's thread alone. While generation is
        # paused, deferred tasks are a list, else None.
        self.pause_request: PauseRequest | None = None
        self._callers: dict[int, Caller] = {}
        self._deferred_tasks: list[_Task] | None = None

        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(start, started),
            name="rollout engine",
            daemon=True,
        )
        self._thread.start()
        started.result()

    # -------------------------------------------------------------- calls of any thread

    def queue_task(
        self,
        act: Callable[[RolloutEngine], Any],
        *,
        waits_for_resume: bool = False,
        waits_for_others: bool = False,
    ) -> Future[Any]:
        """Queue work on the engine, to be done between two steps.

        Raises:
            EngineFailed: The engine was closed.
        """
        task = _Task(act, Future(), waits_for_resume, waits_for_others)
        with self._lock:
            if self._closed:
                raise EngineFailed(_CLOSED)
            self.tasks.put(task)
        return task.result

    def close(self, process_exits: bool) -> None:
        """Close the engine after the tasks that are queued, and join the thread."""

        def close_engine(engine: RolloutEngine) -> None:
            engine.close(process_exits=process_exits)

        with self._lock:
            if not self._closed:
                self._closed = True
                self.tasks.put(_Task(close_engine, Future(), waits_for_resume=False))
                self.tasks.put(None)
        self._thread.join()

    # ------------------------------------------- parts of tasks, on the engine's thread

    def submit(self, engine: RolloutEngine, caller: Caller) -> None:
        """Submit a caller's requests to the engine under their numbers."""
        if caller.abortable_by_id:
            self._require_new_ids(caller)

        engine.submit(
            [
                replace(request, request_id=number)
                for number, request in caller.requests.items()
            ]
        )
        self._callers.update(dict.fromkeys(caller.requests, caller))

    def abort(self, engine: RolloutEngine, request_ids: Collection[int] | None) -> None:
        """Abort requests that are not preemptible: those with these ids, or all."""
        numbers = []
        for number, caller in self._callers.items():
            request = caller.requests[number]
            if request.preemptible:
                continue

            is_named = request_ids is not None and request.request_id in request_ids
            if request_ids is None or (caller.abortable_by_id and is_named):
                numbers.append(number)

        engine.abort(numbers)

    def begin_pause(self, engine: RolloutEngine, pause: PauseRequest) -> None:
        """Defer new requests, and pause the engine as soon as the mode allows it."""
        self._deferred_tasks = self._deferred_tasks or []
        self._release_pause_waiter()
        self.pause_request = pause

        if pause.mode == "abort":
            engine.abort()
        elif pause.mode == "wait":
            engine.preempt()

    def resume(self, engine: RolloutEngine) -> None:
        """Generate again, and do the tasks that were deferred, in their order."""
        self._release_pause_waiter()
        engine.resume()

        deferred_tasks = self._deferred_tasks or []
        self._deferred_tasks = None
        while deferred_tasks:
            try:
                self._do(engine, deferred_tasks.pop(0))
            except BaseException:
                # The engine is lost. The remaining tasks get the error together with
                # all others that wait.
                self._deferred_tasks = deferred_tasks
                raise

    def _require_new_ids(self, caller: Caller) -> None:
        ids_in_flight = {
            other.requests[number].request_id
            for number, other in self._callers.items()
            if other.abortable_by_id
        }
        ids = {request.request_id for request in caller.requests.values()}
        duplicates = ids_in_flight & ids
        if duplicates:
            raise RolloutError(
                "request ids must be unique in flight, found again:"
                f" {sorted(duplicates)}"
            )

    # ------------------------------------------------------------------------- the loop

    def _serve(self, start: Callable[[], RolloutEngine], started: Future[None]) -> None:
        """Consume tasks and step the engine until the task None, which ends the thread.

        The loop waits for a task only while the engine has no work.
        """
        try:
            engine = start()
        except BaseException as error:
            started.set_exception(error)
            return
        self._update_health(engine)
        self.routing_shape = engine.routing_shape
        started.set_result(None)

        goes_on = True
        while goes_on:
            try:
                goes_on = self._do_next(engine)
            # This includes SystemExit, which would end a thread without a message.
            except BaseException as error:
                self._fail(engine, error)

        self._fail_waiters(EngineFailed(_CLOSED))

    def _do_next(self, engine: RolloutEngine) -> bool:
        """Do a task, or a step if no task is queued.

        An exception that is raised here was caused by the engine, and by no caller.

        Returns:
            False if the task was None, which ends the thread.
        """
        try:
            task = self.tasks.get(block=not engine.has_work)
        except queue.Empty:
            self._step(engine)
        else:
            if task is None:
                return False
            self._do(engine, task)

        self._pause_if_possible(engine)
        self._update_health(engine)
        return True

    def _do(self, engine: RolloutEngine, task: _Task) -> None:
        """Do a task, or defer it while generation is paused."""
        if task.waits_for_resume and self._deferred_tasks is not None:
            self._deferred_tasks.append(task)
            return

        # A future can be cancelled by whoever waits for it; then nobody needs the task.
        if not task.result.set_running_or_notify_cancel():
            return

        waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if task.waits_for_others:
            waiting = waiting_for_others()
        try:
            with waiting:
                result = task.act(engine)
        except Exception as error:
            if engine.failure is not None and not isinstance(error, EngineFailed):
                error = _engine_failed(f"{engine.failure}: {error!r}", error)
            task.result.set_exception(error)
        except BaseException as error:
            task.result.set_exception(_stopped_by(error))
            raise
        else:
            task.result.set_result(result)

    def _step(self, engine: RolloutEngine) -> None:
        """Step the engine and deliver each caller's chunks in a single reply."""
        # A RolloutError is about what the engine cannot do now. Any other exception is
        # a defect, and fails the engine.
        try:
            chunks = engine.step()
        except RolloutError as error:
            self._fail_waiters(error)
            return

        replies: dict[Caller, list[Chunk]] = {}
        for chunk in chunks:
            caller = self._callers[chunk.request_id]
            replies.setdefault(caller, []).append(chunk)
            if chunk.finish is not None:
                del self._callers[chunk.request_id]

        for caller, reply in replies.items():
            caller.deliver(reply)

    def _update_health(self, engine: RolloutEngine) -> None:
        failure = engine.failure
        # An engine that failed may have nothing left to ask.
        load = EngineLoad() if failure is not None else engine.load
        self.health = ServerHealth(
            engine.policy_version, engine.unfinished, engine.steps, failure, load
        )

    # --------------------------------------------------------------------------- pauses

    def _pause_if_possible(self, engine: RolloutEngine) -> None:
        """Pause the engine once requests have ended, or at once if it keeps them."""
        pause = self.pause_request
        if pause is None:
            return
        if pause.mode in ("abort", "wait") and engine.unfinished:
            return

        self.pause_request = None
        try:
            engine.pause("recompute" if pause.mode == "recompute" else "keep")
            pause.done.set_result(None)
        except RolloutError as error:
            pause.done.set_exception(error)
        except BaseException as error:
            pause.done.set_exception(_stopped_by(error))
            raise

    def _release_pause_waiter(self) -> None:
        """Let a pause return that another pause or `resume` has replaced."""
        if self.pause_request is not None:
            self.pause_request.done.set_result(None)
            self.pause_request = None

    # ------------------------------------------------------------------------- failures

    def _fail(self, engine: RolloutEngine, error: BaseException) -> None:
        """Give up the engine, whose state is not known after this error."""
        engine.fail(f"its thread was stopped by {error!r}")
        self.health = replace(
            self.health, in_flight=0, failure=engine.failure, load=EngineLoad()
        )
        self._fail_waiters(_engine_failed(engine.failure, error))

    def _fail_waiters(self, error: Exception) -> None:
        """Deliver an error to everybody who waits for chunks, a task or a pause."""
        callers = set(self._callers.values())
        self._callers = {}
        deferred_tasks = self._deferred_tasks or []
        self._deferred_tasks = None

        for caller in callers:
            caller.deliver(error)
        for task in deferred_tasks:
            if task.result.set_running_or_notify_cancel():
                task.result.set_exception(error)
        if self.pause_request is not None:
            self.pause_request.done.set_exception(error)
            self.pause_request = None


def _stopped_by(error: BaseException) -> EngineFailed:
    return _engine_failed(f"it was stopped by {error!r}", error)


def _engine_failed(reason: str | None, cause: BaseException) -> EngineFailed:
    """Return an error for callers' threads that shows the stack of its cause."""
    failed = EngineFailed(f"rollout engine: {reason}")
    failed.__cause__ = cause
    return failed


# ------------------------------------------------------------------------- many callers

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

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """Hidden layers, and experts per token, of recorded experts; else None."""
        return self._engine_thread.routing_shape

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
                chunks = caller.take(await replies.get())
                # Whoever comes late takes together what is there.
                while caller.pending and not replies.empty():
                    chunks += caller.take(replies.get_nowait())
                yield chunks
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
