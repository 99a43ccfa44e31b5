"""Advantages: how much better than expected each response, or each token, was.

Rewards become advantages here, in NumPy. Row functions take one number per row. Token
functions take the response tokens of many rows laid end to end, row r at
[offsets[r], offsets[r + 1]). No function loops over rows or tokens.

Invariant: a pure function of its rows. The order of rows changes nothing but the order
of the result, and nothing is ever divided by a spread that is only rounding.
Deliberately not here: the rewards themselves, sums over tokens (`discounting.py`), and
whitening over a step (`ops/masked.py`), which needs all shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.discounting import discounted_sums
from verl_ray.config.section import Fraction
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Bool, Float32
from verl_ray.ops.masked import RESOLUTION

Float64 = NDArray[np.float64]

# --------------------------------------------------------------------------- row level


class _Groups:
    """Trajectories as members of their groups.

    A trajectory is one member, however many rows it has: counting rows would bias the
    baseline towards trajectories of many turns. Its reward is the sum of what its rows
    earned, because the reward of an episode is paid once, on one of its rows or in
    parts. A trajectory that lacks the reward of any of its rows has none, and is no
    member.

    Attributes:
        size: float64 [trajectories], number of members of each trajectory's group.
        is_member: bool [trajectories], whether a trajectory has a reward.
        deviation: float64 [trajectories], reward of each member minus the mean of its
            group; 0 for a trajectory that is no member.
    """

    def __init__(
        self, rewards: Float32, group: Int64, valid: Bool, trajectory: Int64 | None
    ) -> None:
        self._trajectory, first_row = _number_trajectories(len(rewards), trajectory)
        assert np.array_equal(group[first_row][self._trajectory], group), (
            "the rows of a trajectory answer one prompt"
        )
        num_trajectories = len(first_row)

        row_rewards = np.where(valid, rewards, 0).astype(np.float64)
        reward = _sums(row_rewards, self._trajectory, num_trajectories)
        self.is_member: Bool = complete_trajectories(valid, trajectory)[first_row]

        # Groups of trajectories, numbered from 0.
        _, group_number = np.unique(group[first_row], return_inverse=True)
        self._group: Int64 = group_number.reshape(-1)
        self.size = self.sum(np.ones(num_trajectories))
        mean = self.sum(reward) / np.maximum(self.size, 1)
        deviation = np.where(self.is_member, reward - mean, 0)

        # Sums of float32 parts that should be equal differ in their last digits.
        is_rounding = self.sum(deviation**2) <= RESOLUTION * self.sum(reward**2)
        self.deviation: Float64 = np.where(is_rounding, 0, deviation)

    def sum(self, values: Float64) -> Float64:
        """Return the sum over the members of each trajectory's group.

        Args:
            values: float64 [trajectories].

        Returns:
            float64 [trajectories].
        """
        of_members = np.where(self.is_member, values, 0)
        return _sums(of_members, self._group, len(values))[self._group]

    def to_rows(self, values: Float64) -> Float32:
        """Return the value of each row's trajectory, float32 [rows]."""
        return values[self._trajectory].astype(np.float32)


def _number_trajectories(
    num_rows: int, trajectory: Int64 | None
) -> tuple[Int64, Int64]:
    """Number the trajectories consecutively.

    Returns:
        The number of each row's trajectory, int64 [rows] in [0, trajectories), and the
        first row of each trajectory, int64 [trajectories].
    """
    if trajectory is None:
        return np.arange(num_rows), np.arange(num_rows)

    _, first_row, number = np.unique(trajectory, return_index=True, return_inverse=True)
    return number.reshape(-1), first_row


def _sums(values: Float64, place: Int64, count: int) -> Float64:
    """Return the sum of the values at each place, float64 [count]."""
    sums = np.bincount(place, weights=values, minlength=count)
    # The stub of bincount says integers, which holds without weights.
    return cast(Float64, sums)


