"""Credit: from scores to advantages, per response and then per token.

The driver decides about each response; the shards spread the decision over tokens.

Invariant: pure functions of their rows. What needs other rows (group baselines) is
decided from one number per row; what needs tokens (the divergence charged in the
reward, GAE) needs no other row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import KL_ESTIMATORS
from verl_ray.algorithms.estimators import (
    AgentBaseline,
    CriticBaseline,
    GroupBaseline,
    GroupTokenBaseline,
    ResponseColumns,
    RewardPart,
)
from verl_ray.algorithms.group_baselines import gradient_energy, tokens_of_rows
from verl_ray.algorithms.groups import complete_trajectories, sums_on_rows
from verl_ray.algorithms.row_statistics import (
    float32_sums,
    moments,
    optional_statistics,
    row_statistics,
)
from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    Bool,
    Credit,
    Divergence,
    Finish,
    Float32,
    LogProbs,
    Rollouts,
    RowRewards,
    Values,
)
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.errors import DataError
from verl_ray.ops.masked import Moments
from verl_ray.settings.function_specs import DEFAULT


def response_divergences(
    algorithm: AlgorithmConfig,
    rollouts: Rollouts,
    policy: LogProbs | None,
    reference: LogProbs,
) -> Divergence:
    """Return the divergence of each response from the reference.

    It is the sum over the response's tokens. Without log-probs of the policy, those of
    the sampler are compared.
    """
    offsets = offsets_of(rollouts.response_length)
    places = np.flatnonzero(rollouts.response_mask)
    divergence = _token_divergence(algorithm, places, rollouts, policy, reference)
    return Divergence(
        offsets=np.zeros(rollouts.num_rows + 1, np.int64),
        kl=float32_sums(divergence, offsets),
    )


def response_rewards(
    algorithm: AlgorithmConfig,
    score: Float32,
    ok: Bool,
    responses: ResponseColumns,
    charge: RewardPart | None,
    parts: Sequence[RewardPart] = (),
    graded: Float32 | None = None,
) -> RowRewards:
    """Return the reward of each response, its advantage, and if it is learned from.

    A response without a score, or one that was aborted, is no evidence about the
    policy: it has no reward and is not learned from, nor is any other row of its
    trajectory, which is no member of its group. A response that was cut at the length
    limit is a member, unless algorithm.truncated is drop; it is not learned from if
    that is mask or drop.

    Args:
        algorithm: The section `algorithm` of the configuration.
        score: float32 [rows].
        ok: bool [rows]; False: the response has no score.
        responses: What else is known of them.
        charge: The cost of a nat, and the divergence of each response from the
            reference, float32 [rows]; or None. Group baselines compare rewards less
            their product.
        parts: What the scores are the weighted sum of. The divergence is one more,
            weighted by -cost.
        graded: float32 [rows], the scores by which responses are positive; None: score.
    """
    rewarded = complete_trajectories(
        ok & says_something(algorithm, responses.finish), responses.trajectory_id
    )

    charged_score = score
    if charge is not None:
        cost, divergence = charge
        charged_score = score - np.float32(cost) * divergence
        parts = [*parts, (-cost, divergence)]
    reward = np.where(rewarded, charged_score, 0).astype(np.float32)

    advantage, in_loss = _row_advantages(algorithm, reward, rewarded, responses, parts)
    # The grade of a trajectory stands on one of its rows.
    grade = np.where(rewarded, score if graded is None else graded, 0)
    is_positive = sums_on_rows(grade, responses.trajectory_id) > 0
    return RowRewards(
        offsets=np.zeros(len(reward) + 1, np.int64),
        reward=reward,
        advantage=advantage,
        in_loss=in_loss,
        is_member=rewarded,
        is_positive=is_positive,
    )


def _row_advantages(
    algorithm: AlgorithmConfig,
    reward: Float32,
    rewarded: Bool,
    responses: ResponseColumns,
    parts: Sequence[RewardPart],
) -> tuple[Float32, Bool]:
    """Return the advantage of each row, and whether it is learned from, [rows] each.

    Advantages are 0 where the baseline is per token; that follows on the shards.
    """
    estimator = ADVANTAGES[algorithm.advantage]
    in_loss = _is_learned_from(algorithm, rewarded, responses)
    if not isinstance(estimator, GroupBaseline):
        return np.zeros_like(reward), in_loss

    compared = rewarded
    if estimator.chooses_rows:
        compared = in_loss & (responses.length > 0)
    settings = estimator.settings(algorithm)
    settings |= estimator.columns(compared, responses, parts)
    advantage = estimator.function(reward, responses.group_id, compared, **settings)
    if estimator.chooses_rows:
        in_loss = compared & (advantage != 0)
    return advantage, in_loss


def _is_learned_from(
    algorithm: AlgorithmConfig, rewarded: Bool, responses: ResponseColumns
) -> Bool:
    """Return which responses with a reward are learned from, bool [rows]."""
    # A response that was cut, or is greedy, still counts in its group's baseline.
    in_loss = rewarded
    if responses.is_masked is not None:
        in_loss = in_loss & ~responses.is_masked
    if algorithm.truncated == "mask":
        in_loss = in_loss & (responses.finish != Finish.LENGTH)
    if ADVANTAGES[algorithm.advantage].reads_greedy:
        in_loss = in_loss & ~responses.is_last
    if algorithm.judges_trajectories:
        # A sequence is learned from as a whole or not at all.
        in_loss = complete_trajectories(in_loss, responses.trajectory_id)
    return in_loss


def says_something(algorithm: AlgorithmConfig, finish: npt.NDArray[np.int8]) -> Bool:
    """Return which responses say something of the policy, bool [rows].

    The others are no members of their group.

    Args:
        finish: Numbers of `Finish`, int8 [rows].
    """
    counts: Bool = finish != Finish.ABORTED
    if algorithm.truncated == "drop":
        counts = counts & (finish != Finish.LENGTH)
    return counts


def token_credit(
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    rollouts: Rollouts,
    rewards: RowRewards,
    policy: LogProbs | None,
    reference: LogProbs | None,
    values: Values | None,
    turn_weights: Mapping[str, float] | None = None,
) -> Credit:
    """Return the advantages of every response token, and returns if there is a critic.

    The response tokens of a trajectory are one sequence: the critic's next value and
    the discount go on from row to row. Its reward is paid once, at its last token, but
    for `Rollouts.turn_rewards`, which are paid where they were earned, each times the
    weight of its data source. So the sum of what is paid is the reward. If the baseline
    is per token and algorithm.kl.place is reward, every token also pays kl_coefficient
    times its divergence (arXiv:1909.08593, section 2.1). With a group baseline,
    `response_rewards` has charged the response as a whole.

    Args:
        algorithm: The section `algorithm` of the configuration.
        kl_coefficient: The present cost of a nat of divergence.
        rollouts: Whole trajectories, with their rows in the order of time.
        rewards: Their rewards and, with a group baseline, advantages.
        policy: Log-probs of the policy, or None if they are not computed. A penalty in
            the reward takes the sampler's then.
        reference: Log-probs of the reference, or None if there is no divergence.
        values: Values of the critic, or None if there is none.
        turn_weights: See `verl_ray.rewards.shaping.turn_weights`; None for 1.

    Raises:
        DataError: Values or algorithm.kl.estimator are needed and are not there.
    """
    # Places of the response tokens among all tokens, row by row.
    places = np.flatnonzero(rollouts.response_mask)
    offsets = offsets_of(rollouts.response_length)
    order = TimeOrder.of(rollouts)
    divergence = _divergence_or_zeros(algorithm, places, rollouts, policy, reference)
    token_rewards = _token_rewards(
        algorithm, kl_coefficient, rollouts, rewards, divergence, order, turn_weights
    )
    tokens = _estimate(
        algorithm, rollouts, rewards, token_rewards, values, policy, order
    )
    return Credit(
        offsets=rollouts.offsets,
        advantages=_spread(tokens.advantages, places, rollouts.num_tokens),
        returns=_spread_optional(tokens.returns, places, rollouts.num_tokens),
        in_loss=rewards.in_loss,
        is_positive=rewards.is_positive,
        reward=float32_sums(token_rewards, offsets),
        kl=float32_sums(divergence, offsets),
        kl_bounded=_bounded_tokens(algorithm, divergence, offsets),
        advantage_statistics=row_statistics(tokens.advantages, offsets),
        return_statistics=optional_statistics(tokens.returns, offsets),
        value_statistics=optional_statistics(tokens.values, offsets),
        residual_statistics=optional_statistics(tokens.residuals, offsets),
    )


@dataclass(frozen=True)
class TimeOrder:
    """The response tokens of each trajectory, in the order of time.

    Attributes:
        tokens: int64 [response tokens], the place of each among those of all rows; None
            where these stand in this order already.
        offsets: int64 [trajectories + 1].
        last_rows: int64 [trajectories], the row of the last turn of each.
    """

    tokens: Int64 | None
    offsets: Int64
    last_rows: Int64

    @classmethod
    def of(cls, rollouts: Rollouts) -> TimeOrder:
        """Return the order for whole trajectories, whose rows are in that of time.

        The rows of an episode are in the order of their last turns. Their tokens are in
        that of all turns: a branch may go on after another one has begun.
        """
        offsets = offsets_of(rollouts.response_length)
        trajectories, trajectory = np.unique(
            rollouts.trajectory_id, return_inverse=True
        )
        if len(trajectories) == len(trajectory):
            return cls(None, offsets, np.arange(len(trajectory)))

        rows = np.argsort(trajectory, kind="stable")
        ends = np.cumsum(np.bincount(trajectory))
        lengths = np.bincount(trajectory, weights=rollouts.response_length)
        tokens = tokens_of_rows(offsets, rows)
        if rollouts.turn_rewards is not None:
            row_of_token = np.repeat(np.arange(len(trajectory)), np.diff(offsets))
            turn = _turns_of_tokens(rollouts)
            tokens = np.lexsort((turn, trajectory[row_of_token]))
        return cls(tokens, offsets_of(lengths.astype(np.int64)), rows[ends - 1])

    def of_time(self, values: Float32) -> Float32:
        """Return values of the rows' tokens in this order, float32 [T]."""
        return values if self.tokens is None else values[self.tokens]

    def of_rows(self, values: Float32) -> Float32:
        """Return values in this order in that of the rows' tokens, float32 [T]."""
        if self.tokens is None:
            return values
        in_rows = np.empty_like(values)
        in_rows[self.tokens] = values
        return in_rows


