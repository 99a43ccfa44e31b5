"""An episode: a policy and an environment in turn, until one of many ends.

Invariant: every end has a type, and `close` is called once, whatever the end. No reward
is invented: a score is the sum of what the environment said, and an environment that
fails says nothing more.

An environment runs in the event loop of its episodes. A call that awaits is stopped by
its deadline; one that computes without awaiting stops the whole loop. Plain methods run
in threads (`plain_worlds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_ray.agents.contract import (
    FAULTS,
    LIMITS,
    Action,
    End,
    Environment,
    Episode,
    EpisodeEnded,
    EpisodeTask,
    Message,
    Observation,
    Policy,
    Sampled,
    Sampler,
    Step,
    ToolSchema,
    message_of,
)
from verl_ray.agents.returned import (
    number_of,
    require_json,
    require_kind,
    require_sampling,
)
from verl_ray.agents.template import Renderer, TextTooLong
from verl_ray.agents.transcript import Transcript, TurnPrompt
from verl_ray.user_files import short_traceback

Run = Callable[[EpisodeTask, Policy], Awaitable[float]]
"""An environment as a coroutine function: it asks the policy, and returns the score."""

EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""

T = TypeVar("T")

OUR_FILES = (str(Path(__file__).parent), asyncio.__path__[0])

_LOOK_S = 0.1
"""How often a wait looks whether its clock goes on."""

_POLICY_LIMITS = LIMITS - FAULTS
"""Ends of which an environment is told by `finish`, if it has that method."""

_MOST_REFUSALS = 10
"""How often whoever asks for a turn of an episode that is over is told so."""

_ASLEEP_S = 3600.0
"""How long it waits that asks even after its cancellation."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_turns: Turns of the policy.
        context_tokens: Tokens of a prompt with the turn that follows it.
        row_tokens: Tokens of a row beyond those of the episode's first prompt; None is
            no limit of its own.
        max_tokens: Sampled tokens of all turns together; None is no limit.
        max_tool_calls: Tool calls of all turns together; None is no limit.
        max_turn_tokens: Sampled tokens of one turn; None is no limit of its own. A turn
            that it cuts ends like any other, and the next one begins a row.
        max_result_tokens: Tokens of a message of a tool in a step; the rest of a longer
            one is left out. None is no limit.
        model_s: Seconds of one turn of the model; infinity is no limit, here and below.
        tool_s: Seconds of one call of the environment. A step may take this long for
            each of its tool calls.
        turn_s: Seconds of a turn of the model with the step that follows it.
        episode_s: Seconds of everything but `close`. It alone bounds what a coroutine
            function does between its turns.
        close_s: Seconds of `close`, and of the cleaning up in a call that is stopped.

    Seconds are those of the `Clock` of the episodes.
    """

    max_turns: int
    context_tokens: int
    row_tokens: int | None = None
    max_tokens: int | None = None
    max_tool_calls: int | None = None
    max_turn_tokens: int | None = None
    max_result_tokens: int | None = None
    model_s: float = math.inf
    tool_s: float = math.inf
    turn_s: float = math.inf
    episode_s: float = math.inf
    close_s: float = 10.0


class Clock:
    """The time of episodes, which stands still while the engine is paused.

    So no episode runs out of time because of a pause, which may take as long as a
    training step.
    """

    def __init__(self) -> None:
        """Begin to go."""
        self._stopped_at_s: float | None = None
        self._lost_s = 0.0

    def now(self) -> float:
        """Return the time in seconds, from an arbitrary beginning."""
        if self._stopped_at_s is not None:
            return self._stopped_at_s
        return asyncio.get_running_loop().time() - self._lost_s

    def stop(self) -> None:
        """Stand still. If it does already, this has no effect."""
        self._stopped_at_s = self.now()

    def go(self) -> None:
        """Go on. If it does already, this has no effect."""
        if self._stopped_at_s is not None:
            loop_s = asyncio.get_running_loop().time()
            self._lost_s = loop_s - self._stopped_at_s
            self._stopped_at_s = None

    async def wait(self, task: asyncio.Future[T], until_s: float) -> bool:
        """Wait until a task is done, or it is so late; return whether it is done."""
        # The first round lets a task begin that has no time at all.
        while True:
            timeout_s: float | None = None
            if not math.isinf(until_s):
                timeout_s = max(0.0, until_s - self.now())
                if self._stopped_at_s is not None:
                    timeout_s = max(timeout_s, _LOOK_S)
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done() or self.now() >= until_s:
                return task.done()


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, in [0, 2^63).

    Args:
        seed: The seed of the episode.
        turn: The number of the turn, from 0.
    """
    digest = hashlib.blake2b(f"{seed}:turn:{turn}".encode(), digest_size=8).digest()
    # Seeds are signed, so the highest bit is left out.
    return int.from_bytes(digest, "little") >> 1


