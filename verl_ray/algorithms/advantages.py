"""How much better than expected each response, or each token, was: from rewards to advantages, in NumPy.

Invariant: a pure function of its rows; the order of rows changes nothing but the order of the answer, and nothing is
ever divided by a spread that is only rounding. Row functions see one number per row; token functions see the response
tokens of many rows laid end to end, row r at [offsets[r], offsets[r + 1]). No function loops over rows or tokens.
Not here: the rewards themselves, and whitening over a step (`ops/masked.py`), which needs all shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.config.section import Fraction
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import Bool, Float32
from verl_ray.ops.masked import RESOLUTION

Float64 = NDArray[np.float64]

# ------------------------------------------------------------------------------------------------------- row level


class _Groups:
    """Trajectories as members of their groups, and what a statistic of the members says to each row.

    A trajectory is one member, however many rows it has: counting rows would bias the baseline towards trajectories of
    many turns. Its reward is the sum of what its rows earned, because the reward of an episode is paid once, on one of
    its rows or in parts. A trajectory that lacks the reward of any of its rows has none, and is no member.
    """

    def __init__(self, rewards: Float32, group: Int64, valid: Bool, trajectory: Int64 | None) -> None:
        self._row, first = _members(len(rewards), trajectory)
        assert np.array_equal(group[first][self._row], group), "the rows of a trajectory answer one prompt"
        members = len(first)

        earned = np.where(valid, rewards, 0).astype(np.float64)
        reward = _sums(earned, self._row, members)
        self._complete = complete(valid, trajectory)[first]

        self._group: Int64 = np.unique(group[first], return_inverse=True)[1].reshape(-1)
        self.size = self.sum(np.ones(members))
        count = np.maximum(self.size, 1)
        deviation = np.where(self._complete, reward - self.sum(reward) / count, 0)
        # Sums of float32 parts that should be equal differ in their last digits.
        is_rounding = self.sum(deviation**2) <= RESOLUTION * self.sum(reward**2)
        self.deviation: Float64 = np.where(is_rounding, 0, deviation)

    def sum(self, values: Float64) -> Float64:
        """[members]: the sum of `values` [members] over the members of the trajectory's group."""
        counted = np.where(self._complete, values, 0)
        return _sums(counted, self._group, len(values))[self._group]

    def to_rows(self, values: Float64) -> Float32:
        """float32 [rows]: to every row the value of its trajectory."""
        return values[self._row].astype(np.float32)


def _members(rows: int, trajectory: Int64 | None) -> tuple[Int64, Int64]:
    """The number of each row's trajectory, [rows] in [0, members), and the first row of each trajectory, [members]."""
    if trajectory is None:
        return np.arange(rows), np.arange(rows)
    _, first, row = np.unique(trajectory, return_index=True, return_inverse=True)
    return row.reshape(-1), first


def _sums(values: Float64, place: Int64, count: int) -> Float64:
    """[count]: the sums of the values at each place."""
    return cast(Float64, np.bincount(place, weights=values, minlength=count))  # its stub says integers


def complete(valid: Bool, trajectory: Int64 | None) -> Bool:
    """bool [rows]: every row of the row's trajectory is valid, so that the trajectory has a reward."""
    row, first = _members(len(valid), trajectory)
    lacking = _sums((~valid).astype(np.float64), row, len(first))
    whole: Bool = lacking == 0
    return whole[row]


