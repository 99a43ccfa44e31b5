"""Metrics of a step's rows under their published names.

Invariant: metrics are pure functions of columns with one value (or one row of sums) per
response. No token is read, and failed scores are counted, never averaged.

Deliberately not here: optimizer steps (`update_measures.py`) and evaluations
(`held_out_measures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import End
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.groups import fraction_without_spread
from verl_ray.algorithms.row_statistics import moments
from verl_ray.columns.batch import Array, Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    NO_EPISODE,
    Credit,
    Finish,
    Rollouts,
    Statistics,
    last_rows,
    sums_of_trajectories,
)
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.ops.masked import Moments, explained_variance, whiten
from verl_ray.report.evidence import ZERO_STD
from verl_ray.rewards.health import (
    ScoreHealth,
)
from verl_ray.rewards.shaping import (
    ResponseScores,
    Rewards,
    component,
    failures,
)

Metrics = dict[str, float]

TURNS = 2.0
"""Messages per conversation in num_turns/*.

The prompt counts as a message, as on the field's dashboards.
"""


def spread(name: str, values: npt.NDArray[np.generic]) -> Metrics:
    """Return mean, maximum and minimum of the values; NaN if there are none."""
    if not values.size:
        return {
            f"{name}/mean": nan,
            f"{name}/max": nan,
            f"{name}/min": nan,
        }
    return {
        # A sum in float32 may be beyond it although each value is not.
        f"{name}/mean": float(values.mean(dtype=np.float64)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


# ----------------------------------------------------------------------------- rollouts


def rollout_metrics(
    rollouts: Sharded[Rollouts],
    max_prompt_tokens: int,
    rows_of_ranks: Sequence[Int64],
) -> Metrics:
    """Return lengths and finish reasons of prompts and responses.

    Args:
        rollouts: Rows of the step.
        max_prompt_tokens: Longest prompt that the configuration allows.
        rows_of_ranks: Row indices of each data-parallel rank of the actor.
    """
    # A trajectory of several rows is one response to the prompt of its first row.
    trajectory = rollouts.row("trajectory_id")
    lasts = last_rows(trajectory)
    finish = rollouts.row("finish")[lasts]
    response_length = sums_of_trajectories(trajectory, rollouts.row("response_length"))
    prompt_length = rollouts.row("prompt_length")[np.append(0, lasts + 1)[:-1]]

    # An aborted response is shorter than the policy would have made it.
    whole = finish != Finish.ABORTED
    clipped = finish == Finish.LENGTH
    clipped_of_whole = nan
    if whole.any():
        clipped_of_whole = float(clipped[whole].mean())

    return {
        **spread("response_length", response_length),
        "response_length/clip_ratio": float(clipped.mean()),
        **spread("response_length_non_aborted", response_length[whole]),
        "response_length_non_aborted/clip_ratio": clipped_of_whole,
        "response/aborted_ratio": float((~whole).mean()),
        **spread("prompt_length", prompt_length),
        "prompt_length/clip_ratio": float((prompt_length >= max_prompt_tokens).mean()),
        **_episode_metrics(rollouts),
        "perf/total_num_tokens": float(rollouts.num_tokens),
        **balance(rollouts.lengths, rows_of_ranks),
    }


def _episode_metrics(rollouts: Sharded[Rollouts]) -> Metrics:
    """Return the turns of prompts and policy, and why episodes ended.

    Of a run that has single responses as well, they are those of its episodes.
    """
    if "end" not in rollouts.columns:
        return spread("num_turns", np.full(len(rollouts), TURNS))
    lasts = last_rows(rollouts.row("trajectory_id"))
    lasts = lasts[rollouts.row("end")[lasts] != NO_EPISODE]
    num_rows = int((rollouts.row("end") != NO_EPISODE).sum())
    # Each turn of the policy answers a message, which counts as well.
    metrics = spread("num_turns", TURNS * rollouts.row("num_turns")[lasts])
    metrics["episode/rows"] = num_rows / max(len(lasts), 1)
    return metrics | _end_shares(rollouts.row("end")[lasts])


def _end_shares(ends: Array) -> Metrics:
    """Return the share of episodes of each end, by numbers of `End`, [episodes]."""
    shares = np.bincount(ends, minlength=len(End)) / max(len(ends), 1)
    return {
        f"episode/ends/{end}": float(share)
        for end, share in zip(End, shares, strict=True)
    }


def held_out_episode_metrics(
    sources: Sequence[str], rollouts: Sharded[Rollouts]
) -> Metrics:
    """Return val-aux/<data source>/{num_turns/mean, episode/ends/<end>}.

    There are none of a data source whose responses are single ones.

    Args:
        sources: Data source of each response, [rows].
        rollouts: A row per response.
    """
    metrics: Metrics = {}
    if "end" not in rollouts.columns:
        return metrics
    is_episode = rollouts.row("end") != NO_EPISODE
    for source in sorted(set(np.array(sources)[is_episode].tolist())):
        is_of_source = is_episode & (np.array(sources) == source)
        turns = TURNS * rollouts.row("num_turns")[is_of_source]
        metrics[f"val-aux/{source}/num_turns/mean"] = float(turns.mean())
        shares = _end_shares(rollouts.row("end")[is_of_source])
        metrics |= {f"val-aux/{source}/{name}": shares[name] for name in shares}
    return metrics


def balance(lengths: Int64, rows_of_ranks: Sequence[Int64]) -> Metrics:
    """Return the number of tokens per data-parallel rank.

    `min` and `max` are those of rows in their original order, `balanced_min` and
    `balanced_max` those of the rows that each rank was assigned.

    Args:
        lengths: Tokens of each row, [rows].
        rows_of_ranks: Row indices of each data-parallel rank of the actor.
    """
    num_ranks = len(rows_of_ranks)
    # The split that ranks would get if rows were not balanced.
    in_order = [int(part.sum()) for part in np.array_split(lengths, num_ranks)]
    balanced = [int(lengths[rows].sum()) for rows in rows_of_ranks]

    return {
        "global_seqlen/min": float(min(in_order)),
        "global_seqlen/max": float(max(in_order)),
        "global_seqlen/minmax_diff": float(max(in_order) - min(in_order)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(lengths.sum() / num_ranks),
    }


def per_token_ms(
    timings: Mapping[str, float], response_tokens: int, all_tokens: int
) -> Metrics:
    """Return timing_per_token_ms/<name> in milliseconds.

    Generation is divided by the response tokens, every other phase by all tokens.

    Args:
        timings: Seconds of each phase, by timing_s/<name>.
        response_tokens: Number of response tokens of the step.
        all_tokens: Number of prompt and response tokens of the step.
    """
    # These phases compute over prompts and responses.
    phases = ("ref", "values", "adv", "update_critic", "update_actor")
    tokens = dict.fromkeys(phases, all_tokens)
    tokens["gen"] = response_tokens

    metrics: Metrics = {}
    for name, count in tokens.items():
        if f"timing_s/{name}" in timings and count:
            seconds = timings[f"timing_s/{name}"]
            metrics[f"timing_per_token_ms/{name}"] = 1e3 * seconds / count
    return metrics


# ------------------------------------------------------------------------------- scores


def addition_metrics(rewards: Rewards) -> Metrics:
    """Return reward/<addition>/mean, over the members of their groups."""
    counted = rewards.is_member
    metrics = {}
    for name, values in rewards.additions.items():
        mean = float(values[counted].mean()) if counted.any() else nan
        metrics[f"reward/{name}/mean"] = mean
    return metrics


def group_metrics(
    config: RLConfig,
    rollouts: Sharded[Rollouts],
    score: ResponseScores,
    aborted: npt.NDArray[np.bool_],
) -> Metrics:
    """Return the share of groups whose members all have the same score.

    Such a group teaches nothing where advantages compare the members of a group. Where
    they compare the parts of scores, members are the same if these cancel. Groups of
    one response have no such metric.

    Args:
        config: Configuration of the run.
        rollouts: Rows of the step.
        score: Score of each response, as the policy learns from it.
        aborted: Responses that are members of no group, bool [rows].
    """
    if config.rollout.group_size == 1:
        return {}
    parts = ADVANTAGES[config.algorithm.advantage].compared(score.summands)
    fraction = fraction_without_spread(
        score.score,
        rollouts.row("group_id"),
        score.ok & ~aborted,
        rollouts.row("trajectory_id"),
        parts,
    )
    return {ZERO_STD: fraction}


def component_metrics(raw: Mapping[str, ResponseScores], prefix: str) -> Metrics:
    """Return <prefix>/<component>/{mean, max, min, failed, none} of each grader.

    The first three are over the responses that it scored, and the last is the number of
    those that it left to others. The scores of a single grader are already in
    `critic/score`, so it has no metrics here.
    """
    if len(raw) == 1:
        return {}

    metrics: Metrics = {}
    failed = failures({role: scores.health for role, scores in raw.items()})
    for role, scores in raw.items():
        name = f"{prefix}/{component(role)}"
        metrics |= spread(name, scores.score[scores.ok])
        metrics[f"{name}/failed"] = float(failed[role].sum())
        is_left = (scores.health == ScoreHealth.NONE) & ~failed[role]
        metrics[f"{name}/none"] = float(is_left.sum())
    return metrics


# ------------------------------------------------------------------------------- credit


def credit_metrics(
    credit: Sharded[Credit],
    response_length: npt.NDArray[np.generic],
    trajectory: Int64,
    whitening: Moments | None,
    advantage_clip: float | None = None,
    rewarded: npt.NDArray[np.bool_] | None = None,
) -> Metrics:
    """Return rewards per response, and advantages, returns and values per token.

    Args:
        credit: Rewards and sums of each response.
        response_length: Tokens of each response, [rows].
        trajectory: The trajectory of each row, [rows].
        whitening: Moments by which advantages are whitened before the policy learns
            from them; None if they are not. The metrics are of whitened advantages.
        advantage_clip: The bound of |advantage| in the loss, or None. It holds for the
            maximum and the minimum; the mean is that before it.
        rewarded: Rows whose rewards count, [rows]; None: those that are learned from.
    """
    # Rows that are left out of the loss may hold no numbers.
    counted = credit.row("in_loss")
    if rewarded is None:
        rewarded = counted
    reward = credit.row("reward")[rewarded]
    _, number = np.unique(trajectory[rewarded], return_inverse=True)
    if len(number) and number.max() < len(number) - 1:
        # The reward of a trajectory is the sum over its rows.
        reward = np.bincount(number, weights=reward).astype(np.float32)
    metrics = spread("critic/rewards", reward)
    tokens = int(response_length[counted].sum())

    for name in ("advantage", "return", "value"):
        column = credit.columns.get(f"{name}_statistics")
        # A run without a critic has no values.
        if column is None:
            continue
        statistics = _mean_max_min(column[counted], tokens)
        if name == "advantage" and whitening is not None and tokens:
            statistics = whiten(statistics, whitening)
        if name == "advantage" and advantage_clip is not None and tokens:
            statistics[1:] = statistics[1:].clip(-advantage_clip, advantage_clip)
        mean, maximum, minimum = statistics.tolist()
        metrics[f"critic/{name}s/mean"] = mean
        metrics[f"critic/{name}s/max"] = maximum
        metrics[f"critic/{name}s/min"] = minimum

    if "residual_statistics" in credit.columns:
        residuals = moments(credit.row("residual_statistics")[counted], tokens)
        returns = moments(credit.row("return_statistics")[counted], tokens)
        metrics["critic/vf_explained_var"] = explained_variance(residuals, returns)
    return metrics


def pair_metrics(credit: Sharded[Credit], group: Int64) -> Metrics:
    """Return the number of pairs, and the share of groups without one.

    Args:
        credit: Which rows are learned from, two of each group that has a pair.
        group: The group of each row, [rows].
    """
    pairs = credit.row("in_loss").sum() / 2
    return {
        "preference/pairs": float(pairs),
        "preference/groups_without_pair": float(1 - pairs / len(np.unique(group))),
    }


def _mean_max_min(statistics: Statistics, tokens: int) -> npt.NDArray[Any]:
    """Return mean, maximum and minimum over all tokens of some rows, float64 [3]."""
    mean = nan
    if tokens:
        mean = float(statistics[:, 0].sum() / tokens)
    # Without rows these are the neutral elements, infinite.
    maximum = statistics[:, 2].max(initial=-np.inf)
    minimum = statistics[:, 3].min(initial=np.inf)
    return np.array([mean, maximum, minimum])


@dataclass(frozen=True)
class ReferenceDivergence:
    """KL divergence of the policy from the reference, in nats.

    It covers the responses of a step that the policy learns from.
    """

    responses: int
    """Number of these responses."""

    per_response: float
    """Mean over responses of the sums over their tokens; NaN if there are none."""

    per_token: float
    """Mean over responses of the means over their tokens; NaN if there are none."""

    bounded: float
    """Share of tokens whose divergence is the estimator's bound; NaN without tokens."""

    @classmethod
    def of(
        cls,
        credit: Sharded[Credit],
        response_length: npt.NDArray[np.int32],
        trajectory: Int64,
    ) -> ReferenceDivergence:
        """Return the divergence of a step.

        The rows of a trajectory are one response. Those without tokens have no mean and
        are left out.

        Args:
            credit: Sums over the tokens of each row.
            response_length: Tokens of each row, [rows].
            trajectory: The trajectory of each row, [rows]; its rows are adjacent.
        """
        counted = credit.row("in_loss") & (response_length > 0)
        rows_kl = credit.row("kl")[counted].astype(np.float64)
        if not len(rows_kl):
            return cls(0, nan, nan, nan)

        kl = sums_of_trajectories(trajectory[counted], rows_kl)
        tokens = sums_of_trajectories(trajectory[counted], response_length[counted])
        per_response = float(kl.mean())
        per_token = float((kl / tokens).mean())
        bounded = float(credit.row("kl_bounded")[counted].sum() / tokens.sum())
        return cls(len(kl), per_response, per_token, bounded)

    def metrics(self, coefficient: float) -> Metrics:
        """Return the divergence and its coefficient as metrics.

        actor/reward_kl_penalty is per token, as on the field's dashboards.
        actor/reward_kl_per_response is ours: algorithm.kl.target is compared with it.
        """
        return {
            "actor/reward_kl_penalty": self.per_token,
            "actor/reward_kl_per_response": self.per_response,
            "actor/reward_kl_penalty_coeff": coefficient,
            "actor/kl_clipfrac": self.bounded,
        }
