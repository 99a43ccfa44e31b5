"""The weight of each token's loss: every aggregation is one weight per row of a mini-batch, in NumPy.

Invariant: the weights of a mini-batch are computed once, from its global totals, before its rows are split. So the
sum over any micro-batches, ranks and orders is the same, and no part of a mini-batch needs to know the others.
Not here: the sums themselves (`aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.config.section import Positive
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Float32

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Totals:
    """Of the whole mini-batch, over all ranks and micro-batches."""

    tokens: int
    rows: int
    """Those with at least one response token."""
    horizon: int | None


def token_mean(tokens: Int64, totals: Totals) -> Float64:
    """Every token weighs the same: DAPO (arXiv:2503.14476, eq. 8)."""
    return np.full(len(tokens), 1 / max(totals.tokens, 1))


def token_sum(tokens: Int64, totals: Totals) -> Float64:
    """Every token weighs 1."""
    return np.ones(len(tokens))


def seq_mean_token_sum(tokens: Int64, totals: Totals) -> Float64:
    """A response is one action, whose log-prob is the sum over its tokens; the mean over responses: RLOO
    (arXiv:2402.14740)."""
    return np.full(len(tokens), 1 / max(totals.rows, 1))


def seq_mean_token_sum_norm(tokens: Int64, totals: Totals) -> Float64:
    """The same, divided by a constant length: Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    assert totals.horizon is not None, "the configuration requires aggregation_horizon with seq_mean_token_sum_norm"
    return np.full(len(tokens), 1 / (max(totals.rows, 1) * totals.horizon))


def seq_mean_token_mean(tokens: Int64, totals: Totals) -> Float64:
    """The mean over responses of the mean over their tokens: GRPO (arXiv:2402.03300, eq. 3)."""
    return 1 / (max(totals.rows, 1) * tokens)


@dataclass(frozen=True, kw_only=True)
class Aggregation(Declaration):
    """How many rows weigh: the response tokens of each, all at least 1, int64 [rows] -> weights float64 [rows]."""

    function: Callable[[Int64, Totals], Float64]


HORIZON = Setting("aggregation_horizon", Positive, "Constant length of seq_mean_token_sum_norm.")

AGGREGATIONS = by_name(
    Aggregation(name="token_mean", paper="DAPO (arXiv:2503.14476)", function=token_mean),
    Aggregation(name="token_sum", paper="the sum over tokens", function=token_sum),
    Aggregation(name="seq_mean_token_sum", paper="RLOO (arXiv:2402.14740)", function=seq_mean_token_sum),
    Aggregation(
        name="seq_mean_token_sum_norm",
        paper="Dr. GRPO (arXiv:2503.20783)",
        function=seq_mean_token_sum_norm,
        reads={HORIZON: "${rollout.max_response_tokens}"},
    ),
    Aggregation(name="seq_mean_token_mean", paper="GRPO (arXiv:2402.03300)", function=seq_mean_token_mean),
)


def row_weights(
    mode: str, tokens_per_row: Int64, *, total_tokens: int, total_rows: int, horizon: int | None
) -> Float32:
    """The weight of each token loss of a row, float32 [rows]; 0 for a row without response tokens.

    `mode` is a name in `AGGREGATIONS`; `tokens_per_row` int64 [rows] counts the response tokens of the rows at hand;
    `total_tokens` and `total_rows` (rows with at least one response token) are those of the whole mini-batch, over all
    ranks and micro-batches. `horizon` is the constant length of seq_mean_token_sum_norm, and unused elsewhere.
    """
    filled = tokens_per_row > 0
    weights = np.zeros(len(tokens_per_row))
    weights[filled] = AGGREGATIONS[mode].function(tokens_per_row[filled], Totals(total_tokens, total_rows, horizon))
    return weights.astype(np.float32)
