"""Worlds whose methods are plain functions, as environments.

Invariant: a method that is plain runs in a thread, and no two calls of a world run at
the same time: one that came too late is waited for, by `close` as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from verl_ray.agents.contract import (
    Action,
    End,
    Environment,
    EpisodeTask,
    Observation,
    Step,
)
from verl_ray.agents.threads import OneAtATime

METHODS = ("reset", "step", "close")
"""What each environment has."""

_FINISH = "finish"


def environment_factory(
    world: type, build: Callable[[], Any]
) -> Callable[[], Environment]:
    """Return what makes the environment of an episode.

    Args:
        world: A class with the methods of an environment, each plain or asynchronous,
            or with those of Gymnasium.
        build: Makes an object of it.
    """
    if _is_gymnasium(world):
        gym_build = functools.partial(GymnasiumWorld, build)
        return functools.partial(PlainWorld, GymnasiumWorld, gym_build)
    names = [name for name in (*METHODS, _FINISH) if hasattr(world, name)]
    if all(_is_asynchronous(world, name) for name in names):
        return cast("Callable[[], Environment]", build)
    return functools.partial(PlainWorld, world, build)


def _is_asynchronous(world: type, name: str) -> bool:
    return inspect.iscoroutinefunction(getattr(world, name))


def _is_gymnasium(world: type) -> bool:
    """Return whether a class has `reset(seed=..., options=...)`."""
    names = inspect.signature(world.reset).parameters  # type: ignore[attr-defined]
    return {"seed", "options"} <= set(names) and "task" not in names


class PlainWorld:
    """An environment with plain methods.

    Where `reset` is plain, the object is made in its thread, too.
    """

    def __init__(self, world: type, build: Callable[[], Any]) -> None:
        """Take the class of the environment, and what makes an object of it."""
        self._class = world
        self._build = build
        self._world = build() if _is_asynchronous(world, "reset") else None
        self._calls = OneAtATime()
        # `run_episode` asks a world only if it has this method.
        if hasattr(world, _FINISH):
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
        """Close the world once no call runs; see `Environment`."""
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
        if self._world is None:
            return None
        return await getattr(self._world, name)(*arguments)

    def _run(self, name: str, *arguments: Any) -> Any:
        if self._world is None:
            if name == "close":
                return None
            self._world = self._build()
        return getattr(self._world, name)(*arguments)


class GymnasiumWorld:
    """A world of Gymnasium whose observations and actions are texts.

    The conversation begins with the system messages of the task and the first
    observation; the fields of the task that are no messages are the options of `reset`.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """Make the world."""
        self._world = build()

    def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin; see `Environment`."""
        # Gymnasium's seeds are those of NumPy.
        text, _ = self._world.reset(seed=seed % 2**32, options=dict(task.extra))
        system = [each for each in task.messages if each["role"] == "system"]
        return Observation([*system, _message(text)])

    def step(self, action: Action) -> Step:
        """Take the text of an action; see `Environment`."""
        text, reward, is_over, is_cut, _ = self._world.step(action.text)
        if is_over or is_cut:
            end = End.COMPLETED if is_over else End.MAX_TURNS
            return Step(reward=float(reward), done=True, end=end)
        return Step([_message(text)], float(reward))

    def close(self) -> None:
        """Close the world; see `Environment`."""
        self._world.close()


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