def complete_trajectories(valid: Bool, trajectory: Int64 | None) -> Bool:
    """Return for each row whether its trajectory has a reward, bool [rows].

    It has one if every row of the trajectory is valid.
    """
    number, first_row = _number_trajectories(len(valid), trajectory)
    invalid_rows = _sums((~valid).astype(np.float64), number, len(first_row))
    is_complete: Bool = invalid_rows == 0
    return is_complete[number]


def fraction_without_spread(
    rewards: Float32, group: Int64, valid: Bool, trajectory: Int64 | None = None
) -> float:
    """Return the share of groups in which all members have the same reward.

    A group with a single member counts as one of them, and a group without members is
    left out.

    Args:
        rewards: float32 [rows].
        group: Number of each row's group, int64 [rows].
        valid: Whether a row has a reward, bool [rows].
        trajectory: Number of each row's trajectory, int64 [rows]; None for one per row.

    Returns:
        The share; NaN if no group has a member.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    has_spread = groups.sum(groups.deviation**2) > 0

    # A group counts once, however many members it has.
    members = groups.is_member / np.maximum(groups.size, 1)
    num_groups = float(members.sum())
    if not num_groups:
        return math.nan
    return float(members[~has_spread].sum()) / num_groups


def grpo(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    *,
    trajectory: Int64 | None = None,
    epsilon: float = 1e-6,
) -> Float32:
    """(reward - group mean) / (group standard deviation + epsilon).

    Members of a group are trajectories. The reward of one is the sum over its rows, and
    each of its rows gets its advantage: rewards [0, 1, 0, 0] of trajectories
    [0, 0, 1, 2] are three members with rewards 1, 0 and 0. A trajectory with a row that
    is not valid stays out of the statistics, and all of its rows get 0
    (`complete_trajectories`). The result is exactly 0 in a group of one member, or of
    rewards that are equal but for rounding. A valid reward that is NaN makes the whole
    group NaN.

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
    groups = _Groups(rewards, group, valid, trajectory)
    # A group of one member has no spread: the 1 only avoids a division by 0.
    sum_of_squares = groups.sum(groups.deviation**2)
    std = np.sqrt(sum_of_squares / np.maximum(groups.size - 1, 1))
    return groups.to_rows(groups.deviation / (std + epsilon))


