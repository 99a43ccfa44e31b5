"""Rows that belong together, on one rank.

Deliberately not here: how the rows of a rank share micro-batches
(`verl_ray/data/packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verl_ray.data.batch import Int64


def assignment_of_units(
    partition: Callable[[Int64], list[Int64]], lengths: Int64, unit: Int64
) -> list[Int64]:
    """Return the row numbers of each data-parallel rank, ascending, in whole units.

    Ranks get near equal shares of work, as far as units allow.

    Args:
        partition: Returns the numbers of each rank's pieces of work, of some lengths:
            `WorkerGroup.partition` of the role that gets the rows.
        lengths: int64 [rows], tokens of each row.
        unit: int64 [rows], equal for rows that stay together.
    """
    units, number = np.unique(unit, return_inverse=True)
    tokens = np.bincount(number, weights=lengths, minlength=len(units))
    rank_of_unit = np.empty(len(units), np.int64)
    shares = partition(tokens.astype(np.int64))
    for rank, share in enumerate(shares):
        rank_of_unit[share] = rank
    rank_of_row = rank_of_unit[number]
    return [np.flatnonzero(rank_of_row == rank) for rank in range(len(shares))]
