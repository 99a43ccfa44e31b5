"""Settings of a call that generates responses to prompts.

Invariant: how a row is sampled depends on its number alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verl_ray.algorithms.groups import is_last_of_group
from verl_ray.rollout.requests import Sampling

TRAINING = "train"
"""Purpose of rollouts to learn from. The purpose is part of every seed."""
EVALUATION = "evaluate"
"""Purpose of rollouts to evaluate the policy with."""
GENERATION = "generate"
"""Purpose of responses that are written to a data file, graded as training is."""


@dataclass(frozen=True)
class Generation:
    """Settings of a call that generates responses to prompts."""

    purpose: str
    """Part of every seed.

    Rollouts for training and for evaluation therefore never share a random stream.
    """
    group_size: int
    sampling: Sampling
    run_seed: int
    stream_rows: int
    """Responses are yielded once this many are finished, or after a second."""
    keeps_routing: bool = field(default=False, kw_only=True)
    """Whether rows have the experts that were chosen, where the engine records them."""

    def sampling_of(self, row_id: int) -> Sampling:
        """Return how a row is sampled: like all others, unless a subclass differs."""
        return self.sampling


@dataclass(frozen=True)
class GenerationWithGreedyRow(Generation):
    """Samples responses; the last one of each group is greedy, as ReMax needs it."""

    def sampling_of(self, row_id: int) -> Sampling:
        """Return how a row is sampled."""
        if is_last_of_group(row_id, self.group_size):
            return replace(self.sampling, temperature=0.0)
        return self.sampling
