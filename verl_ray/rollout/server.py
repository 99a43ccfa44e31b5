"""An engine behind a thread of its own: many callers at once, each with its own requests and its own answers.

Invariant: only the engine's thread touches the engine; what others want of it is done between two steps, in the order
it was asked. A caller gets the answers to its own requests, each token once. Deliberately not here: Ray, and which
server a request goes to.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from verl_ray.errors import EngineFailed, RolloutError
from verl_ray.rollout.base import Chunk, Request, RolloutEngine

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True)
class Health:
    """How a server is doing; answered at once, also while a step takes long."""

    policy_version: int | None
    in_flight: int
    steps: int
    stalled_s: float  # since the step under way began; 0 while there is nothing to do


@dataclass(frozen=True)
class _Task:
    act: Callable[[RolloutEngine], Any]
    future: Future[Any]
    waits_for_resume: bool


@dataclass(eq=False)
class _Caller:
    """One call of `respond`: where its answers go, and its own number of each of its requests."""

    own: dict[int, int]
    answers: queue.SimpleQueue[list[Chunk] | Exception] = field(default_factory=queue.SimpleQueue)


class RolloutServer:
    def __init__(self, start: Callable[[], RolloutEngine]) -> None:
        """`start` makes the engine, on its thread; what it raises is raised here."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._gate, self._closed = threading.Lock(), False  # nothing is asked behind the end
        self._numbers = itertools.count()
        self._health = Health(None, 0, 0, 0.0)
        self._step_began: float | None = None
        # The engine's thread's own: who waits for which request; what was asked while paused, and the pause itself.
        self._callers: dict[int, _Caller] = {}
        self._held: list[_Task] | None = None
        self._pausing: tuple[PauseMode, Future[None]] | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(start, started), name="rollout engine", daemon=True)
        self._thread.start()
        started.result()

    # ------------------------------------------------------------------------------------------------- any thread

    def respond(self, requests: Sequence[Request]) -> Iterator[list[Chunk]]:
        """Continue token sequences; yields what is due of any of them, in the order it was drawn.

        Requests are queued at once, not at the first `next`. A caller that stops early aborts what is left.

        Raises:
            RolloutError: a request cannot be served, or the engine cannot generate now.
            EngineFailed: the engine failed; what was not yielded is lost.
        """
        numbered = [replace(request, request_id=next(self._numbers)) for request in requests]
        caller = _Caller({new.request_id: old.request_id for new, old in zip(numbered, requests, strict=True)})
        if len(set(caller.own.values())) != len(requests):
            raise RolloutError("request ids must be unique in one call")

        def submit(engine: RolloutEngine) -> None:
            engine.submit(numbered)
            self._callers.update(dict.fromkeys(caller.own, caller))

        self._ask(submit, waits_for_resume=True).result()
        return self._answers(caller)

    def run(self, act: Callable[[RolloutEngine], T]) -> T:
        """Do something with the engine between two steps: a weight update, sleep, wake."""
        done: T = self._ask(act).result()
        return done

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """End requests early, by their callers' ids (None: all): each comes back as far as it got."""

        def end(engine: RolloutEngine) -> None:
            callers = self._callers.items()
            engine.abort([n for n, caller in callers if request_ids is None or caller.own[n] in request_ids])

        self.run(end)

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; returns when nothing is being drawn. New requests wait for `resume`.

        mode: "abort" ends the requests in flight where they are, "wait" lets them end by themselves, "keep" keeps them
        as they are: they go on after `resume`, under whatever version is committed by then.
        """
        paused: Future[None] = Future()

        def begin(engine: RolloutEngine) -> None:
            self._held = self._held or []
            self._pausing = mode, paused
            if mode == "abort":
                engine.abort()

        self.run(begin)
        paused.result()

    def resume(self) -> None:
        """Draw again. Without a pause: no effect."""

        def begin(engine: RolloutEngine) -> None:
            engine.resume()
            held, self._held = self._held or [], None
            for task in held:
                self._do(engine, task)

        self.run(begin)

    def health(self) -> Health:
        """How the server is doing now. Never waits."""
        began = self._step_began
        return replace(self._health, stalled_s=0.0 if began is None else time.monotonic() - began)

    def close(self, *, process_ends: bool = False) -> None:
        """End the engine and its thread; callers that wait get `EngineFailed`. Again is no error."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._tasks.put(_Task(lambda engine: engine.close(process_ends=process_ends), Future(), False))
                self._tasks.put(None)
        self._thread.join()

    def _ask(self, act: Callable[[RolloutEngine], Any], *, waits_for_resume: bool = False) -> Future[Any]:
        task = _Task(act, Future(), waits_for_resume)
        with self._gate:
            if self._closed:
                raise EngineFailed(_CLOSED)
            self._tasks.put(task)
        return task.future

    def _answers(self, caller: _Caller) -> Iterator[list[Chunk]]:
        # Consumes the caller's answers; waits for the engine's thread; ends when no request is left, or it failed.
        left = dict(caller.own)
        try:
            while left:
                chunks = caller.answers.get()
                if isinstance(chunks, Exception):
                    left.clear()
                    raise chunks
                yield [replace(chunk, request_id=left[chunk.request_id]) for chunk in chunks]
                for chunk in chunks:
                    if chunk.finish is not None:
                        del left[chunk.request_id]
        finally:
            if left:
                with contextlib.suppress(EngineFailed):
                    self._ask(lambda engine: engine.abort(left))

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
        while True:
            try:
                task = self._tasks.get(block=not engine.has_work)
            except queue.Empty:
                self._step(engine)
            else:
                if task is None:
                    break
                self._do(engine, task)
            self._see_pause(engine)
            self._tell(engine)
        self._refuse(EngineFailed(_CLOSED))

    def _do(self, engine: RolloutEngine, task: _Task) -> None:
        if task.waits_for_resume and self._held is not None:
            self._held.append(task)
            return
        try:
            task.future.set_result(task.act(engine))
        except Exception as error:
            task.future.set_exception(error)

    def _step(self, engine: RolloutEngine) -> None:
        self._step_began = time.monotonic()
        try:
            chunks = engine.step()
        except Exception as error:
            self._refuse(error)
            return
        finally:
            self._step_began = None
        due: dict[_Caller, list[Chunk]] = {}
        for chunk in chunks:
            due.setdefault(self._callers[chunk.request_id], []).append(chunk)
            if chunk.finish is not None:
                del self._callers[chunk.request_id]
        for caller, its in due.items():
            caller.answers.put(its)

    def _see_pause(self, engine: RolloutEngine) -> None:
        if self._pausing is None:
            return
        mode, paused = self._pausing
        if mode == "keep" or not engine.unfinished:
            self._pausing = None
            try:
                engine.pause()
                paused.set_result(None)
            except Exception as error:
                paused.set_exception(error)

    def _tell(self, engine: RolloutEngine) -> None:
        self._health = Health(engine.policy_version, engine.unfinished, engine.steps, 0.0)

    def _refuse(self, error: Exception) -> None:
        """Tell everybody who waits that nothing comes any more."""
        callers, self._callers = set(self._callers.values()), {}
        held, self._held = self._held or [], None
        for caller in callers:
            caller.answers.put(error)
        for task in held:
            task.future.set_exception(error)
        if self._pausing is not None:
            self._pausing[1].set_exception(error)
            self._pausing = None


_CLOSED = "the rollout engine is of no more use, start another: it was closed"
