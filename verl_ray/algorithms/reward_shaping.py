"""Shaping of rewards: what lengths add to scores, or a user's function in its place.

Functions take one number per row, in NumPy; those of this file are pure. Invariant: a
response without a score stays without one, and one that is no member of its group gets
nothing for its length.
Deliberately not here: the sum of several graders' scores (`verl_ray/rewards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.estimators import RewardPart
from verl_ray.algorithms.own_functions import (
    Choices,
    OwnFunction,
    as_numbers_of_valid_rows,
    keywords_of,
)
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Float32
from verl_ray.ops.masked import EQUAL
from verl_ray.settings.function_specs import in_words
from verl_ray.settings.section import PositiveFloat

# ------------------------------------------------------------------- rewards of lengths


@dataclass(frozen=True, kw_only=True)
class LengthReward(Declaration):
    """A reward of the length of a response among those of its group.

    Its name is the key of `algorithm` that holds its weight.

    Attributes:
        function: Maps (score, valid, length, group), [rows] each, to the reward
            before its weight, float32 [rows]; 0 where valid is False.
    """

    function: Callable[[Float32, Bool, Int64, Int64], Float32]


def overlong_penalty(length: Int64, max_tokens: int | Int64, share: float) -> Float32:
    """Return 0 up to the last share of the limit, from there linearly down to -1.

    Source: DAPO (arXiv:2503.14476, eq. 13), whose limit is 20,480 tokens, the last
    4,096 of which are penalised: a share of 0.2.
    """
    buffer = share * max_tokens
    beyond = length - (max_tokens - buffer)
    return -(beyond / buffer).clip(0, 1).astype(np.float32)


def brevity(score: Float32, valid: Bool, length: Int64, group: Int64) -> Float32:
    """Return 0.5 - (length - shortest) / (longest - shortest), within each group.

    Where the score is not positive, it is at most 0: a wrong response gains nothing by
    being short. It is 0 where all lengths of a group are equal.

    Source: Kimi k1.5 (arXiv:2501.12599, section 2.3.3), whose right and wrong responses
    are those of positive and other scores here.
    """
    number, count = _numbered(group)
    shortest = np.full(count, np.inf)
    longest = np.full(count, -np.inf)
    np.minimum.at(shortest, number[valid], length[valid])
    np.maximum.at(longest, number[valid], length[valid])

    spread = (longest - shortest)[number]
    has_spread = valid & (spread > 0)
    place = np.where(has_spread, length - shortest[number], 0)
    reward = 0.5 - place / np.where(has_spread, spread, 1)
    reward = np.where(score > 0, reward, np.minimum(reward, 0))
    return np.where(has_spread, reward, 0).astype(np.float32)


BREVITY = LengthReward(
    name="brevity", paper="Kimi k1.5 (arXiv:2501.12599)", function=brevity
)


def efficiency(score: Float32, valid: Bool, length: Int64, group: Int64) -> Float32:
    """Return score * max(1 - length / mean length of right ones, 0) of right ones.

    Right ones have the best score of their group, if that is positive. So the reward of
    a right response grows by what it is shorter than the mean, at most by itself, and
    none becomes smaller.

    Source: "efficiency" of prime-rl's length penalty by tokens
    (src/prime_rl/orchestrator/algo/advantage.py), whose weight is 1.
    """
    number, count = _numbered(group)
    best = np.full(count, -np.inf)
    np.maximum.at(best, number[valid], score[valid])
    right = valid & (score > 0) & (score >= (1 - EQUAL) * best[number])

    tokens = np.bincount(number[right], weights=length[right], minlength=count)
    members = np.bincount(number[right], minlength=count)
    mean = (tokens / np.maximum(members, 1))[number]
    # Responses of no tokens are all as short as each other.
    has_mean = right & (mean > 0)
    saved = np.where(has_mean, 1 - length / np.where(has_mean, mean, 1), 0)
    gained = np.where(right, score, 0) * saved.clip(min=0)
    return np.asarray(gained, np.float32)


EFFICIENCY = LengthReward(
    name="efficiency", paper="prime-rl, length penalty", function=efficiency
)


def _numbered(group: Int64) -> tuple[Int64, int]:
    """Return the number of each row's group from 0, int64 [rows], and their count."""
    _, number = np.unique(group, return_inverse=True)
    return number.reshape(-1), int(number.max(initial=-1)) + 1


