"""Processes of episodes beside a replica, whose engine samples their turns.

Invariant: every episode that was begun ends once, or its stream fails. The tokens of an
episode depend on its task and its seed, not on the process that runs it: one that is
lost with its process is run again from the beginning, among few others, then alone
(`processes/isolation.py`). One that has ended its process has the end
`environment_failed`. A process that holds too much gets no further episodes, and is
replaced once those that it has have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_ray.agents.contract import (
    FAULTS,
    End,
    Episode,
    EpisodeEnded,
)
from verl_ray.agents.loop_watch import LONG_S, CodePlace
from verl_ray.agents.wire import (
    EpisodeStart,
    episode_of,
    failed_frame,
    grown_frame,
    sampled_frame,
    task_fields,
    tokens_of,
)
from verl_ray.errors import (
    CallRefused,
    ConfigError,
    EngineFailed,
    Problem,
    RolloutError,
)
from verl_ray.processes.frames import Frame, frame, require_unbroken, start_frame
from verl_ray.processes.isolation import Isolation
from verl_ray.profiling.progress import touch
from verl_ray.rollout.episode_counts import EpisodeCounts
from verl_ray.rollout.episode_process import EpisodeProcess
from verl_ray.rollout.episode_stream import EpisodeRequest, EpisodeStream
from verl_ray.rollout.requests import GenerationRequest
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.turn_routing import TurnRouting
from verl_ray.rollout.turns import ReadAction, sampled_turn

START_S = 120.0
"""Seconds that a process may take to import the environments."""

_RETRY_S, _MOST_RETRY_S = 1.0, 30.0
"""Seconds before an episode is run again after a fault: the first, and at most."""

_MOST_HANGING = 64
"""Threads that may hang in a process before it is replaced."""

_MOST_SAID = 64
"""Different texts that episodes may have a replica say; users' code may make them."""

_PARTS = 16
"""Parts that the episodes of a lost process are divided into."""


@dataclass(eq=False)
class _OpenEpisode:
    """An episode that has not ended.

    Attributes:
        number: What its process knows it by; another one after a fault.
        retries: How often it was run again after a fault of its own.
        routing: The experts of its turns, where they are recorded.
    """

    number: int
    request: EpisodeRequest
    stream: EpisodeStream
    retries: int = 0
    routing: TurnRouting = field(default_factory=TurnRouting)


