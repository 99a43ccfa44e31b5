"""Environments whose methods are plain functions, or those of Gymnasium.

Invariant: a method that is plain runs in a thread, and no two calls of an environment
run at the same time: one that came too late is waited for, by `close` as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from verl_ray.agents.contract import (
    Action,
    End,
    Environment,
    EpisodeTask,
    Observation,
    Step,
)
from verl_ray.agents.returned import number_of
from verl_ray.agents.threads import OneAtATime
from verl_ray.data.fields import ENVIRONMENT, excerpt
from verl_ray.data.tokenizers import COLUMNS_OF_TEMPLATE

METHODS = ("reset", "step", "close")
"""What each environment has."""

_FINISH = "finish"

_TRAINER_COLUMNS = {ENVIRONMENT, *COLUMNS_OF_TEMPLATE}
"""Columns of a record that are no options of an environment of Gymnasium."""

_BEGUN = ("observation", "info")
_STEPPED = ("observation", "reward", "terminated", "truncated", "info")


def environment_factory(
    environment: type, build: Callable[[], Any]
) -> Callable[[], Environment]:
    """Return what makes the environment of an episode.

    Args:
        environment: A class with the methods of an environment, each plain or
            asynchronous, or with those of Gymnasium.
        build: Makes an object of it.
    """
    if _is_gymnasium(environment):
        kind = GymnasiumEnvironment
        if hasattr(environment, _FINISH):
            kind = ValuedGymnasiumEnvironment
        return functools.partial(PlainEnvironment, kind, functools.partial(kind, build))
    names = [name for name in (*METHODS, _FINISH) if hasattr(environment, name)]
    if all(_is_asynchronous(environment, name) for name in names):
        return cast("Callable[[], Environment]", build)
    return functools.partial(PlainEnvironment, environment, build)


def _is_asynchronous(environment: type, name: str) -> bool:
    return inspect.iscoroutinefunction(getattr(environment, name))


def _is_gymnasium(environment: type) -> bool:
    """Return whether a class has `reset(seed=..., options=...)`."""
    names = inspect.signature(environment.reset).parameters  # type: ignore[attr-defined]
    return {"seed", "options"} <= set(names) and "task" not in names


class PlainEnvironment:
    """An environment with plain methods.

    Where `reset` is plain, the object is made in its thread, too.
    """

    def __init__(self, environment: type, build: Callable[[], Any]) -> None:
        """Take the class of the environment, and what makes an object of it."""
        self._class = environment
        self._build = build
        self._environment = build() if _is_asynchronous(environment, "reset") else None
        self._calls = OneAtATime()
        # `run_episode` asks an environment only if it has this method.
        if hasattr(environment, _FINISH):
            self.finish = self._finish

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin; see `Environment`."""
        observation: Observation = await self._call("reset", task, seed)
        return observation

    async def step(self, action: Action) -> Step:
        """Take an action; see `Environment`."""
        step: Step = await self._call("step", action)
        return step

    async def close(self) -> None:
        """Close the environment once no call runs; see `Environment`."""
        await self._call("close")

    async def _finish(self, end: End) -> float:
        reward: float = await self._call(_FINISH, end)
        return reward

    async def _call(self, name: str, *arguments: Any) -> Any:
        run = self._await if _is_asynchronous(self._class, name) else self._run
        # A thread that hangs bears the name of the user's method.
        method = functools.update_wrapper(
            functools.partial(run, name), getattr(self._class, name)
        )
        return await self._calls.result_of(method, *arguments)

    async def _await(self, name: str, *arguments: Any) -> Any:
        # It could not be made, so there is nothing to close.
        if self._environment is None:
            return None
        return await getattr(self._environment, name)(*arguments)

    def _run(self, name: str, *arguments: Any) -> Any:
        if self._environment is None:
            if name == "close":
                return None
            self._environment = self._build()
        return getattr(self._environment, name)(*arguments)


class GymnasiumEnvironment:
    """An environment of Gymnasium whose observations and actions are texts.

    The conversation begins with the system messages of the task and the first
    observation; the other columns of the record are the options of `reset`, but for
    those that say how it is trained.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """Make the environment."""
        self._environment = build()

    def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin; see `Environment`."""
        columns = task.extra.items()
        options = {name: each for name, each in columns if name not in _TRAINER_COLUMNS}
        # Gymnasium's seeds are those of NumPy.
        returned = self._environment.reset(seed=seed % 2**32, options=options)
        text, _ = self._parts(returned, "reset", _BEGUN)
        system = [each for each in task.messages if each["role"] == "system"]
        return Observation([*system, _message(text)])

    def step(self, action: Action) -> Step:
        """Take the text of an action; see `Environment`."""
        returned = self._environment.step(action.text)
        text, paid, is_over, is_cut, _ = self._parts(returned, "step", _STEPPED)
        reward = number_of(paid, "step returned the reward")
        if is_over or is_cut:
            end = End.COMPLETED if is_over else End.MAX_TURNS
            return Step(reward=reward, done=True, end=end)
        return Step([_message(text)], reward)

    def close(self) -> None:
        """Close the environment; see `Environment`."""
        self._environment.close()

    def _parts(
        self, returned: object, method: str, names: Sequence[str]
    ) -> tuple[Any, ...]:
        """Return what a method of the environment has returned, with these parts.

        Raises:
            TypeError: It is something else.
        """
        if isinstance(returned, tuple) and len(returned) == len(names):
            return returned
        what = excerpt(returned)
        if isinstance(returned, tuple):
            what = f"{len(returned)} values, {what}"
        raise TypeError(
            f"{type(self._environment).__name__}.{method} returned {what}, expected"
            f" ({', '.join(names)}), as Gymnasium has it; Gym had fewer values"
        )


class ValuedGymnasiumEnvironment(GymnasiumEnvironment):
    """One that says what its state is worth at a limit."""

    def finish(self, end: End) -> float:
        """Return the reward of the state; see `Environment`."""
        reward: float = self._environment.finish(end)
        return reward


def _message(text: object) -> dict[str, Any]:
    """Return an observation as a message.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"the observation is a {type(text).__name__}, and the policy reads text:"
            " write one that says what is to be seen"
        )
    return {"role": "user", "content": text}
