"""Baselines of single tokens, from the other responses to the same prompt.

Invariant: those of `group_baselines.py`. A result depends on the rows of its group and
on no others.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from verl_ray.algorithms.discounting import Float64, discounted_sums
from verl_ray.algorithms.groups import GroupMembers
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import Bool, Float32, LogProbs
from verl_ray.errors import DataError


def optimal_token_baseline(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    energy: Float32,
    offsets: Int64,
    *,
    trajectory: Int64,
) -> Float32:
    """Reward - mean of the group's rewards, weighted by their energy up to the token.

    With e_t the energy of token t, W_t = e_1 + ... + e_t within its trajectory, and the
    baseline of all tokens at place t is sum W_t R / sum W_t over the members that are
    so long. A token of a failed trajectory has 0; so has one beyond all other members.

    Source: optimal token baseline of verl (`compute_optimal_token_baseline_advantage`),
    where e = 1 - 2 pi + sum pi^2, the squared norm of the gradient of log pi in the
    logits: the baseline of least variance, if the gradients of tokens are orthogonal.
    Deviations: beyond all other members it may also take no baseline; here it takes the
    member itself, as the formula says. Importance weights do not enter.

    Args:
        rewards: float32 [rows]; the reward of a trajectory is the sum over its rows.
        group: int64 [rows].
        valid: bool [rows]; False: the row has no reward.
        energy: float32 [T] over response tokens, >= 0.
        offsets: int64 [rows + 1].
        trajectory: int64 [rows]; rows of one trajectory are in the order of time.

    Returns:
        float32 [T].
    """
    # The rows of a trajectory one after another, as one sequence.
    order = np.argsort(trajectory, kind="stable")
    token_order = tokens_of_rows(offsets, order)
    members = GroupMembers(rewards, group, valid, trajectory)
    number = members.number_of_rows[order]
    lengths = np.bincount(
        number, weights=np.diff(offsets)[order], minlength=len(members.reward)
    ).astype(np.int64)
    own_offsets = offsets_of(lengths)
    of_token = np.repeat(np.arange(len(lengths)), lengths)

    total = _sums_so_far(energy[token_order].astype(np.float64), own_offsets)
    weight = np.where(members.is_member[of_token], total, 0)
    deviation = members.deviation[of_token]

    shift = _weighted_means(deviation, weight, members.group, lengths)

    advantages = np.zeros(len(of_token), np.float32)
    is_member = members.is_member[of_token]
    advantages[token_order] = np.where(is_member, deviation - shift, 0)
    return advantages


def gradient_energy(mask: Bool, policy: LogProbs | None) -> Float32:
    """Return 1 - 2 pi + sum pi^2 of each response token, float32 [response tokens].

    It is the squared norm of the gradient of log pi in the logits.

    Args:
        mask: bool [tokens], True on response tokens.
        policy: Log-probs of the policy before the step.

    Raises:
        DataError: The probabilities were not computed.
    """
    if policy is None or policy.squared_probs is None:
        raise DataError(
            "the estimator needs log-probs and squared probabilities of the policy"
            " before the step, which were not computed"
        )
    energy = 1 - 2 * np.exp(policy.log_probs[mask]) + policy.squared_probs[mask]
    # Rounding may bring the energy of a sure token below 0.
    return np.maximum(energy, 0).astype(np.float32)


def _weighted_means(
    values: Float64, weight: Float64, group: Int64, lengths: Int64
) -> Float64:
    """Return the weighted mean over the tokens of a group at the same place.

    Args:
        values: float64 [T], trajectory after trajectory.
        weight: float64 [T].
        group: int64 [trajectories], the number of each one's group.
        lengths: int64 [trajectories], tokens of each.

    Returns:
        float64 [T]; 0 where all weights are.
    """
    offsets = offsets_of(lengths)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(of_token)) - offsets[of_token]

    # One cell for each place of each group.
    longest = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, group, lengths)
    cell = offsets_of(longest)[group[of_token]] + place
    count = int(longest.sum())
    sums = cast(Float64, np.bincount(cell, weights=weight * values, minlength=count))
    weights = cast(Float64, np.bincount(cell, weights=weight, minlength=count))
    # Where all energies are 0 there is nothing to learn, whatever the advantage.
    means: Float64 = sums / np.where(weights == 0, 1, weights)
    return means[cell]


def tokens_of_rows(offsets: Int64, order: Int64) -> Int64:
    """Return the places of the tokens of these rows, one row after another."""
    lengths = np.diff(offsets)[order]
    starts = offsets[:-1][order]
    shift = starts - offsets_of(lengths)[:-1]
    return np.arange(int(lengths.sum())) + np.repeat(shift, lengths)


def _sums_so_far(values: Float64, offsets: Int64) -> Float64:
    """Return the sum up to and with each token of a row, float64 [T]."""
    backwards = len(values) - offsets[::-1]
    return discounted_sums(values[::-1].copy(), backwards, 1.0)[::-1]
