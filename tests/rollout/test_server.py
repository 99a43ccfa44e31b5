"""Many callers of an engine: replies, aborts, the four pauses, and health."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from scripts.bench.scripted_engine import ScriptedEngine
from verl_ray.columns.stages import Finish
from verl_ray.errors import EngineFailed, RolloutError
from verl_ray.profiling.progress import progress
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import (
    Chunk,
    EngineLoad,
    GenerationProgress,
    GenerationRequest,
    Sampling,
)
from verl_ray.rollout.server import RolloutServer


class Gated(ScriptedEngine):
    """An engine that samples a token each time its gate is opened.

    `free` takes the gate away. While the gate is closed, a step samples nothing, or does
    not end if the engine `hangs`.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda asked: [(int(asked.tokens[0]) + i, -0.5) for i in range(1000)],
            initial_version=3,
        )
        self.gate = threading.Semaphore(0)
        self.is_free = self.hangs = False
        self.generated = 0
        self.thread = threading.get_ident()

    def free(self) -> None:
        self.is_free = True
        self.gate.release()

    def _step(self) -> Iterator[GenerationProgress]:
        assert threading.get_ident() == self.thread
        if self.is_free or self.gate.acquire(timeout=60 if self.hangs else 0.002):
            self.generated += 1
            yield from super()._step()


@pytest.fixture
def engine() -> list[Gated]:
    return []


@pytest.fixture
def server(engine: list[Gated]) -> Iterator[RolloutServer]:
    def start() -> Gated:
        engine.append(Gated())
        return engine[0]

    server = RolloutServer(start)
    yield server
    engine[0].free()
    server.close()


def request(
    number: int, tokens: int, *, first: int = 10, stream: bool = False
) -> GenerationRequest:
    return GenerationRequest(
        number,
        np.array([first], np.int32),
        Sampling(1.0, 1.0, -1, tokens, ()),
        seed=0,
        stream=stream,
    )


def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def joined(chunks: list[Chunk]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        found.setdefault(chunk.request_id, []).extend(chunk.tokens.tolist())
    return found


def test_each_caller_gets_its_own_answers_under_its_own_ids(
    server: RolloutServer, engine: list[Gated]
) -> None:
    first = server.respond([request(1, 3), request(2, 1, first=20)])
    second = server.respond([request(1, 2, first=30, stream=True)])
    engine[0].free()
    assert joined([chunk for chunks in second for chunk in chunks]) == {1: [30, 31]}
    assert joined([chunk for chunks in first for chunk in chunks]) == {
        1: [10, 11, 12],
        2: [20],
    }
    assert (server.health().in_flight, server.health().policy_version) == (0, 3)
    with pytest.raises(RolloutError, match="request ids must be unique in one call"):
        server.respond([request(1, 1), request(1, 1)])


def test_requests_are_queued_before_anybody_listens_and_one_that_stops_listening_aborts_its_own(
    server: RolloutServer, engine: list[Gated]
) -> None:
    left, kept = (
        server.respond([request(1, 900, stream=True)]),
        server.respond([request(1, 3, stream=True)]),
    )
    assert server.health().in_flight == 2
    engine[0].gate.release()
    assert len(next(left)) == 1
    left.close()
    engine[0].free()
    assert joined([chunk for chunks in kept for chunk in chunks]) == {1: [10, 11, 12]}
    soon(lambda: server.health().in_flight == 0)


def test_an_abort_ends_requests_where_they_are(
    server: RolloutServer, engine: list[Gated]
) -> None:
    rows = server.respond(
        [request(2, 900)]
    )  # of somebody whose ids are nobody else's business
    replies = server.respond([request(1, 900), request(2, 900)], abortable_by_id=True)
    engine[0].gate.release(2)
    soon(lambda: engine[0].generated == 2)
    with pytest.raises(
        RolloutError, match=r"must be unique in flight, found again: \[2\]"
    ):
        server.respond([request(2, 900)], abortable_by_id=True)
    server.abort([2, 77])
    (chunk,) = next(replies)
    assert (chunk.request_id, chunk.finish, len(chunk.tokens)) == (2, Finish.ABORTED, 2)
    assert server.health().in_flight == 2
    server.abort()
    ((chunk,),) = list(replies)
    assert (chunk.request_id, chunk.finish, len(chunk.tokens)) == (1, Finish.ABORTED, 2)
    ((chunk,),) = list(rows)
    assert (chunk.request_id, chunk.finish) == (2, Finish.ABORTED)


def test_what_waits_for_others_says_so(server: RolloutServer) -> None:
    for waits in (False, True):
        began, done = threading.Event(), threading.Event()

        def act(
            engine: RolloutEngine,
            began: threading.Event = began,
            done: threading.Event = done,
        ) -> bool:
            began.set()
            return done.wait(100)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.run, act, waits_for_others=waits)
            assert began.wait(100)
            assert progress().waits_for_others is waits
            done.set()
            assert running.result(60)
    assert not progress().waits_for_others


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "recompute"])
def test_a_pause_holds_what_comes_and_treats_what_is_there_as_told(
    server: RolloutServer, engine: list[Gated], mode: str
) -> None:
    replies = server.respond([request(1, 4)])
    engine[0].gate.release(2)
    soon(lambda: engine[0].generated == 2)
    with ThreadPoolExecutor(2) as pool:
        pausing = pool.submit(server.pause, mode)  # type: ignore[arg-type]
        soon(lambda: pausing.done() or mode == "wait")
        engine[0].free()
        pausing.result(60)
        later = pool.submit(
            lambda: [
                chunk for chunks in server.respond([request(5, 1)]) for chunk in chunks
            ]
        )
        steps = server.health().steps
        time.sleep(0.1)
        assert server.health().steps == steps and not later.done()
        load = server.health().load
        if mode in ("abort", "wait"):
            ((chunk,),) = list(replies)
            assert chunk.finish == (
                Finish.ABORTED if mode == "abort" else Finish.LENGTH
            )
            assert len(chunk.tokens) == (4 if mode == "wait" else 2)
            assert server.health().in_flight == 0 and load == EngineLoad()
        else:
            assert server.health().in_flight == 1
            # A prompt of one token, and two more.
            holding = EngineLoad(3 / 2**20, running=1)
            assert load == (holding if mode == "keep" else EngineLoad(waiting=1))
        if mode == "recompute":
            server.run(lambda engine: engine.sleep("kv_cache"))
            server.run(lambda engine: engine.wake("kv_cache"))
        server.resume()
        assert joined(later.result(60)) == {5: [10]}
        if mode in ("keep", "recompute"):
            ((chunk,),) = list(replies)
            assert (chunk.finish, chunk.tokens.tolist()) == (
                Finish.LENGTH,
                [10, 11, 12, 13],
            )