class EpisodePool:
    """Processes that run episodes on one engine."""

    def __init__(
        self,
        server: RolloutServer,
        start: EpisodeStart,
        read: ReadAction,
        *,
        num_processes: int,
        most_open: int,
        stall_s: float,
        max_retries: int = 0,
        retried_ends: Collection[End] = FAULTS,
        memory_gib: float | None = None,
    ) -> None:
        """Start the processes, and wait until they have imported the environments.

        Args:
            server: The engine.
            start: What the processes must know.
            read: Makes the action of a turn.
            num_processes: Number of processes.
            most_open: Episodes that a process runs at a time.
            stall_s: A process in which a single call holds the event loop for so long
                is lost.
            max_retries: How often an episode is run again that ended by a fault.
            retried_ends: The faults for which it is.
            memory_gib: Resident memory of a process, with its children, above which it
                is replaced between episodes; None is no limit.

        Raises:
            ConfigError: An environment cannot be imported, or a process that has run
                nothing holds more than `memory_gib`.
            RolloutError: A process did not start.
        """
        self._server = server
        self.first_frame = start_frame(asdict(start))
        self._read = read
        self._most_open = most_open
        self.stall_s = stall_s
        self._max_retries = max_retries
        self._retried_ends = frozenset(retried_ends)
        self._episode_s = start.limits.episode_s
        self.memory_gib = memory_gib
        self._numbers = itertools.count()
        # Episodes without a process, but for those of lost ones.
        self._waiting: deque[_OpenEpisode] = deque()
        self._isolation = Isolation[_Process, _OpenEpisode](_PARTS, free_losses=0)
        # Episodes that are run again once what has failed them may be gone.
        self._resting: dict[int, _OpenEpisode] = {}
        self._counts = EpisodeCounts()
        self._counting = threading.Lock()
        # Functions that have held an event loop, by their files.
        self._named: set[tuple[str, str]] = set()
        self._said: set[str] = set()
        self._processes: list[_Process] = []
        # Tasks that start another process, and that wait for single responses.
        self._replacing: set[asyncio.Task[None]] = set()
        self._responding: dict[asyncio.Task[None], EpisodeStream] = {}
        self.is_paused = self._is_closed = False
        self._failure: Exception | None = None
        self._start(num_processes)

    def _start(self, num_processes: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="episodes", daemon=True
        )
        self._thread.start()
        try:
            self._call(self._launch(num_processes))
        except BaseException:
            self.close()
            raise

    def run(
        self,
        requests: Sequence[EpisodeRequest],
        singles: Sequence[GenerationRequest] = (),
    ) -> EpisodeStream:
        """Begin episodes; return them as they end.

        Args:
            requests: The episodes.
            singles: Prompts that are about no environment. The engine responds to them
                as in a run without episodes, and their ids are no number of an episode.

        Raises:
            EngineFailed: The engine failed, or processes cannot be started again.
        """
        if self._failure is not None:
            raise EngineFailed(f"episodes cannot be run: {self._failure}")
        numbers = {request.number for request in requests}
        numbers |= {request.request_id for request in singles}
        num_requests = len(requests) + len(singles)
        assert len(numbers) == num_requests, "numbers are unique in one call"

        def close() -> None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel, stream)

        stream = EpisodeStream(numbers, close)
        self._loop.call_soon_threadsafe(self._begin, requests, singles, stream)
        return stream

    def pause(self) -> None:
        """Stop the clocks of the episodes: their engine is about to pause."""
        self._loop.call_soon_threadsafe(self._set_paused, True)

    def resume(self) -> None:
        """Let the clocks of the episodes go on."""
        self._loop.call_soon_threadsafe(self._set_paused, False)

    def take_counts(self) -> EpisodeCounts:
        """Return what happened since the last call."""
        with self._counting:
            counts, self._counts = self._counts, EpisodeCounts()
        return counts

    def note(self, events: EpisodeCounts) -> None:
        """Add events to those that are taken next."""
        with self._counting:
            self._counts += events

    def warn(self, text: str) -> None:
        """Say something in the log of the replica, and to whoever takes the counts."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
        self.note(EpisodeCounts(warnings=(text,)))

    def close(self) -> None:
        """End all processes, with whatever they started."""
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------ on the loop: episodes of callers

    def _set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        for process in self._processes:
            process.tell_paused()

    def _begin(
        self,
        requests: Sequence[EpisodeRequest],
        singles: Sequence[GenerationRequest],
        stream: EpisodeStream,
    ) -> None:
        # It may have failed since the caller looked.
        if self._failure is not None:
            stream.put(self._failure)
            return
        self._waiting.extend(
            _OpenEpisode(next(self._numbers), request, stream) for request in requests
        )
        self.assign()
        if singles:
            task = asyncio.create_task(self._respond(singles, stream))
            self._responding[task] = stream
            task.add_done_callback(self._responding.pop)

    async def _respond(
        self, requests: Sequence[GenerationRequest], stream: EpisodeStream
    ) -> None:
        """Deliver the engine's responses to prompts, each once it is whole."""
        try:
            async for chunks in self._server.respond_async(requests):
                for chunk in chunks:
                    stream.put((chunk.request_id, chunk))
        # No episode can go on either.
        except EngineFailed as error:
            self.fail(error)
        except Exception as error:
            stream.put(error)
            self._cancel(stream)

    def _cancel(self, stream: EpisodeStream) -> None:
        others = [each for each in self._waiting if each.stream is not stream]
        self._waiting = deque(others)
        for number, episode in list(self._resting.items()):
            if episode.stream is stream:
                del self._resting[number]
        for process in self._processes:
            process.cancel(stream)
        self._isolation.withdraw(lambda episode: episode.stream is stream)
        self._cancel_responses(stream)
        # Whoever waits for the stream waits no longer.
        stream.put(RolloutError("the episodes were abandoned"))
        self.assign()

    def _cancel_responses(self, stream: EpisodeStream) -> None:
        for task, other in self._responding.items():
            if other is stream:
                task.cancel()

    def assign(self) -> None:
        """Begin as many waiting episodes as the processes may run."""
        for process in self._processes:
            if process.is_empty:
                self._isolation.finish(process)
            if process.is_ready and process.is_full and process.is_empty:
                self.note(EpisodeCounts(renewed_processes=1))
                self._replace(process)
            if not process.is_ready or process.is_full:
                continue
            if process.is_empty and self._isolation.is_waiting:
                for episode in self._isolation.begin(process):
                    process.run(episode)
            if process in self._isolation.processes:
                continue
            while self._waiting and len(process.open) < self._most_open:
                process.run(self._waiting.popleft())

    def settle(self, episode: _OpenEpisode, ended: Episode) -> None:
        """Deliver an episode that has ended, or run it again some time after a fault.

        It has the same seeds then, so that what it becomes does not depend on when a
        fault came about: only a cause outside of the episode can be gone by then.
        """
        is_retried = ended.end in self._retried_ends
        if not is_retried or episode.retries >= self._max_retries:
            if self._server.routing_shape is not None:
                try:
                    episode.routing.add_to(ended.rows)
                except EngineFailed as error:
                    episode.stream.put(error)
                    self.fail(error)
                    return
            episode.stream.put((episode.request.number, ended))
            return
        episode.retries += 1
        self.note(EpisodeCounts(retries=1))
        episode.number = next(self._numbers)
        self._resting[episode.number] = episode
        wait_s = retry_wait_s(episode.retries, self._episode_s)
        self._loop.call_later(wait_s, self._end_rest, episode.number)

    def _end_rest(self, number: int) -> None:
        episode = self._resting.pop(number, None)
        # It was cancelled meanwhile.
        if episode is not None:
            self._waiting.append(episode)
            self.assign()

    @property
    def has_resting_episodes(self) -> bool:
        """Whether an episode waits to be run again after a fault."""
        return bool(self._resting)

    def fail(self, error: Exception) -> None:
        """Fail all streams: no episode goes on without the engine, or a process."""
        self._failure = error
        streams = {each.stream for each in (*self._waiting, *self._resting.values())}
        streams |= {each.stream for each in self._isolation.items}
        self._resting.clear()
        self._waiting.clear()
        self._isolation.withdraw(lambda _: True)
        for process in self._processes:
            streams |= {episode.stream for episode in process.open.values()}
            process.open.clear()
        streams |= set(self._responding.values())
        for stream in streams:
            self._cancel_responses(stream)
            stream.put(error)

    # --------------------------------------------------------- on the loop: processes

    async def _launch(self, count: int) -> None:
        self._processes = [_Process(self) for _ in range(count)]
        await asyncio.gather(*(process.start() for process in self._processes))
        if self.memory_gib is not None:
            await self._require_less(self.memory_gib)

    async def _require_less(self, most_gib: float) -> None:
        """Raise ConfigError if a process would be replaced after each episode."""
        for process in self._processes:
            held_gib = await process.process.held_gib()
            if held_gib > most_gib:
                rule = (
                    f"a process of episodes that has run none holds {held_gib:.2f} GiB"
                )
                fix = "Give it as much, and what its episodes need, or null."
                key = "agent.process_memory_gib"
                raise ConfigError([Problem(key, most_gib, rule, fix)])

    async def _end_all(self) -> None:
        responding = list(self._responding)
        self.fail(RolloutError("the processes of episodes were closed"))
        replacing = list(self._replacing)
        for task in replacing:
            task.cancel()
        await asyncio.gather(*replacing, *responding, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._processes))

    def lose(self, lost: _Process, fault: str = "") -> None:
        """Run the episodes of a lost process again, in another.

        Args:
            fault: What was wrong with it; empty if it ended.
        """
        # It is being replaced already.
        if not lost.is_ready:
            return
        episodes = list(lost.open.values())
        lost.open.clear()
        num_again = self._keep_lost(lost, episodes)

        def warn(cause: str) -> None:
            cause = fault or f"it {cause}"
            again = f"{num_again} of its {len(episodes)} episodes run again"
            self.warn(f"a process of episodes was lost: {cause}; {again}")

        self._replace(lost, warn)

    def _replace(
        self, process: _Process, when_gone: Callable[[str], None] = lambda _: None
    ) -> None:
        """End a process, and start another one instead."""
        process.is_ready = False
        if self._is_closed:
            return
        task = asyncio.create_task(self._start_instead_of(process, when_gone))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def _keep_lost(self, lost: _Process, episodes: Sequence[_OpenEpisode]) -> int:
        """Keep the episodes of a lost process, but for one that has ended it.

        Returns:
            How many run again.
        """
        again = len(episodes)
        culprit = self._isolation.note_loss(lost, episodes).culprit
        if culprit is not None:
            again -= 1
            times = len(self._isolation.causes(culprit))
            self._isolation.forget([culprit])
            detail = f"it ended its process {times} times, at last alone"
            ended = Episode([], End.ENVIRONMENT_FAILED, 0.0, detail)
            culprit.stream.put((culprit.request.number, ended))
        self.note(EpisodeCounts(lost_processes=1, run_again=again))
        return again

    def name_holder(self, place: CodePlace, seconds: float | None = None) -> None:
        """Say once of each function that it has held an event loop, or holds it now.

        Args:
            place: Its line.
            seconds: For how long it has; None while it does.
        """
        if (place.path, place.function) in self._named:
            return
        self._named.add((place.path, place.function))
        if seconds is None:
            what = f"has held the event loop of its process for {LONG_S:g} s and more"
        else:
            what = f"held the event loop of its process for {seconds:.1f} s"
        self.warn(
            f"{place} {what}, and all other episodes of it meanwhile. {place.remedy}"
        )

    def say(self, text: str) -> None:
        """Say once what is to be said about episodes."""
        if text in self._said or len(self._said) == _MOST_SAID:
            return
        self._said.add(text)
        self.warn(text)
        if len(self._said) == _MOST_SAID:
            self.warn(f"nothing more is said about episodes after {_MOST_SAID} texts")

    async def _start_instead_of(
        self, lost: _Process, when_gone: Callable[[str], None]
    ) -> None:
        when_gone(await lost.end())
        process = _Process(self)
        self._processes[self._processes.index(lost)] = process
        try:
            await process.start()
        # What started once says nothing against the configuration.
        except (ConfigError, RolloutError) as error:
            failure = EngineFailed(f"a process of episodes cannot start again: {error}")
            failure.__cause__ = error
            self.fail(failure)
        self.assign()

    async def sample(
        self, episode: _OpenEpisode, call: Frame, write: Callable[[bytes], None]
    ) -> bytes:
        """Return the reply to a call of a policy.

        Args:
            write: Takes what is known of the turn before, where the call listens.

        Raises:
            EngineFailed: The engine failed.
        """
        fields = call.fields
        sampling = episode.request.sampling
        # The limits of the episode know those of a turn.
        max_tokens = fields["max_tokens"]
        stop = tuple(fields["stop"]) or sampling.stop
        request = GenerationRequest(
            0,
            tokens_of(call),
            replace(sampling, max_tokens=max_tokens, stop=stop),
            fields["seed"],
            session=episode.request.session,
        )

        def tell(thoughts: str, words: str) -> None:
            write(grown_frame(fields["call"], thoughts, words))

        try:
            sampled = await sampled_turn(
                self._server,
                request,
                fields["tools"],
                self._read,
                fields["constraint"],
                tell if fields["is_heard"] else None,
                self.say,
            )
        except EngineFailed:
            raise
        except EpisodeEnded as ended:
            return failed_frame(fields["call"], "", end=ended.end)
        except CallRefused as error:
            return failed_frame(fields["call"], str(error), refused=error.param or "")
        except RolloutError as error:
            return failed_frame(fields["call"], str(error))
        if sampled.routed_experts is not None:
            tokens = np.array(sampled.tokens, np.int32)
            episode.routing.add(request.tokens, tokens, sampled.routed_experts)
        return sampled_frame(fields["call"], sampled)


