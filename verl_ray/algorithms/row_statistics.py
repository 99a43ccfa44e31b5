"""Sums and extremes of the values of each row's tokens, in NumPy.

Invariant: sums are computed in float64, and an empty row has the statistics of
nothing.
"""

from __future__ import annotations

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Float32, Statistics
from verl_ray.ops.masked import Moments


def row_statistics(values: Float32, offsets: Int64) -> Statistics:
    """Return the sum, sum of squares, maximum and minimum of each row.

    Args:
        values: float32 [T].
        offsets: int64 [rows + 1].

    Returns:
        float64 [rows, 4]; (0, 0, -inf, inf) for an empty row.
    """
    empty_row = np.array([0.0, 0.0, -np.inf, np.inf])
    table = np.tile(empty_row, (len(offsets) - 1, 1))

    # `reduceat` has no result for an empty run, so only the others are reduced.
    has_tokens = offsets[1:] > offsets[:-1]
    if has_tokens.any():
        starts = offsets[:-1][has_tokens]
        wide = values.astype(np.float64)
        columns = (
            np.add.reduceat(wide, starts),
            np.add.reduceat(wide * wide, starts),
            np.maximum.reduceat(wide, starts),
            np.minimum.reduceat(wide, starts),
        )
        table[has_tokens] = np.stack(columns, axis=1)
    return table


def optional_statistics(values: Float32 | None, offsets: Int64) -> Statistics | None:
    """Return the statistics of each row; None without values."""
    if values is None:
        return None
    return row_statistics(values, offsets)


def float32_sums(values: Float32, offsets: Int64) -> Float32:
    """Return the sum of each row, float32 [rows]."""
    return row_statistics(values, offsets)[:, 0].astype(np.float32)


def moments(statistics: Statistics, tokens: int) -> Moments:
    """Return the moments over all tokens of some rows.

    Args:
        statistics: Sums of each row, [rows, 4]: values, squares, maximum, minimum.
        tokens: Number of tokens of these rows.
    """
    total = float(statistics[:, 0].sum())
    total_of_squares = float(statistics[:, 1].sum())
    return Moments(tokens, total, total_of_squares)
