"""Group baselines: how much better a response was than others to the same prompt.

Below each function stands its declaration: its paper, and what it needs. Functions take
one number per row, in NumPy, and loop over no rows. The last one is per token, and
loops over no tokens either.

Invariant: a pure function of its rows. The order of rows changes nothing but the order
of the result, and nothing is ever divided by a spread that is only rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from verl_ray.algorithms.discounting import Float64, discounted_sums
from verl_ray.algorithms.estimators import (
    GroupBaseline,
    GroupTokenBaseline,
    RewardPart,
)
from verl_ray.algorithms.groups import EPSILON, GroupMembers, sum_of_normalised
from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.columns.stages import Bool, Float32, LogProbs
from verl_ray.errors import DataError
from verl_ray.ops.masked import EQUAL


def grpo(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    epsilon: float = EPSILON,
) -> Float32:
    """(reward - group mean) / (group standard deviation + epsilon).

    Members of a group are trajectories. The reward of one is the sum over its rows, and
    each of its rows gets its advantage: rewards [0, 1, 0, 0] of trajectories
    [0, 0, 1, 2] are three members with rewards 1, 0 and 0. A trajectory with a row that
    is not valid stays out of the statistics, and all of its rows get 0
    (`groups.complete_trajectories`). The result is exactly 0 in a group of one member,
    or of rewards that are equal but for rounding. A valid reward that is not finite
    makes the whole group NaN.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2. The paper leaves the kind of
    standard deviation open; here it is the sample one (n - 1), as usual in this field.
    epsilon is an addition: it fades out differences below float32 noise.

    Args:
        rewards: float32 [rows].
        group: int64 [rows], the same for all rows of a trajectory.
        valid: bool [rows]; False: the row has no reward, which may be NaN.
        trajectory: int64 [rows], or None if every row is a trajectory of its own.
        epsilon: The addition to the standard deviation.

    Returns:
        float32 [rows].
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    return groups.to_rows(groups.deviation / (groups.std + epsilon))


GRPO = GroupBaseline(
    name="grpo",
    paper="DeepSeekMath (arXiv:2402.03300)",
    function=grpo,
    divides_by_spread=True,
)