def _terms(request: EpisodeRequest) -> dict[str, Any]:
    """Return the fields of `Terms` but for the name of the policy."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "trains": request.trains,
    }


def retry_wait_s(retries: int, episode_s: float) -> float:
    """Return the seconds before an episode is run again, twice those of the last time.

    Args:
        retries: How often it was run again, with this time.
        episode_s: The longest time of an episode, which no rest exceeds.
    """
    # A power of many retries is no float.
    grown_s = _RETRY_S * 2.0 ** min(retries - 1, 16)
    return min(grown_s, _MOST_RETRY_S, episode_s)


@dataclass(eq=False)
class _Process:
    """One process of episodes, as the pool's event loop sees it."""

    pool: EpisodePool
    open: dict[int, _OpenEpisode] = field(default_factory=dict)
    closing: set[int] = field(default_factory=set)
    """Episodes that were cancelled, and whose environments are about to be closed."""
    is_ready: bool = False
    is_full: bool = False
    """Whether it holds so much that it gets no further episodes."""
    has_run: bool = False
    """Whether it was given an episode."""
    process: EpisodeProcess = field(default_factory=EpisodeProcess)
    _weighing: asyncio.Task[None] | None = None
    _calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and wait until it is ready.

        Raises:
            ConfigError: It cannot import an environment.
            RolloutError: It ended, or took too long.
        """
        try:
            async with asyncio.timeout(START_S):
                await self.process.start()
                self.process.write(self.pool.first_frame)
                while not self.is_ready:
                    for message in await self.process.receive():
                        self._take_first(message)
        except BaseException as error:
            await self.end()
            if isinstance(error, TimeoutError | EOFError | OSError):
                raise RolloutError(
                    "a process of episodes did not start; its output is in the log of"
                    f" the replica: {error!r}"
                ) from error
            raise
        if self.pool.is_paused:
            self.tell_paused()
        self._serving = asyncio.create_task(self._serve())

    def _take_first(self, answer: Frame) -> None:
        require_unbroken(answer)
        self.is_ready = True
        self.process.note = Path(answer.fields["note"])

    async def _serve(self) -> None:
        """Act on the frames of the process until it ends, or is stuck."""
        try:
            while True:
                async with asyncio.timeout(self.pool.stall_s):
                    messages = await self._receive()
                for message in messages:
                    self._take(message)
        except (EOFError, ConnectionError):
            self.pool.lose(self)
        except ValueError as error:
            self.pool.lose(self, f"it sent what is no frame ({error})")
        except TimeoutError:
            stall_s = self.pool.stall_s
            self.pool.note(EpisodeCounts(lag_s=stall_s))
            holder = self.process.holder()
            by = f" by {holder}" if holder else ""
            self.pool.lose(self, f"its event loop was held for {stall_s:g} s{by}")

    async def _receive(self) -> list[Frame]:
        """Wait for frames; meanwhile name a user's code that holds the event loop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONG_S):
                return await self.process.receive()
        holder = self.process.holder()
        if holder is not None:
            self.pool.name_holder(holder)
        return await self.process.receive()

    @property
    def is_empty(self) -> bool:
        """Whether no environment of an episode is open."""
        return not self.open and not self.closing

    def tell_paused(self) -> None:
        """Tell the process whether the engine is paused."""
        # One that starts is told later.
        if self.is_ready:
            self.process.write(frame("pause" if self.pool.is_paused else "resume", {}))

    def run(self, episode: _OpenEpisode) -> None:
        """Begin an episode."""
        self.open[episode.number] = episode
        self.has_run = True
        # It may have run before.
        episode.routing = TurnRouting()
        request = episode.request
        fields = {
            "episode": episode.number,
            "task": task_fields(request.task),
            "seed": request.seed,
            "environment_seed": request.environment_seed,
            "terms": _terms(request),
        }
        self.process.write(frame("run", fields))

    def cancel(self, stream: EpisodeStream) -> None:
        """Cancel the episodes of a stream."""
        for number, episode in list(self.open.items()):
            if episode.stream is stream:
                del self.open[number]
                self.closing.add(number)
                self.process.write(frame("cancel", {"episode": number}))

    def _take(self, message: Frame) -> None:
        fields = message.fields
        if message.kind == "alive":
            self.pool.note(EpisodeCounts(lag_s=fields["lag_s"]))
            # Tools, environments and rests may take long without a token of the engine.
            if fields["open"] or self.pool.has_resting_episodes:
                touch()
            if fields["hanging"] > _MOST_HANGING:
                self._fill(
                    f"calls hang in {fields['hanging']} of its threads, most often in"
                    f" {fields['hanging_in']}"
                )
            most_gib = self.pool.memory_gib
            # Another one that has run nothing would hold as much.
            if most_gib is not None and self.has_run and self._weighing is None:
                self._weighing = asyncio.create_task(self._weigh(most_gib))
        elif message.kind == "held":
            seconds = fields.pop("seconds")
            self.pool.name_holder(CodePlace(**fields), seconds)
        elif message.kind == "told":
            self.pool.say(fields["text"])
        elif message.kind == "give_up":
            call = self._calls.get(fields["call"])
            if call is not None:
                call.cancel()
        elif message.kind == "sample":
            task = asyncio.create_task(self._sample(message))
            self._calls[fields["call"]] = task
        elif message.kind == "ended":
            episode = self.open.pop(fields["episode"], None)
            self.closing.discard(fields["episode"])
            if episode is not None:
                self.pool.settle(episode, episode_of(message))
            self.pool.assign()

    async def _weigh(self, most_gib: float) -> None:
        """Look whether the process holds more memory than it may."""
        try:
            held_gib = await self.process.held_gib()
        finally:
            self._weighing = None
        if held_gib > most_gib:
            self._fill(
                f"with its children it holds {held_gib:.2f} GiB of memory"
                f" (agent.process_memory_gib={most_gib:g})"
            )

    def _fill(self, reason: str) -> None:
        """Give the process no further episodes."""
        if self.is_ready and not self.is_full:
            self.is_full = True
            self.pool.warn(
                f"a process of episodes is replaced once its {len(self.open)} open ones"
                f" have ended: {reason}"
            )
            self.pool.assign()

    async def _sample(self, call: Frame) -> None:
        number = call.fields["call"]
        try:
            episode = self.open.get(call.fields["episode"])
            # It was cancelled meanwhile.
            if episode is not None:
                write = self.process.write
                write(await self.pool.sample(episode, call, write))
        # No episode can go on.
        except (EngineFailed, ConfigError) as error:
            self.pool.fail(error)
        # A defect of a parser, say: the policy of the episode must not wait for it.
        except Exception as error:
            self.process.write(failed_frame(number, repr(error)))
        finally:
            self._calls.pop(number, None)

    async def end(self) -> str:
        """End the process with all that it started, and wait until it is gone.

        Returns:
            How it ended, as the end of a sentence.
        """
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        for call in list(self._calls.values()):
            call.cancel()
        return await self.process.end()
