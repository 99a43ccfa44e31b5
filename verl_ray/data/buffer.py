"""Between those who produce rollouts and those who learn from them.

Invariant: what is taken was drawn from a policy at most `staleness` versions behind the one that learns; with
staleness 0 a step learns from its own rollouts alone, which is the synchronous run. Deliberately not here: tokens;
rollouts are held by reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.errors import DataError


@dataclass(frozen=True, eq=False)
class Experience:
    """The scored rollouts of one batch of prompts, and the policy version they were drawn from."""

    rollouts: Sharded[Rollouts]
    scores: Mapping[str, Sharded[Scores]]  # by grader
    policy_version: int


class RolloutBuffer:
    """First in, first out."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._held: deque[Experience] = deque()

    def put(self, experience: Experience) -> None:
        self._held.append(experience)

    def take(self, policy_version: int) -> Experience:
        """The oldest experience. Raises DataError if there is none, or if it is too old for this version."""
        if not self._held:
            raise DataError("the rollout buffer is empty; put an experience before taking one")
        experience = self._held.popleft()
        behind = policy_version - experience.policy_version
        if not 0 <= behind <= self._staleness:
            raise DataError(
                f"rollouts of policy version {experience.policy_version} are {behind} versions behind "
                f"{policy_version}; at most {self._staleness} are allowed"
            )
        return experience
