"""An engine behind a thread of its own: many callers at once, each with its own requests and its own answers.

Invariant: only the engine's thread touches the engine; what others want of it is done between two steps, in the order
it was asked. A caller gets the answers to its own requests, each token once. Requests that give way are of callers
outside of the run: it never waits for them, nor aborts them by number. Deliberately not here: Ray, and which server a
request goes to.
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
from verl_ray.rollout.requests import Chunk, Request

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
Answer = list[Chunk] | Exception


@dataclass(frozen=True)
class Health:
    """How a server is doing; answered at once, also while a step takes long."""

    policy_version: int | None
    in_flight: int
    steps: int
    failure: str | None = None  # why the engine is of no more use; None = it is


@dataclass(frozen=True)
class _Task:
    act: Callable[[RolloutEngine], Any]
    future: Future[Any]
    waits_for_resume: bool
    waits_for_others: bool = False


@dataclass(eq=False)
class _Caller:
    """One call: its requests by their numbers here, where its answers go, and what of them it has yet to take."""

    requests: dict[int, Request]
    tell: Callable[[Answer], None]
    by_name: bool
    left: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = set(self.requests)

    def take(self, answer: Answer) -> list[Chunk]:
        """An answer under the caller's own ids."""
        if isinstance(answer, Exception):
            self.left.clear()
            raise answer
        self.left.difference_update(chunk.request_id for chunk in answer if chunk.finish is not None)
        return [replace(chunk, request_id=self.requests[chunk.request_id].request_id) for chunk in answer]


class Answers(Iterator[list[Chunk]]):
    """What is due to one caller: waits for the engine's thread; ends when no request is left, or it failed."""

    def __init__(self, caller: _Caller, answers: queue.SimpleQueue[Answer], leave: Callable[[], None]) -> None:
        self._caller, self._answers = caller, answers
        self.close = leave
        """Abort what is left, from any thread: who waits for it gets it as far as it got. Never waits."""

    def __next__(self) -> list[Chunk]:
        if not self._caller.left:
            raise StopIteration
        return self._caller.take(self._answers.get())

    def __del__(self) -> None:
        self.close()


