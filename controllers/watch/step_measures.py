"""Metrics of a step of reinforcement learning, from the columns that it has made.

Invariant: that of `measures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controllers.watch import measures, score_entries
from controllers.watch.measures import Metrics
from controllers.watch.token_ages import version_metrics
from verl_ray.columns.batch import Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Credit, Finish, Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.learning.credit import says_something, whitening_moments
from verl_ray.rewards.shaping import Rewards, Shaping


def response_metrics(
    config: RLConfig,
    shaping: Shaping,
    generated: Experience,
    experience: Experience,
    rewards: Rewards,
) -> Metrics:
    """Return the metrics of scores, of what was added to them, and of groups.

    Args:
        config: Configuration of the run.
        shaping: How the scores of several graders are weighed.
        generated: What was generated for the step.
        experience: What it has learned from.
        rewards: The rewards of its trajectories.
    """
    rollouts = experience.of_trajectories().rollouts
    aborted = rollouts.row("finish") == Finish.ABORTED
    metrics = score_entries.scored_metrics(generated, shaping, config.run.stall_s)
    metrics |= measures.addition_metrics(rewards)
    return metrics | measures.group_metrics(config, rollouts, rewards.scores, aborted)


def row_metrics(
    config: RLConfig,
    rollouts: Sharded[Rollouts],
    rewards: Rewards,
    credit: Sharded[Credit],
    rows_of_ranks: Sequence[Int64],
) -> Metrics:
    """Return the metrics of lengths, turns, credit and versions.

    Args:
        config: Configuration of the run.
        rollouts: Rows that the step has learned from.
        rewards: The rewards of their trajectories.
        credit: Their credit.
        rows_of_ranks: Row indices of each data-parallel rank of the actor.
    """
    algorithm = config.algorithm
    metrics = measures.rollout_metrics(
        rollouts, config.data.max_prompt_tokens, rows_of_ranks
    )
    rewarded = None
    if config.preference is not None:
        # The best and the worst rewards say nothing of the policy.
        is_evidence = says_something(algorithm, rollouts.row("finish"))
        rewarded = rewards.scores.ok & is_evidence
        metrics |= measures.pair_metrics(credit, rollouts.row("group_id"))
    # The policy learns from whitened advantages, so these are the ones to show.
    metrics |= measures.credit_metrics(
        credit,
        rollouts.row("response_length"),
        rollouts.row("trajectory_id"),
        whitening_moments(algorithm, rollouts, credit),
        algorithm.advantage_clip,
        rewarded,
    )
    return metrics | version_metrics(rollouts, config.oldest_age)


def time_metrics(
    timings: Mapping[str, float], rollouts: Sharded[Rollouts], devices: int
) -> Metrics:
    """Return times, times per token and throughput.

    Args:
        timings: Seconds of the step and of its phases, by timing_s/<name>.
        rollouts: Rows that the step has learned from.
        devices: Number of devices of the run.
    """
    step_s = timings["timing_s/step"]
    response_tokens = int(rollouts.row("response_length").sum())
    metrics = dict(timings)
    metrics |= measures.per_token_ms(timings, response_tokens, rollouts.num_tokens)
    return metrics | {
        "perf/time_per_step": step_s,
        "perf/throughput": rollouts.num_tokens / step_s / devices,
    }