class EpisodePolicy:
    """The policy in one episode, which counts its turns and keeps their tokens.

    Turns are sampled one after the other, also if an environment asks for several at a
    time. So each has its number, and what remains of the tokens is known.
    """

    def __init__(
        self,
        seed: int,
        sampler: Sampler,
        renderer: Renderer,
        limits: Limits,
        clock: Clock,
    ) -> None:
        """Begin an episode.

        Args:
            seed: The seed of the episode.
        """
        self.transcript = Transcript(renderer)
        self.conversations: list[list[Message]] = []
        """Conversations, of which the last one is that of the last turn."""
        self.num_tool_calls = 0
        self.end: End | None = None
        """Why no further turn is sampled; None while one may be."""
        self.cut: End | None = None
        """The limit that cut the last turn; None if it was not cut."""
        self.failure: Exception | None = None
        """What the sampler raised."""
        self.score = 0.0
        self.metrics: dict[str, float] = {}

        self._renderer = renderer
        self._seed = seed
        self._sampler = sampler
        self._limits = limits
        self._clock = clock
        self._num_tokens = 0
        self._num_refusals = 0
        self._turn = asyncio.Lock()

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return len(self.transcript.turns)

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Action:
        """Return the policy's next turn after these messages; see `Policy`.

        Raises:
            EpisodeEnded: A limit of the episode is reached.
            CancelledError: It was told so again and again.
            TypeError: `stop` or `max_tokens` is of another type, or a message or a tool
                cannot be written as JSON.
            ValueError: A text to stop at is empty, or `max_tokens` is below 1.
            DataError: The chat template refuses the messages.
            Exception: Whatever the sampler raises.
        """
        num_earlier = self._num_refusals
        # Whoever asks again after any failure must let other episodes go on.
        await asyncio.sleep(0)
        require_sampling(stop, max_tokens)
        async with self._turn:
            if self.end is not None or self.failure is not None:
                await self._refuse(num_earlier)
            known = self.conversations[-1] if self.conversations else ()
            require_json(messages, "respond was given the message", known)
            require_json(tools, "respond was given the tool")
            if self.num_turns >= self._limits.max_turns:
                raise self.over(End.MAX_TURNS)
            remaining = self._remaining_tokens()
            if remaining < 1:
                raise self.over(End.MAX_TOKENS)

            try:
                prompt = self.transcript.prompt(
                    messages, tools, self._most_prompt_tokens()
                )
            except TextTooLong:
                raise self.over(End.CONTEXT_OVERFLOW) from None
            places = self._places_behind(prompt)
            if places < 1:
                raise self.over(End.CONTEXT_OVERFLOW)

            most = int(min(remaining, places))
            bound = min(most, self._limits.max_turn_tokens or most, max_tokens or most)
            sampled = await self._sample(prompt, tools, bound, stop)
            # The episode may have ended meanwhile; its rows do not change any more.
            self._require_open()
            self._record(prompt, sampled, bound)
            action = sampled.action
            self._keep(messages, action)
            self.cut = None
            if action.finish == "length" and bound == most:
                is_full = places < remaining
                self.cut = End.CONTEXT_OVERFLOW if is_full else End.MAX_TOKENS

            self.num_tool_calls += len(action.tool_calls)
            most_calls = self._limits.max_tool_calls
            if most_calls is not None and self.num_tool_calls > most_calls:
                raise self.over(End.MAX_TOOL_CALLS)
            return action

    def as_read(self, messages: Sequence[Message]) -> list[Message]:
        """Return what a step adds to the conversation, with long results shortened."""
        most = self._limits.max_result_tokens
        if most is None:
            return list(messages)
        return [
            self._renderer.shortened(message, most)
            if isinstance(message, dict) and message.get("role") == "tool"
            else message
            for message in messages
        ]

    def pay(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self.score += reward
        turns = self.transcript.turns
        if turns:
            turns[-1].reward += reward

    def record(self, /, **metrics: float) -> None:
        """Keep numbers about the episode; see `Policy`.

        Raises:
            TypeError: One is no number, or there is no mapping of names.
            ValueError: One is not finite or beyond 1e18, or its name is no identifier.
        """
        for name, value in metrics.items():
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(
                    f"the metric {name!r} needs a name of letters, digits and _"
                )
            self.metrics[name] = number_of(value, f"the metric {name} is")

    def over(self, end: End) -> EpisodeEnded:
        """End the episode, unless it has ended, and return the exception for it."""
        if self.end is None:
            self.end = end
        return EpisodeEnded(self.end)

    @property
    def has_insisted(self) -> bool:
        """Whether turns were asked for so often after the end that it was cancelled."""
        return self._num_refusals > _MOST_REFUSALS

    async def _refuse(self, num_earlier: int) -> None:
        """Refuse a turn, since the episode is over.

        Args:
            num_earlier: The refusals at the time of asking. Those who ask together are
                refused together, which counts once.
        """
        if num_earlier > _MOST_REFUSALS:
            # Whoever catches its cancellation is left to its deadline.
            await asyncio.sleep(_ASLEEP_S)
        if num_earlier == self._num_refusals:
            self._num_refusals += 1
        # A loop that tries again after every `Exception` would not end.
        if self.has_insisted:
            raise asyncio.CancelledError
        if self.failure is not None:
            raise self.failure
        self._require_open()

    def _require_open(self) -> None:
        if self.end is not None:
            raise EpisodeEnded(self.end)

    def _keep(self, messages: Sequence[Message], action: Action) -> None:
        """Keep the conversation of a turn, in the place of the one it continues."""
        spoken = list(messages)
        for number in reversed(range(len(self.conversations))):
            earlier = self.conversations[number]
            if spoken[: len(earlier)] == earlier:
                del self.conversations[number]
                break
        self.conversations.append([*spoken, message_of(action)])

    def _remaining_tokens(self) -> float:
        """Return how many tokens the episode may sample, possibly infinity."""
        if self._limits.max_tokens is None:
            return math.inf
        return self._limits.max_tokens - self._num_tokens

    def _most_prompt_tokens(self) -> int:
        """Return how many tokens a prompt may have that a turn is to follow."""
        turns = self.transcript.turns
        return self._most_tokens(len(turns[0].context) if turns else None) - 1

    def _places_behind(self, prompt: TurnPrompt) -> int:
        """Return how many tokens have a place behind a prompt, in its row."""
        turns = self.transcript.turns
        first = turns[0].context if turns else prompt.tokens
        return self._most_tokens(len(first)) - len(prompt.tokens)

    def _most_tokens(self, num_first: int | None) -> int:
        """Return how many tokens a prompt and the turn that follows it may have.

        Whether they continue a row or begin one makes no difference.

        Args:
            num_first: Tokens of the first prompt of the episode; None until it is made.
        """
        most = self._limits.context_tokens
        if self._limits.row_tokens is None or num_first is None:
            return most
        return min(most, num_first + self._limits.row_tokens)

    async def _sample(
        self,
        prompt: TurnPrompt,
        tools: Sequence[ToolSchema],
        max_tokens: int,
        stop: Sequence[str],
    ) -> Sampled:
        until_s = self._clock.now() + self._limits.model_s

        def sample() -> Awaitable[Sampled]:
            return self._sampler.sample(
                prompt.tokens,
                seed=turn_seed(self._seed, self.num_turns),
                max_tokens=max_tokens,
                tools=tools,
                stop=stop,
            )

        try:
            return await _bounded(sample, self._clock, until_s, self._limits.close_s)
        except _Late:
            raise self.over(End.MODEL_TIMEOUT) from None
        except EpisodeEnded as ended:
            raise self.over(ended.end) from None
        except Exception as error:
            self.failure = error
            raise

    def _record(self, prompt: TurnPrompt, sampled: Sampled, max_tokens: int) -> None:
        try:
            self.transcript.record(prompt, sampled, max_tokens)
        except ValueError as error:
            self.failure = error
            raise
        self._num_tokens += len(sampled.tokens)


# ------------------------------------------------------------------------ the course


async def run_episode(
    environment: EnvironmentFactory | Run,
    task: EpisodeTask,
    seed: int,
    sampler: Sampler,
    renderer: Renderer,
    limits: Limits,
    world_seed: int | None = None,
    clock: Clock | None = None,
) -> Episode:
    """Run an episode to its end.

    A coroutine function that lets the end of a limit through has said no number, so its
    score is 0, like that of an environment that has not paid anything. One that catches
    `EpisodeEnded` may return its score as ever, and an environment with a method
    `finish` is asked for the reward of its state.

    Args:
        environment: A coroutine function `run(task, policy)`, or what makes an
            environment.
        seed: The seed of the policy's turns.
        world_seed: The seed of the environment; that of the policy if None. Members of
            a group act in the same world, or its baseline would compare worlds.
        clock: Time of the limits; None is one that never stands still.

    Raises:
        CancelledError: The caller was cancelled. `close` was called all the same.
        Exception: The sampler raised it. It says nothing of the environment.
    """
    clock = clock or Clock()
    renderer = renderer.of_record(task.template_arguments)
    policy = EpisodePolicy(seed, sampler, renderer, limits, clock)
    deadline_s = clock.now() + limits.episode_s
    world_seed = seed if world_seed is None else world_seed
    course = _Course(task, world_seed, policy, limits, clock, deadline_s)
    try:
        if inspect.iscoroutinefunction(environment):
            ending = await course.settled(course.run(environment))
        else:
            ending = await course.play(environment)  # type: ignore[arg-type]
    finally:
        # A task that an environment left behind gets no further turn.
        policy.over(End.ABORTED)
    if policy.failure is not None:
        raise policy.failure

    if not policy.num_turns:
        ending = _without_turns(ending)

    turns = policy.transcript.turns
    return Episode(
        rows=policy.transcript.rows(),
        end=ending.end,
        score=policy.score,
        detail=ending.detail,
        num_turns=policy.num_turns,
        num_tool_calls=policy.num_tool_calls,
        conversations=policy.conversations,
        metrics=policy.metrics,
        response=str(message_of(turns[-1].sampled.action)["content"]) if turns else "",
    )


@dataclass(frozen=True)
class _Ending:
    end: End
    detail: str = ""


def _without_turns(ending: _Ending) -> _Ending:
    """Return how an episode ended in which the policy had no turn.

    It says nothing of the policy, and its group has no row to learn from.
    """
    if ending.end in FAULTS or ending.end is End.ABORTED:
        return ending
    detail = f"it ended as {ending.end} before the policy had a turn"
    return _Ending(End.ENVIRONMENT_FAILED, detail)


@dataclass
class _Course:
    """Everything between the beginning of an episode and its end."""

    task: EpisodeTask
    seed: int
    policy: EpisodePolicy
    limits: Limits
    clock: Clock
    deadline: float
    """When the episode ends at the latest, by its clock."""

    async def settled(self, course: Awaitable[End]) -> _Ending:
        """Return how a course ended, also if by an exception."""
        policy = self.policy
        try:
            end = await course
        except EpisodeEnded as ended:
            policy.over(ended.end)
            return _Ending(ended.end)
        except Exception as error:
            # Frameworks of agents raise errors of their own about those of the policy.
            is_about_end = policy.has_insisted or _is_about_end(error)
            if policy.end is not None and is_about_end:
                return _Ending(policy.end)
            detail = short_traceback(error, skip_files=OUR_FILES)
            return _Ending(End.ENVIRONMENT_FAILED, detail)
        return _Ending(end)

    async def run(self, run: Run) -> End:
        """Run a coroutine function, and pay what it returns."""
        episode = (self.deadline, End.EPISODE_TIMEOUT)
        result = await self._within(lambda: run(self.task, self.policy), episode)
        self.policy.pay(number_of(result, "the coroutine returned"))
        return self.policy.end or self.policy.cut or End.COMPLETED

    async def play(self, factory: EnvironmentFactory) -> _Ending:
        """Make an environment, act in it, and close it."""
        try:
            world = factory()
        # Nothing awaits here, so a cancellation is its own, too.
        except BaseException as error:
            detail = short_traceback(error, skip_files=OUR_FILES)
            return _Ending(End.ENVIRONMENT_FAILED, detail)

        trouble = ""
        try:
            ending = await self.settled(self._act(world))
            # Whoever says that it is done has said what it pays.
            is_cut = self.policy.end in _POLICY_LIMITS
            if is_cut and hasattr(world, "finish"):
                ending = await self.settled(self._finish(world, ending.end))
        finally:
            trouble = await self._close(world)
        detail = "\n".join(filter(None, (ending.detail, trouble)))
        return _Ending(ending.end, detail)

    async def _act(self, world: Environment) -> End:
        """Let the policy and an environment act in turn."""
        policy = self.policy
        episode = (self.deadline, End.EPISODE_TIMEOUT)
        first_call = (self.clock.now() + self.limits.tool_s, End.TOOL_TIMEOUT)
        observation = await self._within(
            lambda: world.reset(self.task, self.seed), first_call, episode
        )
        require_kind(observation, Observation, "reset")
        require_json(observation.messages, "reset returned the message")
        require_json(observation.tools, "reset returned the tool")
        messages = list(observation.messages)
        policy.conversations.append(messages)

        tools = observation.tools
        before: Observation | Step = observation
        while True:
            action, step = await self._turn(world, messages, tools, before)
            before = step
            require_json(step.messages, "step returned the message")
            policy.record(**step.metrics)
            policy.pay(number_of(step.reward, "step returned the reward"))
            messages = [*messages, message_of(action), *policy.as_read(step.messages)]
            policy.conversations[-1] = messages
            if step.done:
                # It does without a turn that was cut, and knows not by which limit.
                if step.end == End.MAX_TOKENS and action.finish == "length":
                    raise policy.over(policy.cut or End.MAX_TOKENS)
                return End(step.end)
            if not step.messages:
                raise ValueError("step returned no messages, and the episode goes on")

    async def _turn(
        self,
        world: Environment,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        before: Observation | Step,
    ) -> tuple[Action, Step]:
        """Let the policy act, as `before` asks it to, and the environment answer."""
        limits = self.limits
        now = self.clock.now
        episode = (self.deadline, End.EPISODE_TIMEOUT)
        turn = (now() + limits.turn_s, End.TURN_TIMEOUT)
        action = await self._within(
            lambda: self.policy.respond(
                messages, tools, stop=before.stop, max_tokens=before.max_tokens
            ),
            turn,
            episode,
        )

        calls = max(1, len(action.tool_calls))
        call = (now() + calls * limits.tool_s, End.TOOL_TIMEOUT)
        step = await self._within(lambda: world.step(action), call, turn, episode)
        require_kind(step, Step, "step")
        return action, step

    async def _finish(self, world: Any, end: End) -> End:
        """Pay what an environment says that its state is worth at a limit."""
        call = (self.clock.now() + self.limits.tool_s, End.TOOL_TIMEOUT)
        episode = (self.deadline, End.EPISODE_TIMEOUT)
        reward = await self._within(lambda: world.finish(end), call, episode)
        self.policy.pay(number_of(reward, "finish returned"))
        return end

    async def _close(self, world: Environment) -> str:
        """Close an environment, and return what went wrong."""
        seconds = self.limits.close_s
        until_s = self.clock.now() + seconds
        try:
            await _bounded(lambda: world.close(), self.clock, until_s, seconds)
        except _Late:
            return f"close did not return within {seconds} s"
        except Exception as error:
            return short_traceback(error, skip_files=OUR_FILES)
        return ""

    async def _within(
        self, call: Callable[[], Awaitable[T]], *deadlines: tuple[float, End]
    ) -> T:
        """Return what a call returns.

        Raises:
            EpisodeEnded: The first of the deadlines passed before.
        """
        until_s, end = min(deadlines, key=lambda deadline: deadline[0])
        try:
            return await _bounded(call, self.clock, until_s, self.limits.close_s)
        except _Late:
            # Whoever is late after a limit has said nothing of that limit's state.
            self.policy.end = end
            raise EpisodeEnded(end) from None


def _is_about_end(error: BaseException | None) -> bool:
    """Return whether an exception came of the end of the episode."""
    while error is not None:
        if isinstance(error, EpisodeEnded):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(map(_is_about_end, error.exceptions))
        # One that was raised while the end was handled is another matter.
        error = error.__cause__
    return False


# ---------------------------------------------------------------- calls of users' code


class _Late(Exception):
    """A call did not return in time."""


async def _bounded(
    call: Callable[[], Awaitable[T]], clock: Clock, until_s: float, grace_s: float
) -> T:
    """Return what a call returns.

    It runs in a task of its own. One that does not end when it is cancelled is left to
    itself, so that it cannot keep its episode.

    Args:
        grace_s: Seconds that a cancelled call may take.

    Raises:
        _Late: It has not returned until `until_s`.
        RuntimeError: It raised what is no `Exception`, or cancelled itself.
        Exception: Whatever it raises.
    """
    task = asyncio.ensure_future(_contained(call))
    try:
        is_done = await clock.wait(task, until_s)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await _stop(task, grace_s)
        raise
    if not is_done:
        await _stop(task, grace_s)
        raise _Late
    if task.cancelled():
        raise RuntimeError("the call cancelled itself")
    return task.result()


async def _contained(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except (Exception, asyncio.CancelledError):
        raise
    # The panic of an extension module, say. In a task some would end the event loop.
    except BaseException as error:
        failure = RuntimeError(f"it raised {error!r}, which is no Exception")
        raise failure.with_traceback(error.__traceback__) from error


async def _stop(task: asyncio.Future[T], grace_s: float) -> None:
    """Cancel a task, and wait for it a while."""
    task.cancel()
    # Nobody else looks at its exception.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait({task}, timeout=grace_s)