class RolloutServer:
    def __init__(self, start: Callable[[], RolloutEngine]) -> None:
        """`start` makes the engine, on its thread; what it raises is raised here."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._gate, self._closed = threading.Lock(), False  # nothing is asked behind the end
        self._numbers = itertools.count()
        self._health = Health(None, 0, 0)
        # The engine's thread's own: who waits for which request; what was asked while paused, and the pause itself.
        self._callers: dict[int, _Caller] = {}
        self._held: list[_Task] | None = None
        self._pausing: tuple[PauseMode, Future[None]] | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(start, started), name="rollout engine", daemon=True)
        self._thread.start()
        started.result()

    # ------------------------------------------------------------------------------------------------- any thread

    def respond(self, requests: Sequence[Request], *, by_name: bool = False) -> Answers:
        """Continue token sequences; yields what is due of any of them, in the order it was drawn.

        Requests are queued at once, not at the first `next`. A caller that stops early aborts what is left. `by_name`:
        others may abort these by their ids.

        Raises:
            RolloutError: a request cannot be served, the engine cannot generate now, or a name is taken.
            EngineFailed: the engine failed; what was not yielded is lost.
        """
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        caller = self._caller(requests, answers.put, by_name)
        self._submit(caller).result()
        return Answers(caller, answers, functools.partial(self._leave, caller))

    async def respond_async(self, requests: Sequence[Request]) -> AsyncGenerator[list[Chunk], None]:
        """`respond` for a coroutine; they are queued at the first `anext`, and cancelling it aborts what is left."""
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Answer] = asyncio.Queue()

        def tell(answer: Answer) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        caller = self._caller(requests, tell)
        try:
            await asyncio.wrap_future(self._submit(caller))
            while caller.left:
                yield caller.take(await answers.get())
        finally:
            self._leave(caller)

    def run(self, act: Callable[[RolloutEngine], T], *, waits_for_others: bool = False) -> T:
        """Do something with the engine between two steps: a weight update, sleep, wake. `waits_for_others`: that it
        makes no progress says nothing of this engine."""
        done: T = self._ask(act, waits_for_others=waits_for_others).result()
        return done

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """End requests early, those of these names (None: all), but for those that give way. Each comes back as far as
        it got."""

        def end(engine: RolloutEngine) -> None:
            engine.abort([
                number for number, caller in self._callers.items()
                if not caller.requests[number].gives_way
                and (request_ids is None or (caller.by_name and caller.requests[number].request_id in request_ids))
            ])  # fmt: skip

        self.run(end)

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; returns when nothing is being drawn, or another pause or `resume` has taken its place.
        New requests wait for `resume`.

        mode: "abort" ends the requests in flight where they are, "wait" lets them end by themselves unless they give
        way, "keep" keeps them as they are: they go on after `resume`, under whatever version is committed by then.
        """
        paused: Future[None] = Future()

        def begin(engine: RolloutEngine) -> None:
            self._held = self._held or []
            self._settle_pause()
            self._pausing = mode, paused
            if mode == "abort":
                engine.abort()
            elif mode == "wait":
                engine.give_way()

        self.run(begin)
        paused.result()

    def resume(self) -> None:
        """Draw again. Without a pause: no effect."""

        def begin(engine: RolloutEngine) -> None:
            self._settle_pause()
            engine.resume()
            held, self._held = self._held or [], None
            while held:
                try:
                    self._do(engine, held.pop(0))
                except BaseException:
                    self._held = held  # the engine is lost, and they learn it with all others
                    raise

        self.run(begin)

    def health(self) -> Health:
        """How the server is doing now. Never waits."""
        return self._health

    def close(self, *, process_ends: bool = False) -> None:
        """End the engine and its thread; callers that wait get `EngineFailed`. Again is no error."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._tasks.put(_Task(lambda engine: engine.close(process_ends=process_ends), Future(), False))
                self._tasks.put(None)
        self._thread.join()

    def _caller(self, requests: Sequence[Request], tell: Callable[[Answer], None], by_name: bool = False) -> _Caller:
        if len({request.request_id for request in requests}) != len(requests):
            raise RolloutError("request ids must be unique in one call")
        return _Caller({next(self._numbers): request for request in requests}, tell, by_name)

    def _submit(self, caller: _Caller) -> Future[None]:
        def submit(engine: RolloutEngine) -> None:
            if caller.by_name:
                taken = {other.requests[number].request_id for number, other in self._callers.items() if other.by_name}
                if twice := taken & {request.request_id for request in caller.requests.values()}:
                    raise RolloutError(f"request ids must be unique in flight, found again: {sorted(twice)}")
            engine.submit([replace(request, request_id=number) for number, request in caller.requests.items()])
            self._callers.update(dict.fromkeys(caller.requests, caller))

        return self._ask(submit, waits_for_resume=True)

    def _leave(self, caller: _Caller) -> None:
        """Nobody takes what is left."""
        if caller.left:
            with contextlib.suppress(EngineFailed):
                self._ask(lambda engine: engine.abort(caller.left))

    def _ask(
        self, act: Callable[[RolloutEngine], Any], *, waits_for_resume: bool = False, waits_for_others: bool = False
    ) -> Future[Any]:
        task = _Task(act, Future(), waits_for_resume, waits_for_others)
        with self._gate:
            if self._closed:
                raise EngineFailed(_CLOSED)
            self._tasks.put(task)
        return task.future

    # ----------------------------------------------------------------------------------------- the engine's thread

    def _serve(self, start: Callable[[], RolloutEngine], started: Future[None]) -> None:
        # Consumes tasks, and steps the engine while it has work; waits for a task otherwise; ends at None.
        try:
            engine = start()
        except BaseException as error:
            started.set_exception(error)
            return
        self._tell(engine)
        started.set_result(None)
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn(engine)
            except BaseException as error:  # also SystemExit and its kin: a thread would end by them without a word
                self._fail(engine, error)
        self._refuse(EngineFailed(_CLOSED))

    def _turn(self, engine: RolloutEngine) -> bool:
        """One task or one step; False at the end. Raises where the engine did what no caller asked of it."""
        try:
            task = self._tasks.get(block=not engine.has_work)
        except queue.Empty:
            self._step(engine)
        else:
            if task is None:
                return False
            self._do(engine, task)
        self._see_pause(engine)
        self._tell(engine)
        return True

    def _fail(self, engine: RolloutEngine, error: BaseException) -> None:
        """Nobody knows what the engine holds now: it is of no more use, and whoever waits for it learns so."""
        engine.fail(f"its thread was ended by {error!r}")
        self._health = replace(self._health, in_flight=0, failure=engine.failure)
        self._refuse(_engine_failed(engine.failure, error))

    def _do(self, engine: RolloutEngine, task: _Task) -> None:
        if task.waits_for_resume and self._held is not None:
            self._held.append(task)
            return
        if not task.future.set_running_or_notify_cancel():  # who asked has gone
            return
        try:
            with waiting_for_others() if task.waits_for_others else contextlib.nullcontext():
                done = task.act(engine)
        except Exception as error:
            if engine.failure is not None and not isinstance(error, EngineFailed):
                error = _engine_failed(f"{engine.failure}: {error!r}", error)
            task.future.set_exception(error)
        except BaseException as error:
            task.future.set_exception(_engine_failed(f"it was ended by {error!r}", error))
            raise
        else:
            task.future.set_result(done)

    def _step(self, engine: RolloutEngine) -> None:
        try:
            chunks = engine.step()
        except RolloutError as error:  # it says what it cannot do; anything else is a defect
            self._refuse(error)
            return
        due: dict[_Caller, list[Chunk]] = {}
        for chunk in chunks:
            due.setdefault(self._callers[chunk.request_id], []).append(chunk)
            if chunk.finish is not None:
                del self._callers[chunk.request_id]
        for caller, its in due.items():
            caller.tell(its)

    def _settle_pause(self) -> None:
        """Whoever waits for a pause waits no longer: another one, or a resume, has come in between."""
        if self._pausing is not None:
            self._pausing[1].set_result(None)
            self._pausing = None

    def _see_pause(self, engine: RolloutEngine) -> None:
        if self._pausing is None:
            return
        mode, paused = self._pausing
        if mode == "keep" or not engine.unfinished:
            self._pausing = None
            try:
                engine.pause()
                paused.set_result(None)
            except RolloutError as error:
                paused.set_exception(error)
            except BaseException as error:
                paused.set_exception(_engine_failed(f"it was ended by {error!r}", error))
                raise

    def _tell(self, engine: RolloutEngine) -> None:
        self._health = Health(engine.policy_version, engine.unfinished, engine.steps, engine.failure)

    def _refuse(self, error: Exception) -> None:
        """Tell everybody who waits that nothing comes any more."""
        callers, self._callers = set(self._callers.values()), {}
        held, self._held = self._held or [], None
        for caller in callers:
            caller.tell(error)
        for task in held:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)
        if self._pausing is not None:
            self._pausing[1].set_exception(error)
            self._pausing = None


def _engine_failed(why: str | None, cause: BaseException) -> EngineFailed:
    """To be raised in threads of callers, where the stack of the cause is to be seen, too."""
    failed = EngineFailed(f"rollout engine: {why}")
    failed.__cause__ = cause
    return failed


_CLOSED = "the rollout engine is of no more use, start another: it was closed"
