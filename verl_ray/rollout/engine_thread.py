"""The thread that owns a rollout engine: it runs tasks and steps the engine.

Invariant: only this thread touches the engine. Tasks run between two steps, in the
order in which they were queued, except that new requests wait while generation is
paused. Whoever waits for the engine gets a result or an error, also when the engine
fails.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_ray.errors import EngineFailed, RolloutError
from verl_ray.profiling.progress import waiting_for_others
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk, EngineLoad, GenerationRequest

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
    """

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
