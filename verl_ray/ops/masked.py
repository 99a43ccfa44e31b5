"""Mean and standard deviation over the tokens that count, from sums that shards compute apart.

Invariant: `Moments` are sums, so those of a whole are the sum of those of its parts, in any split and order.
Not here: group statistics of rows (`algorithms/advantages.py`), and metrics other than moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 1e-12
"""A variance below this fraction of the mean square is rounding (values are float32: 6e-8 squared is 4e-15), and 0."""


@dataclass(frozen=True)
class Moments:
    """Weighted sums of some values, float64: the weights, the values, their squares. Added with `+`."""

    count: float
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, values: NDArray[np.floating], weights: NDArray[np.generic] | None = None) -> Moments:
        """Sums over `values`, weighted by `weights` of the same shape: a boolean mask, or numbers >= 0.

        Values of weight 0 are not looked at: they may be NaN.
        """
        if weights is None:
            chosen, weight = values.astype(np.float64), np.ones(values.shape)
        else:
            chosen, weight = values[weights != 0].astype(np.float64), weights[weights != 0].astype(np.float64)
        weighted = weight * chosen
        return cls(float(weight.sum()), float(weighted.sum()), float((weighted * chosen).sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )

    @property
    def mean(self) -> float:
        """The weighted mean; NaN of nothing."""
        return self.total / self.count if self.count else nan

    @property
    def variance(self) -> float:
        """The weighted mean square deviation (divided by the count, not by one less); NaN of nothing."""
        if not self.count:
            return nan
        mean_square = self.total_of_squares / self.count
        variance = mean_square - self.mean**2
        return 0.0 if variance <= RESOLUTION * mean_square else variance  # NaN stays NaN

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return sqrt(self.variance)


def whiten(values: NDArray[np.float32], moments: Moments) -> NDArray[np.float32]:
    """`values` shifted and scaled so that what `moments` describes has mean 0 and standard deviation 1.

    Values that do not differ (standard deviation 0) become 0, not a quotient of two rounding errors.
    """
    if not moments.count or moments.std == 0:
        return np.zeros_like(values)
    return ((values.astype(np.float64) - moments.mean) / moments.std).astype(np.float32)


def explained_variance(residuals: Moments, returns: Moments) -> float:
    """1 - Var(returns - values) / Var(returns): 1 = the critic foresees all, 0 = no better than a constant.

    `residuals` are the moments of returns - values. NaN when the returns do not vary.
    """
    return 1 - residuals.variance / returns.variance if returns.variance > 0 else nan
