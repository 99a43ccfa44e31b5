"""An episode: a policy and an environment in turn, until one of many ends.

Invariant: every end has a type, and `close` is called once, whatever the end. No reward
is invented: a score is the sum of what the environment said, and an environment that
fails says nothing more.

An environment runs in the event loop of its episodes. A call that awaits is stopped by
its deadline; one that computes without awaiting stops the whole loop. Plain methods run
in threads (`plain_environments`).
"""

from __future__ import annotations

import asyncio
import inspect
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
    Sampler,
    Step,
    Terms,
    ToolSchema,
    message_of,
)
from verl_ray.agents.deadlines import Clock, Late, bounded
from verl_ray.agents.policy import EpisodePolicy, Limits
from verl_ray.agents.returned import (
    end_named,
    number_of,
    require_json,
    require_kind,
)
from verl_ray.agents.template import Renderer
from verl_ray.errors import AgentFailed
from verl_ray.user_files import short_traceback

Run = Callable[[EpisodeTask, Policy], Awaitable[float]]
"""An environment as a coroutine function: it asks the policy, and returns the score."""

EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""

T = TypeVar("T")

OUR_FILES = (str(Path(__file__).parent), asyncio.__path__[0])


_POLICY_LIMITS = LIMITS - FAULTS
"""Ends of which an environment is told by `finish`, if it has that method."""


async def run_episode(
    environment: EnvironmentFactory | Run,
    task: EpisodeTask,
    seed: int,
    sampler: Sampler,
    renderer: Renderer,
    limits: Limits,
    environment_seed: int | None = None,
    clock: Clock | None = None,
    terms: Terms | None = None,
    tell: Callable[[str], None] = lambda _: None,
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
        environment_seed: The seed of the environment; None is `seed`. A group shares
            one, or its baseline would compare environments.
        clock: Time of the limits; None is one that never stands still.
        terms: How the turns are sampled, as agents are told.
        tell: Says something to whoever watches the run.

    Raises:
        CancelledError: The caller was cancelled. `close` was called all the same.
        Exception: The sampler raised it. It says nothing of the environment.
    """
    clock = clock or Clock()
    renderer = renderer.of_record(task.template_arguments)
    policy = EpisodePolicy(seed, sampler, renderer, limits, clock, terms, tell)
    environment_seed = seed if environment_seed is None else environment_seed
    course = _Course(task, environment_seed, policy, limits, clock)
    try:
        if inspect.iscoroutinefunction(environment):
            ending = await course.settled(course.run(environment))
        else:
            ending = await course.play(environment)  # type: ignore[arg-type]
    finally:
        # A task that an environment left behind gets no further turn.
        policy.over(End.ABORTED)
        policy.is_closed = True
    if policy.failure is not None:
        raise policy.failure

    if not policy.num_turns:
        ending = _without_turns(ending, policy.overflow)

    return policy.episode(ending.end, ending.detail)


@dataclass(frozen=True)
class _Ending:
    end: End
    detail: str = ""


def _without_turns(ending: _Ending, overflow: str) -> _Ending:
    """Return how an episode ended in which the policy had no turn.

    It says nothing of the policy, and its group has no row to learn from.

    Args:
        overflow: Why its first prompt has no place for a turn; empty if it has.
    """
    if ending.end in FAULTS or ending.end is End.ABORTED:
        return ending
    reason = f": {overflow}" if overflow else ""
    detail = f"it ended as {ending.end} before the policy had a turn{reason}"
    return _Ending(End.ENVIRONMENT_FAILED, detail)


@dataclass
class _Course:
    """Everything between the beginning of an episode and its end."""

    task: EpisodeTask
    seed: int
    policy: EpisodePolicy
    limits: Limits
    clock: Clock

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
            # Where a program of its own has failed, our code says nothing of it.
            detail = str(error)
            if not isinstance(error, AgentFailed):
                detail = short_traceback(error, skip_files=OUR_FILES)
            return _Ending(End.ENVIRONMENT_FAILED, detail)
        return _Ending(end)

    async def run(self, run: Run) -> End:
        """Run a coroutine function, and pay what it returns."""
        episode = (self.policy.deadline_s, End.EPISODE_TIMEOUT)
        result = await self._within(lambda: run(self.task, self.policy), episode)
        self.policy.pay(number_of(result, "the coroutine returned"))
        return self.policy.end or self.policy.cut or End.COMPLETED

    async def play(self, factory: EnvironmentFactory) -> _Ending:
        """Make an environment, act in it, and close it."""
        try:
            environment = factory()
        # Nothing awaits here, so a cancellation is its own, too.
        except BaseException as error:
            detail = short_traceback(error, skip_files=OUR_FILES)
            return _Ending(End.ENVIRONMENT_FAILED, detail)

        trouble = ""
        try:
            ending = await self.settled(self._act(environment))
            # Whoever says that it is done has said what it pays.
            is_cut = self.policy.end in _POLICY_LIMITS
            if is_cut and hasattr(environment, "finish"):
                ending = await self.settled(self._finish(environment, ending.end))
        finally:
            trouble = await self._close(environment)
        detail = "\n".join(filter(None, (ending.detail, trouble)))
        return _Ending(ending.end, detail)

    async def _act(self, environment: Environment) -> End:
        """Let the policy and an environment act in turn."""
        policy = self.policy
        episode = (self.policy.deadline_s, End.EPISODE_TIMEOUT)
        first_call = (self.clock.now() + self.limits.tool_s, End.TOOL_TIMEOUT)
        observation = await self._within(
            lambda: environment.reset(self.task, self.seed), first_call, episode
        )
        require_kind(observation, Observation, "reset")
        require_json(observation.messages, "reset returned the message")
        require_json(observation.tools, "reset returned the tool")
        messages = list(observation.messages)
        policy.conversations.append(messages)

        tools = observation.tools
        before: Observation | Step = observation
        while True:
            action, step = await self._turn(environment, messages, tools, before)
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
                return end_named(step.end)
            if not step.messages:
                raise ValueError("step returned no messages, and the episode goes on")

    async def _turn(
        self,
        environment: Environment,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        before: Observation | Step,
    ) -> tuple[Action, Step]:
        """Let the policy act, as `before` asks it to, and the environment answer."""
        limits = self.limits
        now = self.clock.now
        episode = (self.policy.deadline_s, End.EPISODE_TIMEOUT)
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
        step = await self._within(lambda: environment.step(action), call, turn, episode)
        require_kind(step, Step, "step")
        return action, step

    async def _finish(self, environment: Any, end: End) -> End:
        """Pay what an environment says that its state is worth at a limit."""
        call = (self.clock.now() + self.limits.tool_s, End.TOOL_TIMEOUT)
        episode = (self.policy.deadline_s, End.EPISODE_TIMEOUT)
        reward = await self._within(lambda: environment.finish(end), call, episode)
        self.policy.pay(number_of(reward, "finish returned"))
        return end

    async def _close(self, environment: Environment) -> str:
        """Close an environment, and return what went wrong."""
        seconds = self.limits.close_s
        until_s = self.clock.now() + seconds
        try:
            await bounded(lambda: environment.close(), self.clock, until_s, seconds)
        except Late:
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
            return await bounded(call, self.clock, until_s, self.limits.close_s)
        except Late:
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
