"""Sums and maxima over the tokens of a row, repeated at each of its tokens.

Invariant: the tokens of a row are adjacent, and no row is split between two calls. Sums
are computed in float64, so that the order of rows or micro-batches cannot change the
outcome of a comparison. Nothing here makes the host wait for the device. torch is
imported when a function is called, so that tables of the configuration may name what
uses these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Return the sum over each token's row, float32 [T].

    Args:
        values: float32 [T].
        row: int64 [T], the row of each token.
    """
    import torch

    number = _numbered(row)
    sums = torch.zeros_like(values, dtype=torch.float64)
    sums.index_add_(0, number, values.double())
    return sums.index_select(0, number).to(values.dtype)


def row_maxima(values: Tensor, row: Tensor) -> Tensor:
    """Return the maximum over each token's row, float32 [T]; NaN if one of them is.

    Arguments are those of `row_sums`.
    """
    import torch

    number = _numbered(row)
    lowest = torch.full_like(values, -torch.inf)
    maxima = lowest.scatter_reduce(0, number, values, "amax")
    return maxima.index_select(0, number)


def row_lengths(row: Tensor) -> Tensor:
    """Return the number of tokens of each token's row, float32 [T]."""
    import torch

    return row_sums(torch.ones_like(row, dtype=torch.float32), row)


def _numbered(row: Tensor) -> Tensor:
    """Number the rows from 0 in the order of their tokens, int64 [T]."""
    import torch

    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    return begins.cumsum(0) - 1
