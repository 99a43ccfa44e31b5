"""Rejections: tokens that leave the loss because a statistic of theirs is too large.

Several may apply at once; a token counts if each of them lets it pass. The names are
those of the field's rollout correction: where the statistic is taken, and of what.

Invariant: that of `correction.py`. A statistic that is NaN is beyond no bound.
Deliberately not here: weights (`correction.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl_ray.algorithms.catalogue import REJECTIONS
from verl_ray.ops.kl import MAX_EXPONENT
from verl_ray.ops.rows import row_lengths, row_maxima, row_sums

Bounds = Sequence[float | None]
"""Lower and upper bound; None: there is none."""


def rejections(
    bounds: Mapping[str, Bounds], log_ratio: Tensor, row: Tensor
) -> dict[str, Tensor]:
    """Return where each rejection leaves tokens out, bool [T] by name.

    Args:
        bounds: Bounds by names in `REJECTIONS`.
        log_ratio: float32 [T], log(p / p_sampler) of each sampled token.
        row: int64 [T], the row of each token.
    """
    left_out = {}
    for name, (lower, upper) in bounds.items():
        rejection = REJECTIONS[name]
        of_tokens = rejection.statistic(log_ratio.detach())
        value = rejection.over(of_tokens, row)
        if rejection.two_sided:
            # Of k1 the ratio is bounded, so that 1 stands for no difference.
            value = value.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()

        beyond = torch.zeros_like(row, dtype=torch.bool)
        if lower is not None:
            beyond = beyond | (value < lower)
        if upper is not None:
            beyond = beyond | (value > upper)
        left_out[name] = beyond
    return left_out


# -------------------------------------------------------------------------- statistics


def k1(log_ratio: Tensor) -> Tensor:
    """Return log r itself, r = p / p_sampler."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return (log r)^2 / 2."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r; log r is clamped at 20."""
    bounded = log_ratio.clamp(max=MAX_EXPONENT)
    return torch.expm1(bounded) - bounded


# -------------------------------------------------------------------------------- over


def token(values: Tensor, row: Tensor) -> Tensor:
    """Return the value of each token by itself."""
    return values


def seq_sum(values: Tensor, row: Tensor) -> Tensor:
    """Return the sum over each token's row."""
    return row_sums(values, row)


def seq_mean(values: Tensor, row: Tensor) -> Tensor:
    """Return the mean over each token's row."""
    return row_sums(values, row) / row_lengths(row)


def seq_max(values: Tensor, row: Tensor) -> Tensor:
    """Return the maximum over each token's row."""
    return row_maxima(values, row)