def subtract_group_mean(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """Reward - group mean; 0 in a group of one member.

    Arguments, members and result are those of `grpo`.

    Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without the division by the standard
    deviation. It is also the first half of REINFORCE++-baseline (arXiv:2501.03262),
    whose second half is algorithm.whiten_advantages.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    return groups.to_rows(groups.deviation)


DR_GRPO = GroupBaseline(
    name="dr_grpo",
    paper="Dr. GRPO (arXiv:2503.20783)",
    function=subtract_group_mean,
)

REINFORCE_PLUS_PLUS_BASELINE = GroupBaseline(
    name="reinforce_plus_plus_baseline",
    paper="REINFORCE++ (arXiv:2501.03262)",
    function=subtract_group_mean,
)


def rloo(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """Reward - mean reward of the group's other members.

    Arguments, members and result are those of `grpo`.

    RLOO (arXiv:2402.14740), eq. 8. It equals n / (n - 1) * (reward - group mean).
    Deviation: in a group of one member there are no others, and the advantage is 0
    rather than the reward.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    # n / (n - 1) turns the distance from the mean of all members into the distance from
    # the mean of the others.
    others = np.maximum(groups.size - 1, 1)
    return groups.to_rows(groups.deviation * groups.size / others)


RLOO = GroupBaseline(name="rloo", paper="RLOO (arXiv:2402.14740)", function=rloo)


def maxrl(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """(reward - group mean) / group mean; 0 where the mean is not positive.

    Arguments, members and result are those of `grpo`. With rewards of 0 and 1 the sum
    over a group weights a prompt by the inverse of its accuracy, so that rare
    successes count.

    MaxRL (arXiv:2602.02710): a maximum-likelihood objective for rewards of 0 and 1.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    positive = groups.mean > 0
    mean = np.where(positive, groups.mean, 1)
    return groups.to_rows(np.where(positive, groups.deviation / mean, 0))


MAXRL = GroupBaseline(
    name="maxrl",
    paper="MaxRL (arXiv:2602.02710)",
    function=maxrl,
    needs_positive_scores=True,
)


def opo(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    length: Int64,
) -> Float32:
    """Reward - mean of the group's rewards, each weighted by its length.

    Arguments, members and result are those of `grpo`. The length of a trajectory is the
    sum over its rows.

    OPO (arXiv:2505.23585, eq. 9): the baseline of least variance, if the squared norm
    of a response's gradient grows with its length. It is meant for one update per
    batch.

    Args:
        length: int64 [rows], response tokens of each row.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    tokens = groups.of_trajectories(length.astype(np.float64))
    # From the plain mean, so that equal rewards have an advantage of exactly 0.
    shift = groups.sum(tokens * groups.deviation)
    shift /= np.maximum(groups.sum(tokens), 1)
    return groups.to_rows(groups.deviation - shift)


OPO = GroupBaseline(
    name="opo", paper="OPO (arXiv:2505.23585)", function=opo, reads_length=True
)


def pass_at_k(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """Best reward of the group - best reward of its other members.

    Arguments, members and result are those of `grpo`. Only the best member of a group
    has an advantage, its distance from the second best; a tie has none.

    Tang et al. (arXiv:2503.19595, section 3.2): what a member adds to the maximum of
    its group, with the leave-one-out baseline.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    added = groups.reward - groups.best_of_others()
    is_best = added > EQUAL * np.abs(groups.reward)
    return groups.to_rows(np.where(is_best & groups.has_spread, added, 0))


PASS_AT_K = GroupBaseline(
    name="pass_at_k", paper="Tang et al. (arXiv:2503.19595)", function=pass_at_k
)


def gpg(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """(reward - group mean) * members / members of groups whose rewards differ.

    Arguments, members and result are those of `grpo`. Members are counted over the
    whole step, so that groups without spread do not make its gradient smaller.

    GPG (arXiv:2504.02546, eqs. 6 and 7). An implementation counts rewards that are not
    0 instead; here it is the paper's count.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    members = float(groups.is_member.sum())
    informative = float((groups.is_member & groups.has_spread).sum())
    return groups.to_rows(groups.deviation * (members / max(informative, 1.0)))


GPG = GroupBaseline(name="gpg", paper="GPG (arXiv:2504.02546)", function=gpg)


def lite_ppo(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    epsilon: float = EPSILON,
) -> Float32:
    """(reward - group mean) / (standard deviation of the step's rewards + epsilon).

    Arguments, members and result are those of `grpo`.

    LitePPO (arXiv:2508.08221, section 4.1): the mean of a group, but the standard
    deviation over all members of the step, which a group of nearly equal rewards does
    not make small. It is the sample one (n - 1).
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    std = groups.std_of_step(groups.reward)
    return groups.to_rows(groups.deviation / (std + epsilon))


LITE_PPO = GroupBaseline(
    name="lite_ppo",
    paper="LitePPO (arXiv:2508.08221)",
    function=lite_ppo,
    divides_by_spread=True,
)


def gdpo(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    parts: Sequence[RewardPart],
    epsilon: float = EPSILON,
) -> Float32:
    """Sum of the parts, each normalised in its group, over the sum's deviation.

    It is what `sum_of_normalised` returns, divided by its standard deviation over all
    members of the step (+ epsilon). Its mean over the step is 0. Arguments, members and
    result are those of `grpo`, whose result it has, but for that scale, where there is
    one part.

    GDPO (arXiv:2601.05242): groups whose sums of rewards agree may differ in the parts,
    and a part of small spread counts as its weight says. Both deviations are sample
    ones (n - 1), as in `grpo`.

    Args:
        parts: What `rewards` is the weighted sum of; NaN where a row has none.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    total = sum_of_normalised(parts, group, valid, trajectory, epsilon)
    return groups.to_rows(total / (groups.std_of_step(total) + epsilon))


GDPO = GroupBaseline(
    name="gdpo",
    paper="GDPO (arXiv:2601.05242)",
    function=gdpo,
    divides_by_spread=True,
    reads_parts=True,
)


def remax(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    is_greedy: Bool,
) -> Float32:
    """Reward - reward of the greedy response to the same prompt.

    Arguments, members and result are those of `grpo`. The greedy response has no
    advantage, and neither have others where it has no reward.

    ReMax (arXiv:2310.10505, section 3.3), where the greedy response is generated
    besides one sample; here it is the last of the group, so all others share it. With
    KL in the reward, all rewards are less the cost of their divergence, that of the
    greedy response too; verl subtracts the greedy score alone.

    Args:
        is_greedy: bool [rows], one row or trajectory of each group.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    greedy = groups.of_trajectories(is_greedy.astype(np.float64)) > 0
    baseline = groups.sum(np.where(greedy, groups.reward, 0))
    has_baseline = groups.sum(greedy.astype(np.float64)) > 0
    learns = has_baseline & ~greedy & groups.has_spread
    return groups.to_rows(np.where(learns, groups.reward - baseline, 0))


REMAX = GroupBaseline(
    name="remax",
    paper="ReMax (arXiv:2310.10505)",
    function=remax,
    reads_greedy=True,
)


def best_and_worst(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """1 for the best response of a group, -1 for the worst one, 0 for all others.

    Of equal ones it is the first. A group of equal rewards has neither. Arguments and
    members are those of `grpo`.

    Self-Rewarding Language Models (arXiv:2401.10020): pairs of preferences from the
    responses with the highest and the lowest score; none where these are equal.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    sides = np.zeros(len(groups.reward))
    sides[groups.first_of_groups(-groups.reward)] = 1
    sides[groups.first_of_groups(groups.reward)] = -1
    return groups.to_rows(np.where(groups.has_spread, sides, 0))


BEST_AND_WORST = GroupBaseline(
    name="best_and_worst",
    paper="Self-Rewarding LMs (arXiv:2401.10020)",
    function=best_and_worst,
    divides_by_spread=True,
    chooses_rows=True,
)


# ------------------------------------------------------------------ baselines of tokens


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
    token_rows = np.repeat(np.arange(len(lengths)), lengths)

    total = _sums_so_far(energy[token_order].astype(np.float64), own_offsets)
    weight = np.where(members.is_member[token_rows], total, 0)
    deviation = members.deviation[token_rows]

    shift = _weighted_means(deviation, weight, members.group, lengths)

    advantages = np.zeros(len(token_rows), np.float32)
    is_member = members.is_member[token_rows]
    advantages[token_order] = np.where(is_member, deviation - shift, 0)
    return advantages


OPTIMAL_TOKEN_BASELINE = GroupTokenBaseline(
    name="optimal_token_baseline",
    paper="verl, optimal token baseline",
    function=optimal_token_baseline,
)


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
    token_rows = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(token_rows)) - offsets[token_rows]

    # One cell for each place of each group.
    longest = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, group, lengths)
    cell = offsets_of(longest)[group[token_rows]] + place
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


GROUP_BASELINES = (
    GRPO,
    DR_GRPO,
    RLOO,
    REINFORCE_PLUS_PLUS_BASELINE,
    MAXRL,
    OPO,
    PASS_AT_K,
    GPG,
    LITE_PPO,
    REMAX,
    GDPO,
    BEST_AND_WORST,
    OPTIMAL_TOKEN_BASELINE,
)
"""The baselines above, for the table in `advantages.py`."""
