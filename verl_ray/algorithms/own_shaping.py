"""Shaping of rewards by a function of a user's own, in place of the rewards of lengths.

Invariant: that of `own_functions.py`. A response without a score stays without one.
Deliberately not here: the package's own rewards of lengths (`length_shaping.py`), and
scores (`verl_ray/rewards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ray.algorithms.declaration import Declaration, Setting
from verl_ray.algorithms.estimators import RewardPart
from verl_ray.algorithms.own_functions import (
    Choices,
    OwnFunction,
    as_numbers_of_valid_rows,
    keywords_of,
)
from verl_ray.config.function_specs import in_words
from verl_ray.config.section import PositiveFloat
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Bool, Float32

LENGTH_SETTINGS: Mapping[Setting, object] = {
    Setting("overlong_share", PositiveFloat, "See `AlgorithmConfig`."): 0.2,
    Setting("brevity", PositiveFloat, "See `AlgorithmConfig`."): 0.1,
    Setting("efficiency", PositiveFloat, "See `AlgorithmConfig`."): 0.1,
}
"""Settings that a function may read, with usual values: those of rewards of lengths."""

_COLUMNS = ("trajectory", "length", "truncated", "parts", "max_tokens")


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
        parts: What the scores are the weighted sum of.
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
