"""Environments of a user's own, named as path:class by the tests of whole runs."""

from __future__ import annotations

import asyncio

from verl_ray.agents.contract import Action, EpisodeTask, Observation, Step


class TwoTurns:
    """Pays for each 1 or 2 that the policy writes, in two turns."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        self.turns = 0
        return Observation(task.messages)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        reward = sum(character in "12" for character in action.text) / 8
        if self.turns == 2:
            return Step(reward=reward, done=True, metrics={"turns": self.turns})
        return Step([{"role": "user", "content": "7+8="}], reward)

    async def close(self) -> None:
        pass


class SlowTurns(TwoTurns):
    """Takes its time, so that a process that is lost has episodes."""

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(0.2)
        return await super().step(action)


class Failing(TwoTurns):
    """Fails in the first turn, where it begins with 2, 3 or 4.

    The trial before a run writes the first record's answer, which begins with a 1.
    """

    async def step(self, action: Action) -> Step:
        if self.turns == 0 and action.text.startswith(("2", "3", "4")):
            raise LookupError("nothing begins so here")
        return await super().step(action)
