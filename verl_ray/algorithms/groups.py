"""Responses to one prompt as a group, whose members are trajectories.

Invariant: nothing depends on the order of rows, a spread that is only rounding counts
as none, and a reward that is not finite shows in all members of its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.estimators import RewardPart
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Float32
from verl_ray.ops.masked import RESOLUTION, SMALL, without_rounding

Float64 = NDArray[np.float64]

EPSILON = 1e-6
"""What is added to a deviation before it divides."""


class GroupMembers:
    """Trajectories as members of their groups.

    A trajectory is one member, however many rows it has: counting rows would bias the
    baseline towards trajectories of many turns. Its reward is the sum of what its rows
    earned, because the reward of an episode is paid once, on one of its rows or in
    parts. A trajectory that lacks the reward of any of its rows has none, and is no
    member.

    Attributes:
        size: float64 [trajectories], number of members of each trajectory's group.
        is_member: bool [trajectories], whether a trajectory has a reward.
        reward: float64 [trajectories], sum over the rows that have one.
        mean: float64 [trajectories], mean reward of each trajectory's group.
        deviation: float64 [trajectories], reward of each member minus the mean of its
            group; 0 for a trajectory that is no member.
        number_of_rows: int64 [rows], the number of each row's trajectory, in the order
            of their ids.
        group: int64 [trajectories], the number of each trajectory's group.
    """

    def __init__(
        self, rewards: Float32, group: Int64, valid: Bool, trajectory: Int64 | None
    ) -> None:
        self.number_of_rows, first_row = _number_trajectories(len(rewards), trajectory)
        self._count = len(first_row)
        assert np.array_equal(group[first_row][self.number_of_rows], group), (
            "the rows of a trajectory answer one prompt"
        )

        row_rewards = np.where(valid, rewards, 0).astype(np.float64)
        self.reward = self.of_trajectories(row_rewards)
        self.is_member: Bool = complete_trajectories(valid, trajectory)[first_row]

        # GroupMembers of trajectories, numbered from 0.
        _, group_number = np.unique(group[first_row], return_inverse=True)
        self.group: Int64 = group_number.reshape(-1)
        self.size = self.sum(np.ones(self._count))
        self.mean = self.sum(self.reward) / np.maximum(self.size, 1)
        deviation = np.where(self.is_member, self.reward - self.mean, 0)

        # Sums of float32 parts that should be equal differ in their last digits.
        size = np.maximum(self.sum(self.reward**2), self.size * SMALL**2)
        is_rounding = self.sum(deviation**2) <= RESOLUTION * size
        self.deviation: Float64 = np.where(is_rounding, 0, deviation)

    def sum(self, values: Float64) -> Float64:
        """Return the sum over the members of each trajectory's group.

        Args:
            values: float64 [trajectories].

        Returns:
            float64 [trajectories].
        """
        member_values = np.where(self.is_member, values, 0)
        return _sums(member_values, self.group, len(values))[self.group]

    @property
    def std(self) -> Float64:
        """Sample standard deviation of each trajectory's group (n - 1).

        It is float64 [trajectories], and 0 in a group of one member.
        """
        sum_of_squares = self.sum(self.deviation**2)
        std: Float64 = np.sqrt(sum_of_squares / np.maximum(self.size - 1, 1))
        return std

    def std_of_step(self, values: Float64) -> float:
        """Return the sample standard deviation over all members; 0 for fewer than two.

        Args:
            values: float64 [trajectories].
        """
        members = values[self.is_member]
        return float(members.std(ddof=1)) if len(members) > 1 else 0.0

    @property
    def has_spread(self) -> Bool:
        """Whether members of a trajectory's group differ, bool [trajectories]."""
        # Not `> 0`, which would hide a reward that is NaN.
        spread: Bool = self.sum(self.deviation**2) != 0
        return spread

    def best_of_others(self) -> Float64:
        """Return the best reward of the group's other members.

        Returns:
            float64 [trajectories]; that of the member itself where there are no others,
            0 for a trajectory that is no member.
        """
        # By group, best first: the second of a group is the best one beside the first.
        ranked = np.where(self.is_member, self.reward, -np.inf)
        order = np.lexsort((-ranked, self.group))
        begins = np.flatnonzero(np.diff(self.group[order], prepend=-1))
        best = order[begins]
        second = order[np.minimum(begins + 1, len(order) - 1)]

        others = self.reward[best][self.group]
        has_others = self.size[best] > 1
        others[best] = np.where(has_others, self.reward[second], self.reward[best])
        return np.where(self.is_member, others, 0)

    def first_of_groups(self, key: Float64) -> Int64:
        """Return the member of each group with the smallest key, int64 [groups].

        Of equal ones it is the one with the smallest id. A group without members has
        one of its other trajectories.

        Args:
            key: float64 [trajectories].
        """
        order = np.lexsort((np.where(self.is_member, key, np.inf), self.group))
        first: Int64 = order[np.flatnonzero(np.diff(self.group[order], prepend=-1))]
        return first

    def of_trajectories(self, row_values: Float64) -> Float64:
        """Return the sum over the rows of each trajectory, float64 [trajectories].

        Args:
            row_values: float64 [rows].
        """
        return _sums(row_values, self.number_of_rows, self._count)

    def to_rows(self, values: Float64) -> Float32:
        """Return the value of each row's trajectory, float32 [rows].

        It is 0 for a trajectory that is no member, and NaN for all members of a group
        in which a reward is not finite, whatever was made of it.
        """
        # A mean is finite exactly if all rewards of its group are.
        members = np.where(np.isfinite(self.mean), values, np.nan)
        everyone = np.where(self.is_member, members, 0)
        return everyone[self.number_of_rows].astype(np.float32)