def grpo(
    rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None, epsilon: float = 1e-6
) -> Float32:
    """(reward - group mean) / (group standard deviation + epsilon), float32 [rows].

    `rewards` float32 [rows], `group` int64 [rows], the same for all rows of a trajectory, `valid` bool [rows] (False:
    no reward; it may be NaN), `trajectory` int64 [rows], or None where every row is a trajectory of its own.

    Members of a group are trajectories. The reward of one is the sum over its rows, and each of its rows gets its
    advantage: rewards [0, 1, 0, 0] of trajectories [0, 0, 1, 2] are three members with rewards 1, 0 and 0. A trajectory
    with a row that is not valid stays out of the statistics, and all of its rows get 0 (`complete`). Exactly 0 in a
    group of one member, or of rewards that are equal but for rounding. A valid reward that is NaN makes the whole group
    NaN.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2. The paper leaves the kind of standard deviation open; here it is the
    sample one (n - 1), as usual in this field. epsilon is an addition: it fades out differences below float32 noise.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    std = np.sqrt(groups.sum(groups.deviation**2) / np.maximum(groups.size - 1, 1))
    return groups.to_rows(groups.deviation / (std + epsilon))


def subtract_group_mean(rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None) -> Float32:
    """reward - group mean, float32 [rows]; arguments and members as for `grpo`. 0 in a group of one member.

    Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without the division by the standard deviation. It is also the first
    half of REINFORCE++-baseline (arXiv:2501.03262), whose second half is algorithm.whiten_advantages.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    return groups.to_rows(groups.deviation)


def rloo(rewards: Float32, group: Int64, valid: Bool, *, trajectory: Int64 | None = None) -> Float32:
    """reward - mean reward of the group's other members, float32 [rows]; arguments and members as for `grpo`.

    RLOO (arXiv:2402.14740), eq. 8. It equals n / (n - 1) * (reward - group mean). Deviation: in a group of one member
    there are no others, and the advantage is 0 rather than the reward.
    """
    groups = _Groups(rewards, group, valid, trajectory)
    return groups.to_rows(groups.deviation * groups.size / np.maximum(groups.size - 1, 1))


# ----------------------------------------------------------------------------------------------------- token level


def gae(
    rewards: Float32, values: Float32, offsets: Int64, bootstrap: Float32, gamma: float, lam: float
) -> tuple[Float32, Float32]:
    """Generalized advantage estimation: (advantages, returns), float32 [T] each, computed in float64.

    `rewards`, `values` float32 [T] over response tokens, `values[t]` the value before token t; `offsets` int64
    [rows + 1]; `bootstrap` float32 [rows] the value after the last token, 0 where the response ended by itself.
    With delta_t = r_t + gamma * v_{t+1} - v_t, A_t = sum over k of (gamma * lam)^k * delta_{t+k}, and return = A + v.

    Source: arXiv:1506.02438, eqs. 11, 12 and 16.
    """
    baseline = values.astype(np.float64)
    after = np.empty_like(baseline)  # the value after each token
    after[:-1] = baseline[1:]
    filled = offsets[1:] > offsets[:-1]
    after[offsets[1:][filled] - 1] = bootstrap[filled]
    after *= gamma
    after += rewards
    after -= baseline
    advantages = _discounted_sums(after, offsets, gamma * lam)
    return advantages.astype(np.float32), (advantages + baseline).astype(np.float32)


def discounted_returns(rewards: Float32, offsets: Int64, gamma: float) -> Float32:
    """G_t = r_t + gamma * G_{t+1} within each row, float32 [T], computed in float64; arguments as for `gae`.

    REINFORCE++ (arXiv:2501.03262) takes these as advantages, with the divergence from the reference charged in the
    rewards, and whitens them over the step (algorithm.whiten_advantages).
    """
    return _discounted_sums(rewards.astype(np.float64), offsets, gamma).astype(np.float32)


_BLOCK = 16
"""Tokens summed by one row of a matrix product. Measured from 8 to 128: a million tokens take 12 to 18 ms on one
thread with 8 or 16, in long and in short rows; larger blocks waste work on padding and on the product's zeros."""


