"""The sum of token losses: loss = sum over t of weight[row(t)] * loss[t].

Invariant: a value at a token of weight 0 reaches neither the sum nor a gradient, even
if it is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def aggregate(token_values: Tensor, row: Tensor, weights: Tensor) -> Tensor:
    """Return this part's share of the loss: sum of weights[row[t]] * token_values[t].

    Args:
        token_values: float32 [T] over response tokens.
        row: int64 [T] in [0, rows), the row of each token.
        weights: float32 [rows].

    Returns:
        A float32 scalar.
    """
    return weighted_sum(token_values, weights.index_select(0, row))


def weighted_sum(values: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of weight * values, a scalar.

    Values of weight 0 are ignored: they may be NaN or infinite, and their gradient
    is 0.

    Args:
        values: float32 [T].
        weight: float32 [T].
    """
    # A product alone would not do: 0 times NaN is NaN.
    return torch.where(weight != 0, weight * values, 0.0).sum()


def surface_non_finite(share: Tensor, output: Tensor) -> Tensor:
    """Return the same share of the loss, with a NaN gradient if it is not finite.

    The NaN makes the engine skip the optimizer step and report why. Without it, a clamp
    passes a gradient of 0 on where it meets a NaN, and the step would be one of the
    other rows.

    Args:
        share: The share of the loss, a scalar.
        output: A tensor that the share is computed from, which gets the NaN.
    """
    result: Tensor = _SurfaceNonFinite.apply(share, output)  # type: ignore[no-untyped-call]
    return result


class _SurfaceNonFinite(torch.autograd.Function):
    """The identity of the first argument.

    The gradient of the second argument is 0, or NaN if the first is not finite.
    """

    @staticmethod
    def forward(ctx: Any, share: Tensor, output: Tensor) -> Tensor:
        # Decided on the device, so that the host need not wait for it.
        gradient = torch.where(share.isfinite(), 0.0, torch.nan).to(output.dtype)
        ctx.save_for_backward(gradient.expand(output.shape))
        return share.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *ctx.saved_tensors