def test_requests_that_give_way_are_left_alone_by_aborts_and_not_waited_for_by_a_pause(
    server: RolloutServer, engine: list[Gated]
) -> None:
    asked = request(1, 900)
    outside, own = (
        server.respond([replace(asked, preemptible=True)]),
        server.respond([asked], abortable_by_id=True),
    )
    engine[0].gate.release(2)
    soon(lambda: engine[0].generated == 2)
    server.abort([1])
    ((chunk,),) = own
    assert (chunk.finish, server.health().in_flight) == (Finish.ABORTED, 1)
    server.abort()
    soon(lambda: server.health().in_flight == 1)
    server.pause("wait")
    ((chunk,),) = outside
    assert (chunk.finish, len(chunk.tokens)) == (Finish.ABORTED, 2)


def test_a_coroutine_gets_its_answers_and_takes_its_requests_with_it(
    server: RolloutServer, engine: list[Gated]
) -> None:
    async def collect(asked: GenerationRequest) -> list[Chunk]:
        return [
            chunk async for chunks in server.respond_async([asked]) for chunk in chunks
        ]

    async def some() -> None:
        both = asyncio.gather(
            collect(request(1, 3, stream=True)), collect(request(1, 2, first=20))
        )
        # The steps are for both: the second request needs two of them.
        while server.health().in_flight < 2:
            await asyncio.sleep(0.002)
        engine[0].gate.release(3)
        streamed, whole = await both
        assert joined(streamed) == {1: [10, 11, 12]} and joined(whole) == {1: [20, 21]}

        cancelled = asyncio.create_task(collect(request(1, 900)))
        while server.health().in_flight == 0:
            await asyncio.sleep(0.002)
        cancelled.cancel()
        await asyncio.wait([cancelled])

    asyncio.run(some())
    soon(lambda: server.health().in_flight == 0)

    async def during_a_pause() -> None:
        waiting = asyncio.create_task(collect(request(1, 900)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])

    server.pause("keep")
    asyncio.run(during_a_pause())
    server.resume()
    assert server.health().in_flight == 0
    with pytest.raises(RolloutError, match="request ids must be unique"):
        server.respond([request(1, 1), request(1, 1)])


def test_tokens_are_progress_and_empty_steps_are_not(
    server: RolloutServer, engine: list[Gated]
) -> None:
    engine[0].gate.release(2)
    first = server.respond([request(1, 3)])
    soon(lambda: engine[0].generated == 2 and progress().idle_s > 0.1)
    before = progress()
    assert before.unit == "tokens" and engine[0].steps > 2
    engine[0].gate.release(1)
    soon(lambda: progress().done == before.done + 1)
    assert len(list(first)) == 1
    engine[0].hangs = True
    second = server.respond([request(2, 2)])
    soon(lambda: progress().idle_s > 0.2)
    engine[0].free()
    soon(lambda: progress().done > before.done + 1)
    assert len(list(second)) == 1


