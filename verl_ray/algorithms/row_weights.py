"""The weight of each token's loss: one number per row of a mini-batch, in NumPy.

Where a trajectory has several rows, the caller counts it as one row that has the tokens
of all of them, so "rows" are trajectories here.

Invariant: the weights of a mini-batch are computed once, from its global totals, before
its rows are split. So the sum over any micro-batches, ranks and orders is the same, and
no part of a mini-batch needs to know the others. Deliberately not here: the sums
themselves (`aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Float32
from verl_ray.settings.section import Positive

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class MiniBatchTotals:
    """Totals of a mini-batch over all ranks and micro-batches.

    Attributes:
        tokens: Number of response tokens.
        rows: Number of rows with at least one response token.
        horizon: Constant length of seq_mean_token_sum_norm; None with others.
    """

    tokens: int
    rows: int
    horizon: int | None


# Each function below takes the response tokens of each row, all at least 1, int64
# [rows], and returns the weights of the rows, float64 [rows].


def token_mean(tokens: Int64, totals: MiniBatchTotals) -> Float64:
    """Give every token the same weight: the mean over tokens.

    DAPO (arXiv:2503.14476), eq. 8.
    """
    return np.full(len(tokens), 1 / max(totals.tokens, 1))


def token_sum(tokens: Int64, totals: MiniBatchTotals) -> Float64:
    """Give every token the weight 1: the sum over tokens."""
    return np.ones(len(tokens))


def seq_mean_token_sum(tokens: Int64, totals: MiniBatchTotals) -> Float64:
    """Take the mean over responses of the sum over their tokens.

    A response is one action, whose log-prob is the sum over its tokens: RLOO
    (arXiv:2402.14740).
    """
    return np.full(len(tokens), 1 / max(totals.rows, 1))


def seq_mean_token_sum_norm(tokens: Int64, totals: MiniBatchTotals) -> Float64:
    """Divide the mean over responses of their token sums by a constant length.

    Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    assert totals.horizon is not None, (
        "the configuration requires aggregation_horizon with seq_mean_token_sum_norm"
    )
    return np.full(len(tokens), 1 / (max(totals.rows, 1) * totals.horizon))


def seq_mean_token_mean(tokens: Int64, totals: MiniBatchTotals) -> Float64:
    """Take the mean over responses of the mean over their tokens.

    GRPO (arXiv:2402.03300), eq. 3.
    """
    return 1 / (max(totals.rows, 1) * tokens)


@dataclass(frozen=True, kw_only=True)
class Aggregation(Declaration):
    """A choice of `algorithm.aggregation`.

    Attributes:
        function: Maps the response tokens of each row, int64 [rows], all at least 1,
            and the totals to weights, float64 [rows].
        is_over_rows: True if the sum is over rows first, so that a value per row is
            counted once per row and not once per token of all rows.
    """

    function: Callable[[Int64, MiniBatchTotals], Float64]
    is_over_rows: bool = True


HORIZON = Setting(
    "aggregation_horizon", Positive, "Constant length of seq_mean_token_sum_norm."
)

AGGREGATIONS = by_name(
    Aggregation(
        name="token_mean",
        paper="DAPO (arXiv:2503.14476)",
        function=token_mean,
        is_over_rows=False,
    ),
    Aggregation(
        name="token_sum",
        paper="the sum over tokens",
        function=token_sum,
        is_over_rows=False,
    ),
    Aggregation(
        name="seq_mean_token_sum",
        paper="RLOO (arXiv:2402.14740)",
        function=seq_mean_token_sum,
    ),
    Aggregation(
        name="seq_mean_token_sum_norm",
        paper="Dr. GRPO (arXiv:2503.20783)",
        function=seq_mean_token_sum_norm,
        reads={HORIZON: "${rollout.max_response_tokens}"},
    ),
    Aggregation(
        name="seq_mean_token_mean",
        paper="GRPO (arXiv:2402.03300)",
        function=seq_mean_token_mean,
    ),
)


def row_weights(
    mode: str,
    tokens_per_row: Int64,
    *,
    total_tokens: int,
    total_rows: int,
    horizon: int | None,
) -> Float32:
    """Return the weight of each token loss of a row; 0 for a row without response.

    Args:
        mode: A name in `AGGREGATIONS`.
        tokens_per_row: int64 [rows], response tokens of each row at hand.
        total_tokens: Response tokens of the whole mini-batch, over all ranks and
            micro-batches.
        total_rows: Rows of the whole mini-batch with at least one response token.
        horizon: Constant length of seq_mean_token_sum_norm; unused with others.

    Returns:
        float32 [rows].
    """
    totals = MiniBatchTotals(total_tokens, total_rows, horizon)
    # A row without response tokens has no loss, and a mean over them would divide by 0.
    has_response = tokens_per_row > 0

    weights = np.zeros(len(tokens_per_row))
    aggregation = AGGREGATIONS[mode]
    weights[has_response] = aggregation.function(tokens_per_row[has_response], totals)
    return weights.astype(np.float32)
