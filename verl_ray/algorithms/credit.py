"""From scores to advantages: the decision per response (driver), and its spread over tokens (on the shards).

Invariant: pure functions of their rows. What needs other rows (group baselines) is decided from one number per row;
what needs tokens (the divergence charged in the reward, GAE) needs no other row. Deliberately not here: whitening,
which needs the moments of all shards, and the estimators themselves (`advantages.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.advantages import ADVANTAGES, CriticBaseline, GroupBaseline, complete
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


def diverge(algorithm: AlgorithmConfig, rollouts: Rollouts, policy: LogProbs, reference: LogProbs) -> Divergence:
    """The divergence of each response from the reference, summed over its tokens."""
    offsets = offsets_of(rollouts.response_length)
    sums = statistics(_kl(algorithm, rollouts, policy, reference), offsets)[:, 0]
    return Divergence(offsets=np.zeros(rollouts.num_rows + 1, np.int64), kl=sums.astype(np.float32))


def judge(
    algorithm: AlgorithmConfig,
    score: Float32,
    ok: Bool,
    finish: npt.NDArray[np.int8],
    group_id: Int64,
    trajectory_id: Int64,
    charge: Float32 | None,
) -> RowRewards:
    """The reward of each response, its advantage over its group, and whether it is learned from. All inputs [rows].

    A response without a score (`ok` False) or one that was aborted says nothing of the policy: it has no reward and is
    not learned from. Group baselines compare trajectories, so there it takes its whole trajectory with it, which is
    then no member of its group. One that was cut at the length limit is a member; it is not learned from when
    algorithm.truncated is mask. `charge` is what the divergence from the reference costs the response as a whole:
    group baselines compare rewards that it is already taken from.
    """
    estimator = ADVANTAGES[algorithm.advantage]
    rewarded = ok & (finish != Finish.ABORTED)
    if isinstance(estimator, GroupBaseline):
        rewarded = complete(rewarded, trajectory_id)

    reward = np.where(rewarded, score if charge is None else score - charge, 0).astype(np.float32)
    advantage = np.zeros_like(reward)
    if isinstance(estimator, GroupBaseline):
        settings = estimator.settings(algorithm)
        advantage = estimator.function(reward, group_id, rewarded, trajectory=trajectory_id, **settings)

    in_loss = rewarded
    if algorithm.truncated == "mask":
        in_loss = in_loss & (finish != Finish.LENGTH)
    return RowRewards(offsets=np.zeros(len(reward) + 1, np.int64), reward=reward, advantage=advantage, in_loss=in_loss)


def assign(
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    rollouts: Rollouts,
    rewards: RowRewards,
    policy: LogProbs | None,
    reference: LogProbs | None,
    values: Values | None,
) -> Credit:
    """Advantages, and returns where there is a critic, for every response token of these rows.

    The reward of a response is paid at its last token. Where the baseline is per token and algorithm.kl.place is
    reward, every token also pays kl_coefficient times its divergence (arXiv:1909.08593, section 2.1); with a group
    baseline `judge` has charged the response as a whole.
    """
    places = np.flatnonzero(rollouts.response_mask)  # the response tokens, row by row
    offsets = offsets_of(rollouts.response_length)
    filled = np.diff(offsets) > 0
    last = offsets[1:][filled] - 1
    estimator = ADVANTAGES[algorithm.advantage]
    kl = np.zeros(len(places), np.float32)
    if policy is not None and reference is not None:
        kl = _kl(algorithm, rollouts, policy, reference)
    per_token = algorithm.kl.place == "reward" and not isinstance(estimator, GroupBaseline)
    token_rewards = (-kl_coefficient * kl).astype(np.float32) if per_token else np.zeros(len(places), np.float32)
    token_rewards[last] += rewards.reward[filled]

    returns = token_values = None
    if isinstance(estimator, GroupBaseline):
        advantages = np.repeat(rewards.advantage, rollouts.response_length)
    elif isinstance(estimator, CriticBaseline):
        if values is None:
            raise DataError(f"algorithm.advantage = {algorithm.advantage} needs the critic's values")
        token_values = values.values[places]
        cut = (rollouts.finish == Finish.LENGTH) & (algorithm.truncated == "bootstrap")
        bootstrap = np.where(cut, values.final_value, 0).astype(np.float32)
        settings = estimator.settings(algorithm)
        advantages, returns = estimator.function(token_rewards, token_values, offsets, bootstrap, **settings)
    else:
        advantages = estimator.function(token_rewards, offsets, **estimator.settings(algorithm))

    def spread(per_response_token: Float32) -> Float32:
        flat = np.zeros(rollouts.num_tokens, np.float32)
        flat[places] = per_response_token
        return flat

    found = (returns, token_values, None if returns is None or token_values is None else returns - token_values)
    told = [None if one is None else statistics(one, offsets) for one in found]
    return Credit(
        offsets=rollouts.offsets,
        advantages=spread(advantages),
        returns=None if returns is None else spread(returns),
        in_loss=rewards.in_loss,
        reward=statistics(token_rewards, offsets)[:, 0].astype(np.float32),
        kl=statistics(kl, offsets)[:, 0].astype(np.float32),
        advantage_statistics=statistics(advantages, offsets),
        return_statistics=told[0],
        value_statistics=told[1],
        residual_statistics=told[2],
    )


def _kl(algorithm: AlgorithmConfig, rollouts: Rollouts, policy: LogProbs, reference: LogProbs) -> Float32:
    if algorithm.kl.estimator is None:
        raise DataError("a divergence was asked for, but algorithm.kl.estimator is null")
    places = np.flatnonzero(rollouts.response_mask)
    estimator = KL_ESTIMATORS[algorithm.kl.estimator]
    divergence: Float32 = estimator.function(policy.log_probs[places], reference.log_probs[places])
    return divergence


def statistics(values: Float32, offsets: Int64) -> Statistics:
    """Sum, sum of squares, maximum and minimum of each row, float64 [rows, 4]; (0, 0, -inf, inf) for an empty row."""
    table = np.tile(np.array([0.0, 0.0, -np.inf, np.inf]), (len(offsets) - 1, 1))
    filled = offsets[1:] > offsets[:-1]
    if filled.any():
        starts, wide = offsets[:-1][filled], values.astype(np.float64)
        reductions = (np.add.reduceat, np.add.reduceat, np.maximum.reduceat, np.minimum.reduceat)
        inputs = (wide, wide * wide, wide, wide)
        table[filled] = np.stack([reduce(x, starts) for reduce, x in zip(reductions, inputs, strict=True)], axis=1)
    return table