def test_what_fails_is_told_to_everybody_who_waits() -> None:
    def broken(asked: GenerationRequest) -> list[tuple[int, float]]:
        return [] if asked.tokens[0] == 13 else [(1, -1.0)] * 50

    server = RolloutServer(lambda: ScriptedEngine(broken, initial_version=0))
    server.pause("keep")
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(lambda n=n: list(server.respond([request(1, 50, first=n)])))
            for n in (10, 13)
        ]
        time.sleep(0.05)
        server.resume()
        for one in waiting:
            with pytest.raises(EngineFailed, match="a step failed: IndexError"):
                one.result(60)
    with pytest.raises(
        EngineFailed, match="can no longer be used; start another: a step failed"
    ):
        server.respond([request(2, 1)])
    server.close()
    server.close()
    with pytest.raises(EngineFailed, match="it was closed"):
        server.run(lambda engine: engine.policy_version)


class Ended(ScriptedEngine):
    """An engine that raises something else than an Exception, or outside of a step."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(lambda asked: [(1, -1.0)] * 10**6, initial_version=0)
        self.where = where
        self.error = error

    def _step(self) -> Iterator[GenerationProgress]:
        if self.where == "step":
            raise self.error
        return super()._step()

    def _pause(self) -> list[GenerationProgress]:
        if self.where == "pause":
            raise self.error
        return []

    def step(self) -> list[Chunk]:
        chunks = super().step()
        if self.where == "delivery" and chunks:
            return [
                replace(chunk, request_id=99) for chunk in chunks
            ]  # of nobody: a KeyError in the server's thread
        return chunks

    @property
    def memory_bytes(self) -> int:
        raise self.error


@pytest.mark.parametrize("where", ["step", "pause", "delivery", "task"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_its_thread_is_a_lost_engine(
    where: str, error: BaseException
) -> None:
    server = RolloutServer(lambda: Ended(where, error))
    server.pause("keep") if where != "pause" else None
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(
                lambda n=n: list(server.respond([request(n, 10**6, stream=True)]))
            )
            for n in (1, 2)
        ]
        soon(lambda: server._engine_thread.tasks.empty())
        act: Callable[[], object] = {
            "task": lambda: server.run(lambda engine: engine.memory_bytes), "pause": lambda: server.pause("keep"),
        }.get(where, server.resume)  # fmt: skip
        if where in ("task", "pause"):
            with pytest.raises(EngineFailed, match=type(error).__name__):
                act()
        else:
            act()
        ended_by = KeyError if where == "delivery" else type(error)
        causes = []
        for one in waiting:
            with pytest.raises(EngineFailed, match=ended_by.__name__) as caught:
                one.result(60)
            causes.append(type(caught.value.__cause__))
        assert (
            ended_by in causes
        )  # with its stack, for the log; who came later is told without
    assert server.health().failure is not None and server.health().in_flight == 0
    assert server.health().load == EngineLoad()
    with pytest.raises(EngineFailed, match="can no longer be used; start another"):
        server.respond([request(3, 1)])
    server.close()


def test_an_engine_that_does_not_start_says_so() -> None:
    def start() -> ScriptedEngine:
        raise RolloutError("no such model")

    with pytest.raises(RolloutError, match="no such model"):
        RolloutServer(start)


def test_a_resume_takes_a_pause_back_that_still_waits(
    server: RolloutServer, engine: list[Gated]
) -> None:
    replies = server.respond([request(1, 3)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.pause, "wait")
        soon(lambda: server._engine_thread.pause_request is not None)
        server.resume()
        waiting.result(60)
    engine[0].free()
    assert joined([chunk for chunks in replies for chunk in chunks]) == {
        1: [10, 11, 12]
    }
    again = server.respond([request(2, 2)])  # nothing is paused
    assert joined([chunk for chunks in again for chunk in chunks]) == {2: [10, 11]}


def test_a_second_pause_takes_the_place_of_one_that_still_waits(
    server: RolloutServer, engine: list[Gated]
) -> None:
    replies = server.respond([request(1, 3)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.pause, "wait")
        soon(lambda: server._engine_thread.pause_request is not None)
        server.pause("keep")
        waiting.result(60)
    server.resume()
    engine[0].free()
    assert joined([chunk for chunks in replies for chunk in chunks]) == {
        1: [10, 11, 12]
    }


def test_answers_are_left_from_another_thread_and_no_others_with_them(
    server: RolloutServer, engine: list[Gated]
) -> None:
    first, second = server.respond([request(1, 900)]), server.respond([request(1, 4)])
    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(
            lambda: [chunk for chunks in first for chunk in chunks]
        )
        engine[0].gate.release()
        first.close()
        (aborted,) = listening.result(60)
    assert aborted.finish is Finish.ABORTED
    engine[0].free()
    (whole,) = [chunk for chunks in second for chunk in chunks]
    assert (whole.finish, len(whole.tokens)) == (Finish.LENGTH, 4)
