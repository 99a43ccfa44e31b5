"""How token losses become one number: loss = sum over t of weight[row(t)] * loss[t].

Invariant: what a token of weight 0 holds reaches neither the sum nor a gradient, also where it is not finite.
Not here: the weights (`row_weights.py`), the token losses (`losses.py`) and the sum over ranks (the engine).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
