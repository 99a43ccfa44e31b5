"""Order statistics of values that lie on several ranks, without gathering them.

A value is found digit by digit, 16 bits at a time, from histograms that are summed over
the ranks: four sums of 65,536 numbers, however many values there are.

Invariant: every rank gets the same answer, which depends on the values alone and not on
their order or on where they lie. Keys are distinct, so that no tie is left to chance;
of equal values one pair in 2^32 has the same key, and is chosen together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
Float64 = NDArray[np.float64]

Total = Callable[[NDArray[Any]], NDArray[Any]]
"""The sum of an array over all ranks, which call it together."""

_SHIFTS = (48, 32, 16, 0)
_DIGITS = 1 << 16


def keys_of(values: NDArray[np.float32], ties: NDArray[np.uint32]) -> UInt64:
    """Return keys in the order of the values, uint64 [n].

    Args:
        values: float32 [n]; NaN is larger than anything.
        ties: uint32 [n], which decide between equal values.
    """
    bits = np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)
    # As integers, positive floats are in order, and negative ones in reverse order.
    is_negative = bits >> 31 == 1
    ordered = np.where(is_negative, ~bits, bits | np.uint32(1 << 31))
    return (ordered.astype(np.uint64) << np.uint64(32)) | ties.astype(np.uint64)


def kth_largest(keys: UInt64, k: int, total: Total) -> int:
    """Return the kth largest key of all ranks, so that k keys are at least as large.

    Args:
        keys: uint64 [n], those of this rank.
        k: At least 1, and at most the number of keys of all ranks.
        total: Sums over the ranks.
    """
    key, remaining = 0, k
    for shift in _SHIFTS:
        digits = _digits(keys, shift)
        counts = total(np.bincount(digits, minlength=_DIGITS))
        # How many keys have each digit or a larger one, from the largest digit on.
        at_least = counts[::-1].cumsum()
        place = int(np.searchsorted(at_least, remaining))
        digit = _DIGITS - 1 - place
        remaining -= int(at_least[place] - counts[digit])

        key |= digit << shift
        keys = keys[digits == digit]
    return key


def end_of_prefix(
    keys: UInt64, values: Float64, limit: float, total: Total
) -> int | None:
    """Return the first key at which the mean of the values so far exceeds a limit.

    The values of all ranks are taken in the order of their keys, in which they grow.

    Args:
        keys: uint64 [n], those of this rank.
        values: float64 [n].
        limit: Largest mean.
        total: Sums over the ranks.

    Returns:
        The key; None if the mean of all values is within the limit.
    """
    end, count, value_sum = 0, 0.0, 0.0
    for shift in _SHIFTS:
        digits = _digits(keys, shift)
        counts = total(np.bincount(digits, minlength=_DIGITS).astype(np.float64))
        sums = total(np.bincount(digits, weights=values, minlength=_DIGITS))
        # Means up to the end of each digit.
        counts_so_far = count + counts.cumsum()
        sums_so_far = value_sum + sums.cumsum()
        means = sums_so_far / np.maximum(counts_so_far, 1)
        populated = np.flatnonzero(counts)
        exceeding = populated[means[populated] > limit]
        if not len(exceeding) and shift == _SHIFTS[0]:
            return None

        # Finer sums may round to just within a limit that the coarser ones exceeded;
        # the last value is the one that did it then.
        digit = int(exceeding[0] if len(exceeding) else populated[-1])
        count = float(counts_so_far[digit] - counts[digit])
        value_sum = float(sums_so_far[digit] - sums[digit])
        end |= digit << shift
        keys, values = keys[digits == digit], values[digits == digit]
    return end


def _digits(keys: UInt64, shift: int) -> NDArray[np.int64]:
    digits = (keys >> np.uint64(shift)) & np.uint64(_DIGITS - 1)
    return digits.astype(np.int64)