def _discounted_sums(x: Float64, offsets: Int64, decay: float) -> Float64:
    """y[t] = x[t] + decay * y[t + 1] within each row, y = 0 after its last token; 0 <= decay <= 1.

    Rows are cut into blocks. Inside a block y is a product with a triangular Toeplitz matrix; what a block must add is
    the y at the start of the next block, and those starts obey the same recurrence with decay^block: so this calls
    itself on them, a 1/block of the size, until every row is one block.
    """
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    block = min(_BLOCK, longest)
    if longest <= 1:
        return x.copy()
    powers = decay ** np.arange(block + 1, dtype=np.float64)
    ahead = np.arange(block)[:, None] - np.arange(block)[None, :]
    toeplitz = np.where(ahead >= 0, powers[np.maximum(ahead, 0)], 0)  # [later token, token] -> weight

    blocks_per_row = -(-lengths // block)
    blocks = offsets_of(blocks_per_row)
    if bool(np.all(lengths == blocks_per_row * block)):
        place = None  # rows of whole blocks lie where they should
        padded = x.reshape(-1, block)
    else:
        place = np.arange(len(x)) + np.repeat(blocks[:-1] * block - offsets[:-1], lengths)
        flat = np.zeros(int(blocks[-1]) * block)
        flat[place] = x
        padded = flat.reshape(-1, block)
    sums: Float64 = padded @ toeplitz
    starts = _discounted_sums(sums[:, 0], blocks, float(powers[block]))
    following = np.empty_like(starts)  # the start of the next block, 0 after a row's last
    following[:-1] = starts[1:]
    following[blocks[1:] - 1] = 0  # the end of an empty row is that of the row before it, or of all
    sums += following[:, None] * powers[block:0:-1]
    return sums.reshape(-1) if place is None else sums.reshape(-1)[place]


# ------------------------------------------------------------------------------------------------------- by name


GAMMA = Setting("gamma", Fraction, "Discount.")
LAM = Setting("lam", Fraction, "GAE's lambda.")


@dataclass(frozen=True, kw_only=True)
class GroupBaseline(Declaration):
    """One advantage per row, against the other responses to the same prompt."""

    function: Callable[..., Float32]
    """(rewards, group, valid, trajectory=..., and its settings), as `grpo`."""
    forgets_scale: bool = False
    """It divides by the spread of the group's rewards."""
    level: ClassVar[Literal["row"]] = "row"
    needs_group: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CriticBaseline(Declaration):
    """One advantage per token, against a critic's values; also returns what the critic should have said."""

    function: Callable[..., tuple[Float32, Float32]]
    """(rewards, values, offsets, bootstrap, and its settings), as `gae`."""
    forgets_scale: ClassVar[bool] = False
    level: ClassVar[Literal["token"]] = "token"
    needs_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class NoBaseline(Declaration):
    """One advantage per token, from its rewards alone."""

    function: Callable[..., Float32]
    """(rewards, offsets, and its settings), as `discounted_returns`."""
    forgets_scale: ClassVar[bool] = False
    level: ClassVar[Literal["token"]] = "token"
    needs_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False


Advantage = GroupBaseline | CriticBaseline | NoBaseline

ADVANTAGES: dict[str, Advantage] = by_name(
    CriticBaseline(name="gae", paper="GAE (arXiv:1506.02438)", function=gae, reads={GAMMA: 1.0, LAM: 0.95}),
    GroupBaseline(name="grpo", paper="DeepSeekMath (arXiv:2402.03300)", function=grpo, forgets_scale=True),
    GroupBaseline(name="dr_grpo", paper="Dr. GRPO (arXiv:2503.20783)", function=subtract_group_mean),
    GroupBaseline(name="rloo", paper="RLOO (arXiv:2402.14740)", function=rloo),
    NoBaseline(
        name="reinforce_plus_plus",
        paper="REINFORCE++ (arXiv:2501.03262)",
        function=discounted_returns,
        reads={GAMMA: 1.0},
    ),
    GroupBaseline(
        name="reinforce_plus_plus_baseline", paper="REINFORCE++ (arXiv:2501.03262)", function=subtract_group_mean
    ),
)
