"""Credit: from scores to advantages, per response and then per token.

The driver decides about each response; the shards spread the decision over tokens.

Invariant: pure functions of their rows. What needs other rows (group baselines) is
decided from one number per row; what needs tokens (the divergence charged in the
reward, GAE) needs no other row. Deliberately not here: whitening, which needs the
moments of all shards, and the estimators themselves (`advantages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.advantages import (
    ADVANTAGES,
    CriticBaseline,
    GroupBaseline,
    complete_trajectories,
)
from verl_ray.algorithms.catalogue import KL_ESTIMATORS
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import (
    Bool,
    Credit,
    Divergence,
    Finish,
    Float32,
    LogProbs,
    Rollouts,
    RowRewards,
    Statistics,
    Values,
)
from verl_ray.errors import DataError


def response_divergences(
    algorithm: AlgorithmConfig,
    rollouts: Rollouts,
    policy: LogProbs,
    reference: LogProbs,
) -> Divergence:
    """Return the divergence of each response from the reference.

    It is the sum over the response's tokens.
    """
    offsets = offsets_of(rollouts.response_length)
    places = np.flatnonzero(rollouts.response_mask)
    divergence = _token_divergence(algorithm, places, policy, reference)
    return Divergence(
        offsets=np.zeros(rollouts.num_rows + 1, np.int64),
        kl=_float32_sums(divergence, offsets),
    )


def response_rewards(
    algorithm: AlgorithmConfig,
    score: Float32,
    ok: Bool,
    finish: npt.NDArray[np.int8],
    group_id: Int64,
    trajectory_id: Int64,
    charge: Float32 | None,
) -> RowRewards:
    """Return the reward of each response, its advantage, and if it is learned from.

    A response without a score, or one that was aborted, is no evidence about the
    policy: it has no reward and is not learned from. Group baselines compare
    trajectories, so with them the whole trajectory has no reward, and is no member of
    its group. A response that was cut at the length limit is a member; it is not
    learned from if algorithm.truncated is mask.

    Args:
        algorithm: The section `algorithm` of the configuration.
        score: float32 [rows].
        ok: bool [rows]; False: the response has no score.
        finish: int8 [rows], a `Finish` each.
        group_id: int64 [rows].
        trajectory_id: int64 [rows].
        charge: float32 [rows], the cost of each response's divergence from the
            reference, or None. Group baselines compare rewards that it is already
            subtracted from.
    """
    estimator = ADVANTAGES[algorithm.advantage]
    rewarded = ok & (finish != Finish.ABORTED)
    if isinstance(estimator, GroupBaseline):
        rewarded = complete_trajectories(rewarded, trajectory_id)

    charged_score = score if charge is None else score - charge
    reward = np.where(rewarded, charged_score, 0).astype(np.float32)

    # Baselines per token follow on the shards.
    advantage = np.zeros_like(reward)
    if isinstance(estimator, GroupBaseline):
        settings = estimator.settings(algorithm)
        advantage = estimator.function(
            reward, group_id, rewarded, trajectory=trajectory_id, **settings
        )

    # A response that was cut still counts in its group's baseline.
    in_loss = rewarded
    if algorithm.truncated == "mask":
        in_loss = in_loss & (finish != Finish.LENGTH)

    return RowRewards(
        offsets=np.zeros(len(reward) + 1, np.int64),
        reward=reward,
        advantage=advantage,
        in_loss=in_loss,
    )


def assign_credit(
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    rollouts: Rollouts,
    rewards: RowRewards,
    policy: LogProbs | None,
    reference: LogProbs | None,
    values: Values | None,
) -> Credit:
    """Return the advantages of every response token, and returns if there is a critic.

    The reward of a response is paid at its last token. If the baseline is per token and
    algorithm.kl.place is reward, every token also pays kl_coefficient times its
    divergence (arXiv:1909.08593, section 2.1). With a group baseline,
    `response_rewards` has charged the response as a whole.

    Args:
        algorithm: The section `algorithm` of the configuration.
        kl_coefficient: The present cost of a nat of divergence.
        rollouts: The rows.
        rewards: Their rewards and, with a group baseline, advantages.
        policy: Log-probs of the policy, or None if no divergence is computed.
        reference: Log-probs of the reference, or None likewise.
        values: Values of the critic, or None if there is none.

    Raises:
        DataError: The estimator needs values and there are none, or there is a
            reference but algorithm.kl.estimator is null.
    """
    # Positions of the response tokens among all tokens, row by row.
    places = np.flatnonzero(rollouts.response_mask)
    offsets = offsets_of(rollouts.response_length)
    divergence = np.zeros(len(places), np.float32)
    if policy is not None and reference is not None:
        divergence = _token_divergence(algorithm, places, policy, reference)

    token_rewards = _token_rewards(
        algorithm, kl_coefficient, rewards, divergence, offsets
    )
    tokens = _estimate(algorithm, rollouts, rewards, token_rewards, values)
    return Credit(
        offsets=rollouts.offsets,
        advantages=_spread(tokens.advantages, places, rollouts.num_tokens),
        returns=_spread_optional(tokens.returns, places, rollouts.num_tokens),
        in_loss=rewards.in_loss,
        reward=_float32_sums(token_rewards, offsets),
        kl=_float32_sums(divergence, offsets),
        advantage_statistics=row_statistics(tokens.advantages, offsets),
        return_statistics=_optional_statistics(tokens.returns, offsets),
        value_statistics=_optional_statistics(tokens.values, offsets),
        residual_statistics=_optional_statistics(tokens.residuals, offsets),
    )


@dataclass(frozen=True)
class _TokenCredit:
    """The credit of the response tokens, float32 [response tokens] each.

    Attributes:
        advantages: The advantages.
        returns: The targets of the critic; None without one.
        values: The values of the critic; None without one.
    """

    advantages: Float32
    returns: Float32 | None = None
    values: Float32 | None = None

    @property
    def residuals(self) -> Float32 | None:
        """The errors of the critic; None without one."""
        if self.returns is None or self.values is None:
            return None
        return self.returns - self.values


def _estimate(
    algorithm: AlgorithmConfig,
    rollouts: Rollouts,
    rewards: RowRewards,
    token_rewards: Float32,
    values: Values | None,
) -> _TokenCredit:
    """Return what the estimator makes of the rewards.

    Raises:
        DataError: The estimator needs values and there are none.
    """
    offsets = offsets_of(rollouts.response_length)
    estimator = ADVANTAGES[algorithm.advantage]

    if isinstance(estimator, GroupBaseline):
        return _TokenCredit(np.repeat(rewards.advantage, rollouts.response_length))

    if isinstance(estimator, CriticBaseline):
        if values is None:
            raise DataError(
                f"algorithm.advantage = {algorithm.advantage} needs the critic's values"
            )
        token_values = values.values[rollouts.response_mask]
        bootstrap = _bootstrap_values(algorithm, rollouts, values)
        settings = estimator.settings(algorithm)
        advantages, returns = estimator.function(
            token_rewards, token_values, offsets, bootstrap, **settings
        )
        return _TokenCredit(advantages, returns, token_values)

    settings = estimator.settings(algorithm)
    return _TokenCredit(estimator.function(token_rewards, offsets, **settings))


def _token_divergence(
    algorithm: AlgorithmConfig, places: Int64, policy: LogProbs, reference: LogProbs
) -> Float32:
    """Return the estimated divergence at these tokens.

    Raises:
        DataError: algorithm.kl.estimator is null.
    """
    if algorithm.kl.estimator is None:
        raise DataError(
            "a divergence was requested, but algorithm.kl.estimator is null"
        )

    estimator = KL_ESTIMATORS[algorithm.kl.estimator]
    divergence: Float32 = estimator.function(
        policy.log_probs[places], reference.log_probs[places]
    )
    return divergence


def _token_rewards(
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    rewards: RowRewards,
    divergence: Float32,
    offsets: Int64,
) -> Float32:
    """Return the reward of each response token: at the last one, less the divergence.

    Args:
        algorithm: The section `algorithm` of the configuration.
        kl_coefficient: The present cost of a nat of divergence.
        rewards: The rewards of the rows.
        divergence: float32 [response tokens].
        offsets: int64 [rows + 1], of the response tokens.
    """
    is_group_baseline = isinstance(ADVANTAGES[algorithm.advantage], GroupBaseline)
    token_rewards = np.zeros(len(divergence), np.float32)
    # A group baseline has compared rewards that the divergence was charged in.
    if algorithm.kl.place == "reward" and not is_group_baseline:
        token_rewards = (-kl_coefficient * divergence).astype(np.float32)

    has_tokens = np.diff(offsets) > 0
    last_tokens = offsets[1:][has_tokens] - 1
    token_rewards[last_tokens] += rewards.reward[has_tokens]
    return token_rewards


def _bootstrap_values(
    algorithm: AlgorithmConfig, rollouts: Rollouts, values: Values
) -> Float32:
    """Return the value after each response, float32 [rows].

    It is the critic's value for a response that was cut at the length limit, if
    algorithm.truncated is bootstrap, and 0 for any other.
    """
    was_cut = rollouts.finish == Finish.LENGTH
    bootstraps = was_cut & (algorithm.truncated == "bootstrap")
    return np.where(bootstraps, values.final_value, 0).astype(np.float32)


def _spread(values: Float32, places: Int64, num_tokens: int) -> Float32:
    """Return an array of all tokens with these values at some places, 0 elsewhere."""
    spread = np.zeros(num_tokens, np.float32)
    spread[places] = values
    return spread


def _spread_optional(
    values: Float32 | None, places: Int64, num_tokens: int
) -> Float32 | None:
    if values is None:
        return None
    return _spread(values, places, num_tokens)


# -------------------------------------------------------------------------- statistics


def row_statistics(values: Float32, offsets: Int64) -> Statistics:
    """Return the sum, sum of squares, maximum and minimum of each row.

    Args:
        values: float32 [T].
        offsets: int64 [rows + 1].

    Returns:
        float64 [rows, 4]; (0, 0, -inf, inf) for an empty row.
    """
    empty_row = np.array([0.0, 0.0, -np.inf, np.inf])
    table = np.tile(empty_row, (len(offsets) - 1, 1))

    # `reduceat` has no result for an empty run, so only the others are reduced.
    has_tokens = offsets[1:] > offsets[:-1]
    if has_tokens.any():
        starts = offsets[:-1][has_tokens]
        wide = values.astype(np.float64)
        columns = (
            np.add.reduceat(wide, starts),
            np.add.reduceat(wide * wide, starts),
            np.maximum.reduceat(wide, starts),
            np.minimum.reduceat(wide, starts),
        )
        table[has_tokens] = np.stack(columns, axis=1)
    return table


def _optional_statistics(values: Float32 | None, offsets: Int64) -> Statistics | None:
    if values is None:
        return None
    return row_statistics(values, offsets)


def _float32_sums(values: Float32, offsets: Int64) -> Float32:
    """Return the sum of each row, float32 [rows]."""
    return row_statistics(values, offsets)[:, 0].astype(np.float32)