def subtract_group_mean(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """Reward - group mean; 0 in a group of one member.

    Arguments, members and result are those of `grpo`.

    Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without the division by the standard
    deviation. It is also the first half of REINFORCE++-baseline (arXiv:2501.03262),
    whose second half is algorithm.whiten_advantages.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    return groups.to_rows(groups.deviation)


def rloo(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None
) -> Float32:
    """Reward - mean reward of the group's other members.

    Arguments, members and result are those of `grpo`.

    RLOO (arXiv:2402.14740), eq. 8. It equals n / (n - 1) * (reward - group mean).
    Deviation: in a group of one member there are no others, and the advantage is 0
    rather than the reward.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    # n / (n - 1) turns the distance from the mean of all members into the distance from
    # the mean of the others.
    others = np.maximum(groups.size - 1, 1)
    return groups.to_rows(groups.deviation * groups.size / others)


# ------------------------------------------------------------------------- token level


def gae(
    rewards: Float32,
    values: Float32,
    offsets: Int64,
    bootstrap: Float32,
    gamma: float,
    lam: float,
) -> tuple[Float32, Float32]:
    """Generalized advantage estimation, computed in float64.

    With delta_t = r_t + gamma * v_{t+1} - v_t, the advantage is A_t = sum over k of
    (gamma * lam)^k * delta_{t+k}, and the return is A_t + v_t.

    Source: arXiv:1506.02438, eqs. 11, 12 and 16.

    Args:
        rewards: float32 [T] over response tokens.
        values: float32 [T], `values[t]` is the value before token t.
        offsets: int64 [rows + 1].
        bootstrap: float32 [rows], the value after the last token; 0 if the response
            ended by itself.
        gamma: The discount.
        lam: The lambda of the estimator.

    Returns:
        Advantages and returns, float32 [T] each.
    """
    baseline = values.astype(np.float64)

    # The value after each token: that before the next one, or the bootstrap.
    delta = np.empty_like(baseline)
    delta[:-1] = baseline[1:]
    has_tokens = offsets[1:] > offsets[:-1]
    last_tokens = offsets[1:][has_tokens] - 1
    delta[last_tokens] = bootstrap[has_tokens]

    # In place, since there may be many tokens.
    delta *= gamma
    delta += rewards
    delta -= baseline

    advantages = discounted_sums(delta, offsets, gamma * lam)
    returns = advantages + baseline
    return advantages.astype(np.float32), returns.astype(np.float32)


def discounted_returns(rewards: Float32, offsets: Int64, gamma: float) -> Float32:
    """G_t = r_t + gamma * G_{t+1} within each row, computed in float64.

    Arguments and result, float32 [T], are as for `gae`.

    REINFORCE++ (arXiv:2501.03262) takes these as advantages, with the divergence from
    the reference charged in the rewards, and whitens them over the step
    (algorithm.whiten_advantages).
    """
    returns = discounted_sums(rewards.astype(np.float64), offsets, gamma)
    return returns.astype(np.float32)


# ----------------------------------------------------------------------------- by name


GAMMA = Setting("gamma", Fraction, "Discount.")
LAM = Setting("lam", Fraction, "GAE's lambda.")


@dataclass(frozen=True, kw_only=True)
class GroupBaseline(Declaration):
    """An advantage per row, compared with the other responses to the same prompt.

    Attributes:
        function: Takes (rewards, group, valid, trajectory=...) and its settings, as
            `grpo` does.
        divides_by_spread: True if it divides by the spread of the group's rewards.
    """

    function: Callable[..., Float32]
    divides_by_spread: bool = False
    level: ClassVar[Literal["row"]] = "row"
    needs_group: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CriticBaseline(Declaration):
    """An advantage per token, compared with a critic's values.

    Attributes:
        function: Takes (rewards, values, offsets, bootstrap) and its settings, as `gae`
            does. It also returns the targets of the critic.
    """

    function: Callable[..., tuple[Float32, Float32]]
    divides_by_spread: ClassVar[bool] = False
    level: ClassVar[Literal["token"]] = "token"
    needs_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class NoBaseline(Declaration):
    """An advantage per token, from its rewards alone.

    Attributes:
        function: Takes (rewards, offsets) and its settings, as `discounted_returns`
            does.
    """

    function: Callable[..., Float32]
    divides_by_spread: ClassVar[bool] = False
    level: ClassVar[Literal["token"]] = "token"
    needs_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False


Advantage = GroupBaseline | CriticBaseline | NoBaseline

ADVANTAGES: dict[str, Advantage] = by_name(
    CriticBaseline(
        name="gae",
        paper="GAE (arXiv:1506.02438)",
        function=gae,
        reads={GAMMA: 1.0, LAM: 0.95},
    ),
    GroupBaseline(
        name="grpo",
        paper="DeepSeekMath (arXiv:2402.03300)",
        function=grpo,
        divides_by_spread=True,
    ),
    GroupBaseline(
        name="dr_grpo",
        paper="Dr. GRPO (arXiv:2503.20783)",
        function=subtract_group_mean,
    ),
    GroupBaseline(name="rloo", paper="RLOO (arXiv:2402.14740)", function=rloo),
    NoBaseline(
        name="reinforce_plus_plus",
        paper="REINFORCE++ (arXiv:2501.03262)",
        function=discounted_returns,
        reads={GAMMA: 1.0},
    ),
    GroupBaseline(
        name="reinforce_plus_plus_baseline",
        paper="REINFORCE++ (arXiv:2501.03262)",
        function=subtract_group_mean,
    ),
)
"""Every choice of `algorithm.advantage`, by its name."""
