"""Mean and standard deviation over tokens that count, from sums over shards.

Invariant: `Moments` are sums, so the moments of a whole are the sum of those of its
parts, in any split and order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
from numpy.typing import NDArray

EQUAL = 1e-6
"""Numbers that differ by no more than this fraction of themselves are equal.

They are sums of float32, whose relative error is 6e-8.
"""

RESOLUTION = EQUAL**2
"""A variance below this fraction of the mean square counts as rounding, and is 0."""

SMALL = 1e-6
"""Numbers below it are compared as if they were of this size.

What should add up to 0 does not quite: 0.7 + 0.2 - 0.9 is -1.1e-16.
"""


def without_rounding(
    sums: NDArray[np.float64], magnitude: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return sums, with 0 for those whose terms cancel but for rounding.

    Args:
        sums: Sums of some terms each.
        magnitude: Sums of the absolute values of the same terms.
    """
    # Not `>`, which would hide a sum that is NaN.
    return np.where(np.abs(sums) <= EQUAL * magnitude, 0, sums)


@dataclass(frozen=True)
class Moments:
    """Weighted sums over some values, in float64. They are added with `+`."""

    count: float
    """Sum of the weights."""

    total: float
    """Sum of weight * value."""

    total_of_squares: float
    """Sum of weight * value^2."""

    @classmethod
    def of(
        cls, values: NDArray[np.floating], weights: NDArray[np.generic] | None = None
    ) -> Moments:
        """Compute the moments of some values.

        Args:
            values: The values. They may be NaN where the weight is 0.
            weights: A boolean mask, or numbers >= 0, in the shape of `values`. None
                means 1 everywhere.
        """
        if weights is None:
            counted = values.astype(np.float64)
            weight = np.ones(values.shape)
        else:
            counts = weights != 0
            counted = values[counts].astype(np.float64)
            weight = weights[counts].astype(np.float64)

        weighted = weight * counted
        return cls(
            count=float(weight.sum()),
            total=float(weighted.sum()),
            total_of_squares=float((weighted * counted).sum()),
        )

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.total_of_squares + other.total_of_squares,
        )

    @property
    def mean(self) -> float:
        """The weighted mean, NaN if nothing counts."""
        if not self.count:
            return nan
        return self.total / self.count

    @property
    def variance(self) -> float:
        """The weighted mean square deviation, NaN if nothing counts.

        The divisor is the count, not the count minus one.
        """
        if not self.count:
            return nan
        mean_square = self.total_of_squares / self.count
        variance = mean_square - self.mean**2
        # The comparison is False for NaN, which is returned as it is.
        if variance <= RESOLUTION * max(mean_square, SMALL**2):
            return 0.0
        return variance

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return sqrt(self.variance)


def whiten(values: NDArray[np.float32], moments: Moments) -> NDArray[np.float32]:
    """Shift and scale values so that `moments` have mean 0 and standard deviation 1.

    Values that do not differ (standard deviation 0) become 0, not a quotient of two
    rounding errors.

    Args:
        values: The values.
        moments: The moments of the population, which may be larger than `values`.
    """
    if not moments.count or moments.std == 0:
        return np.zeros_like(values)
    centered = values.astype(np.float64) - moments.mean
    return (centered / moments.std).astype(np.float32)


def explained_variance(residuals: Moments, returns: Moments) -> float:
    """Return 1 - Var(returns - values) / Var(returns).

    A value of 1 means that the critic predicts all returns, 0 that it is no better than
    a constant. NaN if the returns do not vary.

    Args:
        residuals: The moments of returns - values.
        returns: The moments of the returns.
    """
    if not returns.variance > 0:
        return nan
    return 1 - residuals.variance / returns.variance
