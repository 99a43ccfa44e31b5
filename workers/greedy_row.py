"""Generation for ReMax: the last response of each group is decoded greedily.

Deliberately not here: what the reward of that response is for
(`verl_ray/algorithms/group_baselines.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ray.algorithms.groups import is_last_of_group
from verl_ray.rollout.requests import Sampling
from workers.rollout import Generation


@dataclass(frozen=True)
class GenerationWithGreedyRow(Generation):
    """Samples responses, but for the last one of each group."""

    def sampling_of(self, row_id: int) -> Sampling:
        """Return how a row is sampled."""
        if is_last_of_group(row_id, self.group_size):
            return replace(self.sampling, temperature=0.0)
        return self.sampling
