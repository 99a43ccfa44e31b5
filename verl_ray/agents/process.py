"""Program of a process of episodes: it runs environments, many at a time.

Invariant: an episode ends with one frame, however its task ends, and nothing of it
outlives the process. Whoever started the process notices one that is stuck: it says
every second that it is alive, also where many calls hold its event loop in turn, but
not within a single one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ray.agents.contract import (
    Constraint,
    End,
    Episode,
    Listener,
    Sampled,
    Terms,
    ToolSchema,
)
from verl_ray.agents.deadlines import (
    Clock,
)
from verl_ray.agents.episode import (
    OUR_FILES,
    EnvironmentFactory,
    Run,
    run_episode,
)
from verl_ray.agents.loop_watch import CodePlace, LoopWatch
from verl_ray.agents.models import provide
from verl_ray.agents.specs import KEY, load_environment, runnable
from verl_ray.agents.threads import hanging_calls
from verl_ray.agents.wire import (
    EpisodeStart,
    episode_frame,
    failure_of,
    sampled_of,
    task_of,
    token_bytes,
)
from verl_ray.data.fields import environment_of
from verl_ray.processes.frames import (
    READ_BYTES,
    Frame,
    FrameReader,
    frame,
    started,
)
from verl_ray.user_files import short_traceback

_ALIVE_S = 1.0

_SLOW_S = 1.0
"""Seconds for which a user's code holds the event loop before it is named."""


def main(connection: socket.socket) -> None:
    """Serve the pool at the other end of a connection until it hangs up.

    The process has its guard already: what is imported here may start threads.
    """
    # The pool is gone then, and the guard is about to act.
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    frames = FrameReader()

    def load(fields: dict[str, Any]) -> tuple[_Episodes, dict[str, Any]]:
        loaded = _Episodes(EpisodeStart.of(fields), writer)
        return loaded, {"note": str(loaded.note)}

    episodes: _Episodes | None = None
    try:
        # Each round takes some bytes; ends when the pool hangs up.
        while data := await reader.read(READ_BYTES):
            for message in frames.feed(data):
                if episodes is not None:
                    episodes.take(message)
                    continue
                episodes, answer = started(message, load)
                writer.write(answer)
                if episodes is None:
                    await writer.drain()
                    return
    finally:
        if episodes is not None:
            episodes.are_lost = True


