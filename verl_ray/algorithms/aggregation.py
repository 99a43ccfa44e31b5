"""How token losses become one number: every mode is one weight per row, loss = sum over t of weight[row(t)] * loss[t].

Invariant: the weights of a mini-batch are computed once, from its global totals, before its rows are split. So the
sum over any micro-batches, ranks and orders is the same, and no part of a mini-batch needs to know the others. What a
token of weight 0 holds reaches neither the sum nor a gradient, also where it is not finite.
Not here: the token losses (`losses.py`) and the sum over ranks (the engine).
"""

from __future__ import annotations

from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor

from verl_ray.config.algorithm import AggregationName
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Float32


def row_weights(
    mode: AggregationName, tokens_per_row: Int64, *, total_tokens: int, total_rows: int, horizon: int | None
) -> Float32:
    """The weight of each token loss of a row, float32 [rows]; 0 for a row without response tokens.

    `tokens_per_row` int64 [rows] counts the response tokens of the rows at hand; `total_tokens` and `total_rows` (rows
    with at least one response token) are those of the whole mini-batch, over all ranks and micro-batches. `horizon` is
    the constant length of seq_mean_token_sum_norm, and unused elsewhere.

    token_mean: DAPO (arXiv:2503.14476, eq. 8). seq_mean_token_mean: GRPO (arXiv:2402.03300, eq. 3).
    seq_mean_token_sum_norm: Dr. GRPO (arXiv:2503.20783, section 3.2), which divides by a constant length.
    """
    filled = tokens_per_row > 0
    per_token = np.zeros(len(tokens_per_row), dtype=np.float64)
    match mode:
        case "token_mean":
            per_token[filled] = 1 / max(total_tokens, 1)
        case "token_sum":
            per_token[filled] = 1
        case "seq_mean_token_sum":
            per_token[filled] = 1 / max(total_rows, 1)
        case "seq_mean_token_sum_norm":
            assert horizon is not None, "the configuration requires aggregation_horizon with seq_mean_token_sum_norm"
            per_token[filled] = 1 / (max(total_rows, 1) * horizon)
        case "seq_mean_token_mean":
            per_token[filled] = 1 / (max(total_rows, 1) * tokens_per_row[filled])
        case _:
            assert_never(mode)
    return per_token.astype(np.float32)


def aggregate(token_values: Tensor, row: Tensor, weights: Tensor) -> Tensor:
    """This part's share of the loss: sum over t of weights[row[t]] * token_values[t], a float32 scalar.

    `token_values` float32 [T] over response tokens, `row` int64 [T] in [0, rows), `weights` float32 [rows].
    """
    return weighted_sum(token_values, weights.index_select(0, row))


def weighted_sum(values: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight * values, both float32 [T], a scalar. Values of weight 0 are not looked at: they may be NaN or
    infinite, and their gradient is 0."""
    return torch.where(weight != 0, weight * values, 0.0).sum()


def surfaced(share: Tensor, output: Tensor) -> Tensor:
    """The same share of the loss, a scalar. If it is not finite, the gradient of `output`, which the share is computed
    from, is NaN, so that the optimizer step is skipped and says so.

    Clamps need that: they pass a gradient of 0 on where they meet a NaN, and the step would be one of the other rows.
    """
    result: Tensor = _Surfaced.apply(share, output)  # type: ignore[no-untyped-call]
    return result


class _Surfaced(torch.autograd.Function):
    """The identity of its first argument; the gradient of the second is 0, or NaN where the first is not finite."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, output: Tensor) -> Tensor:
        added = torch.where(share.isfinite(), 0.0, torch.nan).to(output.dtype)
        ctx.save_for_backward(added.expand(output.shape))
        return share.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *ctx.saved_tensors
