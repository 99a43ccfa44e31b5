"""Generations: of responses to learn from, and to evaluate.

Deliberately not here: which prompts, and when (`supply.py`, `evaluator.py`).
"""

from __future__ import annotations

from controllers.rollouts.graders import EVALUATION, TRAINING
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.rollout import RolloutConfig
from verl_ray.config.tasks.rl import EvaluationConfig, RLConfig
from verl_ray.rollout.requests import Sampling
from workers.greedy_row import GenerationWithGreedyRow
from workers.rollout import Generation


def generation_to_learn_from(config: RLConfig) -> Generation:
    """Return what is generated for each prompt to learn from."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    kind = GenerationWithGreedyRow if advantage.reads_greedy else Generation
    return _generation(config, config.rollout, TRAINING, kind)


def generation_to_evaluate(config: RLConfig) -> Generation:
    """Return what is generated for each held-out problem."""
    return _generation(config, config.evaluation, EVALUATION, Generation)


def _generation(
    config: RLConfig,
    section: RolloutConfig | EvaluationConfig,
    purpose: str,
    kind: type[Generation],
) -> Generation:
    """Return the generation of groups as a section of the configuration has them."""
    rollout = config.rollout
    sampling = Sampling(
        section.temperature,
        section.top_p,
        section.top_k,
        rollout.max_response_tokens,
    )
    return kind(
        purpose, section.group_size, sampling, config.run.seed, rollout.stream_rows
    )