class _Episodes:
    """The episodes of this process that go on."""

    def __init__(self, start: EpisodeStart, writer: asyncio.StreamWriter) -> None:
        """Import the environments.

        Raises:
            ConfigError: One cannot be imported.
        """
        self._writer = writer
        self._limits = start.limits
        self._known_terms: dict[str, Any] = {
            "model": start.policy_name,
            "reads_tools": start.reads_tools,
        }
        self._clock = Clock()
        # A user's file may ask for them at its top level.
        provide(start.models)
        self._environments: dict[str, EnvironmentFactory | Run] = {
            source: runnable(load_environment(spec, options, f"{KEY}.{source}"))
            for source, (spec, options) in start.environments.items()
        }
        self._renderer = start.renderer()
        self._sampler = _RemoteSampler(writer)
        self._tasks: dict[int, asyncio.Task[bytes]] = {}
        self.are_lost = False
        """Whether the process ends, and those that go on with it."""

        self.note = Path(tempfile.gettempdir()) / "holds_the_loop"
        """File that names a user's code while it holds the event loop."""
        LoopWatch(
            _SLOW_S, self._say_who_held, after_step=self._beat_if_due, note=self.note
        )
        self._due_s = self._beaten_s = asyncio.get_running_loop().time()
        self._beating = asyncio.create_task(self._beat())

    def take(self, message: Frame) -> None:
        """Act on a frame of the pool."""
        number = message.fields.get("episode", -1)
        if message.kind == "run":
            task = asyncio.create_task(self._run(number, message.fields))
            self._tasks[number] = task
            task.add_done_callback(functools.partial(self._end, number))
        elif message.kind == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        elif message.kind == "pause":
            self._clock.stop()
        elif message.kind == "resume":
            self._clock.go()
        else:
            self._sampler.take(message)

    def _end(self, number: int, task: asyncio.Task[bytes]) -> None:
        """Send the last frame of an episode, whatever ended its task."""
        self._tasks.pop(number, None)
        # The pool runs it again in another process.
        if self.are_lost:
            return
        # The pool waits for the end of one that it has cancelled, and reads no more.
        cancelled = asyncio.CancelledError("the episode was cancelled")
        error = cancelled if task.cancelled() else task.exception()
        if error is None:
            self._writer.write(task.result())
            return
        # The sampler has failed, or an environment has changed a message into no JSON.
        detail = short_traceback(error, skip_files=OUR_FILES)
        failed = Episode([], End.ENVIRONMENT_FAILED, 0.0, detail)
        self._writer.write(episode_frame(number, failed))

    async def _run(self, number: int, fields: dict[str, Any]) -> bytes:
        """Return the last frame of an episode."""
        task = task_of(fields["task"])
        name = environment_of(task.extra, task.data_source, self._environments)
        assert name is not None, "others are no episodes"
        episode = await run_episode(
            self._environments[name],
            task,
            fields["seed"],
            _SamplerOfEpisode(self._sampler, number),
            self._renderer,
            self._limits,
            fields["environment_seed"],
            self._clock,
            Terms(**fields["terms"], **self._known_terms),
            self._tell,
        )
        return episode_frame(number, episode)

    async def _beat(self) -> None:
        """Say every second that the event loop turns, and how late it was at most."""
        loop = asyncio.get_running_loop()
        # Ends with the process.
        while True:
            self._due_s = loop.time() + _ALIVE_S
            await asyncio.sleep(_ALIVE_S)
            self._say_alive()
            await self._writer.drain()

    def _beat_if_due(self) -> None:
        """Say that the process is alive if the loop has been late to say so."""
        if asyncio.get_running_loop().time() - self._beaten_s >= _ALIVE_S:
            self._say_alive()

    def _say_alive(self) -> None:
        self._beaten_s = asyncio.get_running_loop().time()
        hanging = hanging_calls()
        fields = {
            "lag_s": max(0.0, self._beaten_s - self._due_s),
            "open": len(self._tasks),
            "hanging": len(hanging),
            "hanging_in": max(set(hanging), key=hanging.count, default=""),
        }
        self._writer.write(frame("alive", fields))

    def _tell(self, text: str) -> None:
        self._writer.write(frame("told", {"text": text}))

    def _say_who_held(self, place: CodePlace, seconds: float) -> None:
        fields = {**place._asdict(), "seconds": seconds}
        self._writer.write(frame("held", fields))


class _RemoteSampler:
    """Calls of the engine at the other end, each by its number."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Sampled]] = {}
        self._listeners: dict[int, Listener] = {}

    async def sample(
        self,
        episode: int,
        tokens: Sequence[int],
        fields: dict[str, Any],
        listener: Listener | None,
    ) -> Sampled:
        """Return a turn that the engine samples after these tokens."""
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if listener is not None:
            self._listeners[number] = listener
        request = {"call": number, "episode": episode, **fields}
        request["is_heard"] = listener is not None
        self._writer.write(frame("sample", request, token_bytes(tokens)))
        try:
            await self._writer.drain()
            sampled: Sampled = await future
            return sampled
        finally:
            del self._pending[number]
            self._listeners.pop(number, None)
            if future.cancelled() or not future.done():
                self._writer.write(frame("give_up", {"call": number}))

    def take(self, reply: Frame) -> None:
        """Take the reply to a call, or a part of it, if somebody waits for it."""
        number = reply.fields["call"]
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if reply.kind == "grown":
            self._listeners[number](reply.fields["thoughts"], reply.fields["words"])
        elif reply.kind == "sampled":
            future.set_result(sampled_of(reply))
        else:
            future.set_exception(failure_of(reply))


@dataclasses.dataclass(frozen=True)
class _SamplerOfEpisode:
    """The engine, for the policy of one episode."""

    remote: _RemoteSampler
    episode: int

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Return a turn; see `Sampler`."""
        fields = {
            "seed": seed,
            "max_tokens": max_tokens,
            "tools": list(tools),
            "stop": list(stop),
            "constraint": None if constraint is None else dict(constraint),
        }
        return await self.remote.sample(self.episode, tokens, fields, listener)
