"""Tokens that a loss treats apart, chosen from the whole mini-batch before it learns.

Scores are made of what is stored: advantages, and log-probs from before the step. So
the choice depends on neither micro-batches nor ranks, and random numbers follow from a
seed and the token's place in its row.

Invariant: a choice depends on the tokens that are learned from, and on no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Float32
from verl_ray.ops.order_statistics import (
    Float64,
    Total,
    UInt64,
    end_of_prefix,
    keys_of,
    kth_largest,
)


@dataclass(frozen=True)
class SelectableTokens:
    """The tokens of this rank that a mini-batch learns from, [n] each.

    Attributes:
        advantages: float32.
        log_probs: float32, of the policy before the step.
        rollout_log_probs: float32, of the sampler.
        entropy: float32, of the policy before the step; None if it is not needed.
        random: uint64, a number of its own for each token.
        total: Sums an array over all ranks.
    """

    advantages: Float32
    log_probs: Float32
    rollout_log_probs: Float32
    entropy: Float32 | None
    random: UInt64
    total: Total

    @property
    def count(self) -> int:
        """The number of tokens of all ranks."""
        return int(self.total(np.array([len(self.advantages)]))[0])

    @property
    def ties(self) -> NDArray[np.uint32]:
        """The first halves of `random`, which decide between equal values."""
        return (self.random >> np.uint64(32)).astype(np.uint32)


def largest_entropy(tokens: SelectableTokens, *, share: float) -> Bool:
    """Choose the tokens with the largest entropy: a share of all, at least one.

    Source: Wang et al. (arXiv:2506.01939, eq. 4), with a share of 0.2.
    """
    assert tokens.entropy is not None, "the log-probs come with entropies"
    keys = keys_of(tokens.entropy, tokens.ties)
    return _largest(keys, np.ones(len(keys), np.bool_), share, tokens)


def smallest_second_moment(tokens: SelectableTokens, *, second_moment: float) -> Bool:
    """Choose the tokens with the smallest squared log ratios, up to a mean.

    The ratio is that of the policy before the step to the sampler. Those that are not
    chosen have the largest squares: the fewest that bring the mean of the others down
    to `second_moment`.

    Source: M2PO (arXiv:2510.01161, algorithm 1), with 0.04. Deviation: log-probs are
    those before the step for each of its updates; there they are those of the policy
    that learns.
    """
    log_ratio = tokens.log_probs - tokens.rollout_log_probs
    squares = np.square(log_ratio)
    keys = keys_of(squares, tokens.ties)
    end = end_of_prefix(keys, squares.astype(np.float64), second_moment, tokens.total)
    if end is None:
        return np.ones(len(keys), np.bool_)
    chosen: Bool = keys < np.uint64(end)
    return chosen


def some_of_covariance(
    tokens: SelectableTokens, *, cov_share: float, cov_min: float, cov_max: float
) -> Bool:
    """Choose tokens at random whose covariance lies between two bounds.

    The covariance of a token is (A - mean A) * (log pi - mean log pi), with means over
    the mini-batch; as many are chosen as `cov_share` of all tokens, at least one.

    Source: Clip-Cov (arXiv:2505.22617, eqs. 10 and 11), with a share of 2e-4 between 1
    and 5. Deviations: log-probs are those before the step for each of its updates. The
    authors' code chooses among the tokens that PPO does not clip; here, as in eq. 11,
    it is among all.
    """
    covariance = _covariance(tokens)
    candidates = (covariance > cov_min) & (covariance < cov_max)
    return _largest(tokens.random, candidates, cov_share, tokens)


def largest_covariance(tokens: SelectableTokens, *, cov_share: float) -> Bool:
    """Choose the tokens with the largest covariance: a share of all, at least one.

    The covariance is that of `some_of_covariance`.

    Source: KL-Cov (arXiv:2505.22617, eqs. 12 and 13), with a share of 2e-4. Deviation:
    log-probs are those before the step for each of its updates.
    """
    keys = keys_of(_covariance(tokens).astype(np.float32), tokens.ties)
    return _largest(keys, np.ones(len(keys), np.bool_), cov_share, tokens)


def _covariance(tokens: SelectableTokens) -> Float64:
    advantages = tokens.advantages.astype(np.float64)
    log_probs = tokens.log_probs.astype(np.float64)
    sums = tokens.total(np.array([len(advantages), advantages.sum(), log_probs.sum()]))
    count = max(sums[0], 1)
    covariance: Float64 = (advantages - sums[1] / count) * (log_probs - sums[2] / count)
    return covariance


def _largest(
    keys: UInt64, candidates: Bool, share: float, tokens: SelectableTokens
) -> Bool:
    """Return where the candidates with the largest keys are, a share of all tokens."""
    k = max(int(share * tokens.count), 1)
    num_candidates = int(tokens.total(np.array([candidates.sum()]))[0])
    if num_candidates <= k:
        return candidates

    smallest = kth_largest(keys[candidates], k, tokens.total)
    chosen: Bool = candidates & (keys >= np.uint64(smallest))
    return chosen


def random_of_tokens(seed: Sequence[int], row: Int64, position: Int64) -> UInt64:
    """Return a random number per token that its place alone decides, uint64 [n].

    The tokens of a row have different ones. Two of 10^6 tokens have the same one with a
    probability of 3e-8.

    Args:
        seed: Numbers that name the mini-batch.
        row: int64 [n], the id of each token's row.
        position: int64 [n], its place in the row.
    """
    state = np.zeros(len(row), np.uint64)
    for number in seed:
        state = _mixed(state + np.uint64(number))
    state = _mixed(state + row.astype(np.uint64))
    return _mixed(state + position.astype(np.uint64))


def _mixed(state: UInt64) -> UInt64:
    """Return SplitMix64's output of each state (Steele et al., 2014)."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
