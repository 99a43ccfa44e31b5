"""Additions to the scores of a step: rewards of lengths, or a user's own shaping.

Invariant: both see the same responses as members of a group, those whose rewards its
baseline compares. Deliberately not here: their formulas
(`verl_ray/algorithms/length_shaping.py`), and the user's function
(`verl_ray/algorithms/own_shaping.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from controllers.watch.measures import Metrics
from verl_ray.algorithms.credit import says_something
from verl_ray.algorithms.length_shaping import length_rewards
from verl_ray.algorithms.own_shaping import OWN_SHAPINGS, ScoredResponses
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Bool, Finish, Float32, Rollouts
from verl_ray.rewards.shaping import ResponseScores


def with_shaping(
    config: RLConfig, scores: ResponseScores, rollouts: Sharded[Rollouts]
) -> tuple[ResponseScores, Metrics]:
    """Return the rewards that shaping makes of scores, and means of what it adds.

    Each addition becomes one of their parts, with its weight. A response that is no
    member of its group gets none. The greedy response of ReMax gets what it is worth
    among its group, since it is what the others are compared with.

    Args:
        config: Configuration of the run.
        scores: Normalised and weighted scores.
        rollouts: Their responses, whole groups of them.
    """
    valid = scores.ok & says_something(config.algorithm, rollouts.row("finish"))
    if config.algorithm.shaping is None:
        parts = length_rewards(
            config.algorithm,
            scores.score,
            valid,
            rollouts.row("response_length").astype(np.int64),
            rollouts.row("group_id"),
            config.rollout.max_response_tokens,
        )
    else:
        parts = {"shaping": (1.0, _own_addition(config, scores, valid, rollouts))}
    if not parts:
        return scores, {}

    added = {
        name: np.float32(weight) * values for name, (weight, values) in parts.items()
    }
    metrics: Metrics = {
        f"reward/{name}/mean": float(values[valid].mean()) if valid.any() else np.nan
        for name, values in added.items()
    }
    total = np.sum(list(added.values()), axis=0, dtype=np.float32)
    shaped = replace(
        scores, score=scores.score + total, parts=(*scores.parts, *parts.values())
    )
    return shaped, metrics


def _own_addition(
    config: RLConfig, scores: ResponseScores, valid: Bool, rollouts: Sharded[Rollouts]
) -> Float32:
    """Return what a user's own function adds to the scores, float32 [rows]."""
    algorithm = config.algorithm
    assert algorithm.shaping is not None
    responses = ScoredResponses(
        score=scores.score,
        group=rollouts.row("group_id"),
        valid=valid,
        trajectory=rollouts.row("trajectory_id"),
        length=rollouts.row("response_length").astype(np.int64),
        truncated=rollouts.row("finish") == Finish.LENGTH,
        parts=scores.parts,
        max_tokens=config.rollout.max_response_tokens,
    )
    shaped = OWN_SHAPINGS[algorithm.shaping].shape(algorithm, responses)
    return np.where(valid, shaped - scores.score, 0).astype(np.float32)