def _turns_of_tokens(rollouts: Rollouts) -> Int64:
    """Return the number of the turn of each response token, int64 [response tokens]."""
    turns = rollouts.turn_rewards
    assert turns is not None
    row = np.repeat(np.arange(rollouts.num_rows), turns.lengths)
    ends = rollouts.offsets[row] + turns.values[:, 0].astype(np.int64)
    # The end of its turn is the first one that is not before a token.
    turn = np.searchsorted(ends, np.flatnonzero(rollouts.response_mask))
    numbers: Int64 = turns.values[:, 2].astype(np.int64)[turn]
    return numbers


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
    policy: LogProbs | None,
    order: TimeOrder,
) -> _TokenCredit:
    """Return what the estimator makes of the rewards.

    Raises:
        DataError: The estimator needs values or probabilities and there are none.
    """
    offsets = offsets_of(rollouts.response_length)
    estimator = ADVANTAGES[algorithm.advantage]

    if isinstance(estimator, GroupBaseline | AgentBaseline):
        return _TokenCredit(np.repeat(rewards.advantage, rollouts.response_length))

    if isinstance(estimator, GroupTokenBaseline):
        advantages = estimator.function(
            rewards.reward,
            rollouts.group_id,
            rewards.is_member,
            gradient_energy(rollouts.response_mask, policy),
            offsets,
            trajectory=rollouts.trajectory_id,
            **estimator.settings(algorithm),
        )
        return _TokenCredit(advantages)

    if isinstance(estimator, CriticBaseline):
        if values is None:
            raise DataError(
                f"algorithm.advantage = {algorithm.advantage} needs the critic's values"
            )
        token_values = values.values[rollouts.response_mask]
        bootstrap = _bootstrap_values(algorithm, rollouts, values)
        advantages, returns = estimator.function(
            order.of_time(token_rewards),
            order.of_time(token_values),
            order.offsets,
            bootstrap[order.last_rows],
            **estimator.settings(algorithm),
        )
        return _TokenCredit(
            order.of_rows(advantages), order.of_rows(returns), token_values
        )

    advantages = estimator.function(
        order.of_time(token_rewards), order.offsets, **estimator.settings(algorithm)
    )
    return _TokenCredit(order.of_rows(advantages))


