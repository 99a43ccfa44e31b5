"""Confidence intervals of held-out scores: the percentile bootstrap over prompts.

The method is that of Efron and Tibshirani, An Introduction to the Bootstrap (1993),
chapter 13.3. A prompt is the unit that is drawn: the responses to one prompt are alike,
so drawing responses would make the interval too narrow. A mean over tokens is a mean
over prompts that weighs each by its tokens. Its bootstrap draws prompts with their
weights and divides two sums, which is a ratio estimator.

Invariant: a pure function of the scores and the seed; the order of the prompts does not
matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Float64s = npt.NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 10_000

# Prompts that are drawn at once, which bounds the memory.
_DRAWS_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its confidence interval."""

    mean: float
    """Mean over prompts of the means of their scores; NaN without prompts."""

    low: float
    high: float
    """Bounds of the interval; NaN where there are fewer than two prompts."""

    prompts: int
    """Number of prompts that have a score."""

    @property
    def is_telling(self) -> bool:
        """Whether the interval says how sure the mean is.

        It does not where all prompts have the same score: drawing them again always
        gives the same mean, however few they are.
        """
        return self.low < self.high


def bootstrap(
    scores: Floats,
    *,
    weights: Floats | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of per-prompt means, and its percentile bootstrap interval.

    With weights it is their weighted mean.

    For a paired difference, pass the differences of the means of the same prompts.

    Args:
        scores: Scores of the responses, [prompts] or [prompts, responses]. NaN stands
            for a response without a score. A prompt without any score is left out.
        weights: Positive weight of each prompt in the mean, [prompts]; None where all
            weigh the same.
        level: Probability that the interval covers, between 0 and 1.
        resamples: Number of times that the prompts are drawn with replacement.
        seed: Seed of these draws.
    """
    means = prompt_means(scores)
    has_score = ~np.isnan(means)
    counted = np.ones(len(means)) if weights is None else weights.astype(np.float64)
    means, counted = means[has_score], counted[has_score]
    num_prompts = len(means)
    if num_prompts == 0:
        return Interval(nan, nan, nan, 0)

    mean = float((means * counted).sum() / counted.sum())
    # A single prompt says nothing about how prompts differ.
    if num_prompts == 1:
        return Interval(mean, nan, nan, 1)

    random = np.random.default_rng(seed)
    resampled = _resampled_means(means, counted, resamples, random)
    tail = (1 - level) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), num_prompts)


def prompt_means(scores: Floats) -> Float64s:
    """Return the mean score of each prompt, float64 [prompts]; NaN without a score.

    Args:
        scores: As for `bootstrap`.
    """
    if scores.ndim == 1:
        return scores.astype(np.float64)

    counted = ~np.isnan(scores)
    counts = counted.sum(axis=1)
    totals = np.where(counted, scores, 0).sum(axis=1, dtype=np.float64)
    return np.where(counts > 0, totals / np.maximum(counts, 1), nan)


def _resampled_means(
    means: Float64s, weights: Float64s, resamples: int, random: np.random.Generator
) -> Float64s:
    """Return the weighted mean of each resample, float64 [resamples]."""
    num_prompts = len(means)
    # The same draws from another order would be another resample.
    order = np.lexsort((weights, means))
    weights = weights[order]
    weighted = means[order] * weights
    at_once = max(1, _DRAWS_AT_ONCE // num_prompts)

    parts = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = random.integers(num_prompts, size=(size, num_prompts), dtype=np.int32)
        totals = weighted[drawn].sum(axis=1)
        parts.append(totals / weights[drawn].sum(axis=1))
    return np.concatenate(parts)