@overload
def is_last_of_group(trajectory_id: int, group_size: int) -> bool: ...
@overload
def is_last_of_group(trajectory_id: Int64, group_size: int) -> Bool: ...
def is_last_of_group(trajectory_id: int | Int64, group_size: int) -> bool | Bool:
    """Return whether a trajectory is its group's last, which ReMax decodes greedily.

    Args:
        trajectory_id: A trajectory's id, or int64 [rows].
        group_size: Trajectories of a group.
    """
    return trajectory_id % group_size == group_size - 1


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


def sums_on_rows(values: Float32, trajectory: Int64) -> Float64:
    """Return for each row the sum over all rows of its trajectory, float64 [rows].

    Args:
        values: float32 [rows].
        trajectory: Number of each row's trajectory, int64 [rows].
    """
    number, first_row = _number_trajectories(len(values), trajectory)
    trajectory_sums = _sums(values.astype(np.float64), number, len(first_row))
    return trajectory_sums[number]


def sum_of_normalised(
    parts: Sequence[RewardPart],
    group: Int64,
    valid: Bool,
    trajectory: Int64 | None = None,
    epsilon: float = EPSILON,
) -> Float64:
    """Return the weighted sum of parts that are normalised in their groups.

    With a_k = (part k - group mean) / (group standard deviation + epsilon), it is the
    weighted sum of all a_k, and 0 where they cancel but for rounding. A member without
    a part is left out of that part's mean and deviation, and the part adds nothing to
    its sum.

    Args:
        parts: Weights and rewards; NaN where a row has none.
        group: int64 [rows].
        valid: bool [rows].
        trajectory: int64 [rows]; None for one per row.

    Returns:
        float64 [trajectories]; its mean over the members of a group is 0.
    """
    _, first_row = _number_trajectories(len(valid), trajectory)
    total = np.zeros(len(first_row))
    magnitude = np.zeros(len(first_row))
    for weight, values in parts:
        has_part = valid & ~np.isnan(values)
        part_members = GroupMembers(values, group, has_part, trajectory)
        term = weight * part_members.deviation / (part_members.std + epsilon)
        total += term
        magnitude += np.abs(term)
    return without_rounding(total, magnitude)


def has_spread(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    trajectory: Int64 | None = None,
    parts: Sequence[RewardPart] | None = None,
) -> Bool:
    """Return whether members of each row's group differ by more than rounding.

    It is by this rule that baselines, dynamic sampling, replay and metrics find groups
    that teach nothing. Arguments are those of `fraction_without_spread`.

    Returns:
        bool [rows].
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    spread = _has_spread(groups, group, valid, trajectory, parts)
    return spread[groups.number_of_rows]


def _has_spread(
    groups: GroupMembers,
    group: Int64,
    valid: Bool,
    trajectory: Int64 | None,
    parts: Sequence[RewardPart] | None,
) -> Bool:
    """Return whether members of a trajectory's group differ, bool [trajectories]."""
    if parts is None:
        return groups.has_spread
    total = sum_of_normalised(parts, group, valid, trajectory)
    # Its mean over a group is 0. Not `> 0`, which would hide a part that is NaN.
    differs: Bool = groups.sum(total**2) != 0
    return differs


def fraction_without_spread(
    rewards: Float32,
    group: Int64,
    valid: Bool,
    trajectory: Int64 | None = None,
    parts: Sequence[RewardPart] | None = None,
) -> float:
    """Return the share of groups in which all members have the same reward.

    A group with a single member counts as one of them, and a group without members is
    left out.

    Args:
        rewards: float32 [rows].
        group: Number of each row's group, int64 [rows].
        valid: Whether a row has a reward, bool [rows].
        trajectory: Number of each row's trajectory, int64 [rows]; None for one per row.
        parts: What the estimator compares in place of the rewards, as `gdpo` does: the
            sum of these, each normalised in its group. None: it compares rewards.

    Returns:
        The share; NaN if no group has a member.
    """
    groups = GroupMembers(rewards, group, valid, trajectory)
    # A group counts once, however many members it has.
    members = groups.is_member / np.maximum(groups.size, 1)
    num_groups = float(members.sum())
    if not num_groups:
        return math.nan
    spread = _has_spread(groups, group, valid, trajectory, parts)
    return float(members[~spread].sum()) / num_groups