LENGTH_REWARDS = by_name(BREVITY, EFFICIENCY)
"""Rewards of lengths within a group, by the keys of their weights."""

LENGTH_SETTINGS: Mapping[Setting, object] = {
    Setting("overlong_share", PositiveFloat, "See `AlgorithmConfig`."): 0.2,
    Setting("brevity", PositiveFloat, "See `AlgorithmConfig`."): 0.1,
    Setting("efficiency", PositiveFloat, "See `AlgorithmConfig`."): 0.1,
}
"""Settings that a function may read, with usual values: those of rewards of lengths."""


# --------------------------------------------------------------- a function of a user's


@dataclass(frozen=True, eq=False)
class ScoredResponses:
    """Scored responses as a shaping function sees them; [rows] each unless noted.

    Attributes:
        score: float32, NaN where there is none.
        group: int64.
        valid: bool; False: the response has no score, or is no member of its group: it
            was aborted, or cut with algorithm.truncated=drop.
        trajectory: int64.
        length: int64, response tokens.
        truncated: bool, whether the response was cut at the length limit.
        parts: What the scores are the weighted sum of; NaN where a grader left a
            response to others.
        max_tokens: The limit on the length of a response, one number.
    """

    score: Float32
    group: Int64
    valid: Bool
    trajectory: Int64
    length: Int64
    truncated: Bool
    parts: Sequence[RewardPart]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class OwnShaping(Declaration):
    """The function of `algorithm.shaping`.

    Attributes:
        function: Takes (score, group, valid), what `columns` names and its settings as
            keyword arguments. Returns one reward per row.
        columns: Names of further arguments: any of trajectory, length, truncated,
            parts and max_tokens.
    """

    function: Callable[..., Float32]
    columns: frozenset[str]

    def shape(self, algorithm: object, responses: ScoredResponses) -> Float32:
        """Return the rewards, float32 [rows]; scores that are not valid stay as is.

        Args:
            algorithm: The section `algorithm` of the configuration.
            responses: Responses of whole groups.

        Raises:
            DataError: The function fails, or returns something else than one number
                per row, finite where valid.
        """
        valid = responses.valid

        # Scores that failed are NaN, which no function should have to know of.
        def cleared(values: Float32) -> Float32:
            return np.where(valid, values, 0).astype(np.float32)

        parts = [(weight, cleared(values)) for weight, values in responses.parts]
        arguments: dict[str, Any] = {
            name: parts if name == "parts" else getattr(responses, name)
            for name in self.columns
        }
        arguments |= self.settings(algorithm)
        score = responses.score
        shaped = self.function(cleared(score), responses.group, valid, **arguments)
        return np.where(valid, shaped, score).astype(np.float32)


_COLUMNS = ("trajectory", "length", "truncated", "parts", "max_tokens")


def _own_shaping(spec: str, _: Mapping[Setting, object]) -> OwnShaping:
    positional = ("score", "group", "valid")
    reads, columns = keywords_of(spec, positional, LENGTH_SETTINGS, _COLUMNS)
    return OwnShaping(
        name=in_words(spec),
        paper="your own",
        function=OwnFunction(spec, as_numbers_of_valid_rows),
        reads=reads,
        columns=frozenset(columns),
    )


OWN_SHAPINGS: Choices[OwnShaping] = Choices({}, _own_shaping)
"""The functions of users by their specs; the package has none of its own.

Raises OwnFunctionMistake for one that cannot shape rewards."""
