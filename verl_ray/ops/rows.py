"""Sums and means over the tokens of a row, told at each of its tokens.

Invariant: the tokens of a row stand side by side, and no row is in two calls; sums are taken in float64, so that the
order of rows or micro-batches cannot turn a comparison. Nothing here makes the host wait for the device. Not here:
sums over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """The sum of `values` float32 [T] over each token's row, float32 [T]; `row` int64 [T] says whose token it is."""
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    place = begins.cumsum(0) - 1
    sums = torch.zeros_like(values, dtype=torch.float64).index_add_(0, place, values.double())
    return sums.index_select(0, place).to(values.dtype)


def row_lengths(row: Tensor) -> Tensor:
    """How many tokens each token's row has, float32 [T]."""
    return row_sums(torch.ones_like(row, dtype=torch.float32), row)