def _divergence_or_zeros(
    algorithm: AlgorithmConfig,
    places: Int64,
    rollouts: Rollouts,
    policy: LogProbs | None,
    reference: LogProbs | None,
) -> Float32:
    """Return the divergence at these tokens; 0 where nobody needs it."""
    place = algorithm.kl.place
    # A teacher's divergence is no part of the credit.
    if reference is None or place == "none":
        return np.zeros(len(places), np.float32)
    if policy is None and place != "reward":
        return np.zeros(len(places), np.float32)
    return _token_divergence(algorithm, places, rollouts, policy, reference)


def _token_divergence(
    algorithm: AlgorithmConfig,
    places: Int64,
    rollouts: Rollouts,
    policy: LogProbs | None,
    reference: LogProbs,
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
    log_probs = rollouts.rollout_log_probs if policy is None else policy.log_probs
    divergence: Float32 = estimator.function(
        log_probs[places], reference.log_probs[places]
    )
    return divergence


def _bounded_tokens(
    algorithm: AlgorithmConfig, divergence: Float32, offsets: Int64
) -> Int64:
    """Return how many tokens of each row have the estimator's bound, int64 [rows]."""
    estimator = algorithm.kl.estimator
    bound = None if estimator is None else KL_ESTIMATORS[estimator].bound
    if bound is None:
        return np.zeros(len(offsets) - 1, np.int64)
    return float32_sums((divergence >= bound).astype(np.float32), offsets).astype(
        np.int64
    )


def _token_rewards(
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    rollouts: Rollouts,
    rewards: RowRewards,
    divergence: Float32,
    order: TimeOrder,
    turn_weights: Mapping[str, float] | None,
) -> Float32:
    """Return the reward of each response token, float32 [response tokens].

    Args:
        algorithm: The section `algorithm` of the configuration.
        kl_coefficient: The present cost of a nat of divergence.
        rollouts: The rows.
        rewards: Their rewards.
        divergence: float32 [response tokens].
        order: The order of the tokens in time.
        turn_weights: As in `token_credit`.
    """
    estimator = ADVANTAGES[algorithm.advantage]
    token_rewards = np.zeros(len(divergence), np.float32)
    # Rewards of whole trajectories have the divergence charged in them.
    if algorithm.kl.place == "reward" and not estimator.rewards_whole_trajectories:
        token_rewards = (-kl_coefficient * divergence).astype(np.float32)

    # The rest of each row's reward, once turns have theirs.
    rest = rewards.reward.astype(np.float64)
    if rollouts.turn_rewards is not None:
        row, token, earned = _earned_in_turns(rollouts, rewards.is_member, turn_weights)
        np.add.at(token_rewards, token, earned.astype(np.float32))
        np.subtract.at(rest, row, earned)

    with_tokens = np.flatnonzero(np.diff(order.offsets) > 0)
    last_tokens = order.offsets[1:][with_tokens] - 1
    if order.tokens is not None:
        last_tokens = order.tokens[last_tokens]
        _, trajectory = np.unique(rollouts.trajectory_id, return_inverse=True)
        rest = np.bincount(trajectory, weights=rest).astype(np.float64)
    token_rewards[last_tokens] += rest[with_tokens].astype(np.float32)
    return token_rewards


def _earned_in_turns(
    rollouts: Rollouts, is_member: Bool, weights: Mapping[str, float] | None
) -> tuple[Int64, Int64, npt.NDArray[np.float64]]:
    """Return the rewards of turns: their rows, response tokens and amounts, [turns].

    Raises:
        DataError: A reward stands at a token that the policy did not choose.
    """
    earned = rollouts.turn_rewards
    assert earned is not None
    row = np.repeat(np.arange(rollouts.num_rows), earned.lengths)
    place = rollouts.offsets[row] + earned.values[:, 0].astype(np.int64)
    if not rollouts.response_mask[place].all():
        raise DataError("the reward of a turn stands at a token that was not sampled")
    number = np.cumsum(rollouts.response_mask) - 1
    amount = earned.values[:, 1]
    if weights is not None:
        sources, source = np.unique(rollouts.data_source.texts(), return_inverse=True)
        default_weight = weights.get(DEFAULT, 0.0)
        weight = np.array(
            [weights.get(name, default_weight) for name in sources.tolist()]
        )
        amount = amount * weight[source][row]
    counts = is_member[row]
    return row[counts], number[place][counts], amount[counts]


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


def whitening_moments(
    algorithm: AlgorithmConfig,
    rollouts: Sharded[Rollouts],
    credit: Sharded[Credit],
) -> Moments | None:
    """Return the moments of all advantages of the step; None without whitening.

    They come from the sums that each shard reports with its credit.
    """
    if not algorithm.whiten_advantages:
        return None

    learned = credit.row("in_loss")
    response_length = rollouts.row("response_length")
    tokens = int(response_length[learned].sum())
    return moments(credit.row("advantage_statistics")[learned], tokens)
