"""Weights of tokens that another policy sampled than the one that learns.

They follow from the section `algorithm.correction`, whose choices are in
`verl_ray/algorithms/correction.py`.

Invariant: a token that is left out bears no term of the loss. Denominators remain as
they are without a correction (`row_weights.py`): all response tokens, or rows, that are
learned from, including those that are left out. So the weight of a token does not
depend on what happens to others. Which policies are compared and where the weights
enter the loss is decided in `policy_objective.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.algorithms.correction import CORRECTIONS, LEVELS, rejections
from verl_ray.ops.kl import MAX_EXPONENT
from verl_ray.ops.rows import row_lengths, row_sums

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.config.algorithm import CorrectionConfig


CORRECTION_PREFIX = "correction/"
"""The beginning of names of the token means and maxima that `correction_metrics`
reads."""


REJECTION_PREFIX = "rejection/"
"""The beginning of names of the token means that say what rejections leave out."""

_ROWS = "rows"
"""The name of 1 for each row, divided over its tokens."""

BATCH_MEAN = "batch_mean"
"""The name of the mean over the mini-batch that weights are divided by."""

ALL = "all"
"""The name of what a correction and its rejections leave out together."""


@dataclass(frozen=True)
class CorrectionWeights:
    """The effect of a correction on each token.

    Attributes:
        weight: float32 [T], weight of the token's policy loss; 0 if it is left out.
        mask: bool [T]; False: the token leaves the loss.
        means: float32 [T] by name, values whose means over tokens make the metrics.
        maxima: float32 [T] by name, values whose maxima make the metrics.
    """

    weight: Tensor
    mask: Tensor
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


def correction_weights(
    config: CorrectionConfig, log_ratio: Tensor, row: Tensor
) -> CorrectionWeights | None:
    """Return the weights of a correction, without what its rejections leave out.

    Args:
        config: The section `algorithm.correction`.
        log_ratio: float32 [T], log(p / p_rollout) of each sampled token under the
            policy to correct towards.
        row: int64 [T], the row of each token.

    Returns:
        The weights; None if there are neither a kind nor rejections.
    """
    if config.rejections is None:
        return None if config.kind is None else _weights(config, log_ratio, row)

    import torch

    ones = torch.ones_like(log_ratio)
    weights = CorrectionWeights(ones, ones.bool(), {}, {})
    if config.kind is not None:
        weights = _weights(config, log_ratio, row)

    means = dict(weights.means)
    mask = weights.mask
    for name, is_beyond in rejections(config.rejections, log_ratio, row).items():
        mask = mask & ~is_beyond
        means[f"{REJECTION_PREFIX}{name}"] = is_beyond.float()
    means[f"{REJECTION_PREFIX}{ALL}"] = (~mask).float()
    return CorrectionWeights(weights.weight, mask, means, weights.maxima)


def _weights(
    config: CorrectionConfig, log_ratio: Tensor, row: Tensor
) -> CorrectionWeights:
    """Return the weights of the kind of correction; see `correction_weights`."""
    import torch

    kind = config.kind
    level = config.level
    upper = config.upper
    assert kind is not None and level is not None and upper is not None, (
        "the configuration requires them of a form"
    )

    level_log_ratio = LEVELS[level].function(log_ratio.detach(), row)
    ratio = level_log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    weight, mask = CORRECTIONS[kind].function(ratio, config.lower, upper)

    # Fractions count the ratios: one per token, or one per row, which is divided over
    # its tokens, since those are summed.
    if level == "token":
        share = torch.ones_like(ratio)
    else:
        share = 1 / row_lengths(row)
    lower = 1 / upper if config.lower is None else config.lower

    row_means, row_maxima = _of_rows(weight, ratio, row, lower, upper)
    means = {
        "ratio": ratio,
        "share": share,
        "high": share * (ratio > upper),
        "low": share * (ratio < lower),
        "weight": weight,
        # From 1, where weights lie: a difference of squares would lose its digits.
        "deviation_squared": (weight - 1).square(),
        "left_out": ~mask,
        **row_means,
    }
    # What is reported as the largest and smallest weight, see `correction_metrics`.
    extreme = weight if level == "token" else ratio
    # Minima travel as maxima of inverses. The inverse of the weight is infinite if a
    # token is left out: the smallest weight is then 0.
    maxima = {
        "weight": extreme,
        "inverse_weight": 1 / extreme,
        "ratio": ratio,
        "inverse_ratio": 1 / ratio,
        **row_maxima,
    }
    return CorrectionWeights(
        weight,
        mask,
        {
            f"{CORRECTION_PREFIX}{name}": values.float()
            for name, values in means.items()
        },
        {f"{CORRECTION_PREFIX}{name}": values for name, values in maxima.items()},
    )


def _of_rows(
    weight: Tensor, ratio: Tensor, row: Tensor, lower: float, upper: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the metrics of the mean weight of each row are made of.

    Returns:
        Values of rows, divided over their tokens, and values of which the largest
        counts; float32 [T] each.
    """
    length = row_lengths(row)
    mean_weight = row_sums(weight, row) / length
    mean_ratio = row_sums(ratio, row) / length
    values = {
        _ROWS: length.new_ones(length.shape),
        "row_deviation": mean_weight - 1,
        "row_deviation_squared": (mean_weight - 1).square(),
        "row_high": (mean_ratio > upper).float(),
        "row_low": (mean_ratio < lower).float(),
    }
    maxima = {
        "row_weight": mean_weight,
        "inverse_row_weight": 1 / mean_weight,
        "row_deviation": (mean_weight - 1).abs(),
    }
    return {name: value / length for name, value in values.items()}, maxima


def correction_metrics(
    means: Mapping[str, float], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a correction under their published names.

    On the field's dashboards, rollout_corr/rollout_is_mean, _max, _min, _std and
    _eff_sample_size, a fraction of all tokens ((sum w)^2 / (n * sum w^2)), describe the
    weights in use: after truncation, and 0 where a token is left out; but _max and _min
    are ratio_max and ratio_min where the ratio is one of responses. So they are here.
    rollout_is_ratio_fraction_high and _low count the ratios beyond the bounds (without
    a lower one, below 1 / upper): each token's, or each response's if the ratio is one
    of responses. rollout_rs_masked_fraction is the fraction of tokens left out, and
    rollout_rs_<name>_masked_fraction that of one rejection. Names of this project:
    rollout_corr/ratio_mean, _max and _min describe the ratios before anything is done
    about them. rollout_is_seq_mean, _std, _max, _min and _max_deviation are of the mean
    weight of each response, the last one its distance from 1;
    rollout_is_seq_fraction_high and _low count the responses whose mean ratio is beyond
    the bounds. With algorithm.correction.normalise all of these describe the weights
    before they are divided by rollout_corr/rollout_is_batch_norm_factor.

    Args:
        means: The token means of `CorrectionWeights.means`.
        maxima: The maxima of `CorrectionWeights.maxima`.

    Returns:
        The metrics; none if the means have none of a correction.
    """
    rejected = {
        f"rollout_corr/rollout_rs_{name}masked_fraction": value
        for name, value in _of_rejections(means).items()
    }
    own_means = _with_prefix(means)
    if not own_means:
        return rejected
    own_maxima = _with_prefix(maxima)

    mean = own_means["weight"]
    # The variance around the mean from that around 1; rounding may make it negative.
    variance = max(own_means["deviation_squared"] - (mean - 1) ** 2, 0.0)
    sample_size = mean**2 / (variance + mean**2) if mean else 0.0
    # Ratios beyond a bound, as a fraction of all ratios.
    high = own_means["high"] / own_means["share"]
    low = own_means["low"] / own_means["share"]
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_std": math.sqrt(variance),
        "rollout_corr/rollout_is_min": _smallest(own_maxima["inverse_weight"]),
        "rollout_corr/rollout_is_max": own_maxima["weight"],
        "rollout_corr/rollout_is_eff_sample_size": sample_size,
        "rollout_corr/rollout_is_ratio_fraction_high": high,
        "rollout_corr/rollout_is_ratio_fraction_low": low,
        "rollout_corr/rollout_rs_masked_fraction": own_means["left_out"],
        "rollout_corr/ratio_mean": own_means["ratio"],
        "rollout_corr/ratio_max": own_maxima["ratio"],
        "rollout_corr/ratio_min": _smallest(own_maxima["inverse_ratio"]),
        **_of_sequences(own_means, own_maxima),
        **rejected,
        **_of_normalisation(own_means),
    }


def _of_sequences(
    own_means: Mapping[str, float], own_maxima: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of the mean weight of each response."""
    # Means of rows from token means, by the rows per token.
    row = {
        name: value / own_means[_ROWS]
        for name, value in own_means.items()
        if name.startswith("row_")
    }
    variance = row["row_deviation_squared"] - row["row_deviation"] ** 2
    values = {
        "mean": 1 + row["row_deviation"],
        # Rounding may make the variance negative.
        "std": math.sqrt(max(variance, 0.0)),
        "max": own_maxima["row_weight"],
        "min": _smallest(own_maxima["inverse_row_weight"]),
        "max_deviation": own_maxima["row_deviation"],
        "fraction_high": row["row_high"],
        "fraction_low": row["row_low"],
    }
    return {f"rollout_corr/rollout_is_seq_{name}": values[name] for name in values}


def _with_prefix(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a correction, under their own names."""
    return {
        name.removeprefix(CORRECTION_PREFIX): value
        for name, value in values.items()
        if name.startswith(CORRECTION_PREFIX)
    }


def _of_normalisation(own_means: Mapping[str, float]) -> dict[str, float]:
    """Return what weights are divided by; nothing where they are not."""
    name = "rollout_corr/rollout_is_batch_norm_factor"
    return {name: own_means[BATCH_MEAN]} if BATCH_MEAN in own_means else {}


def _of_rejections(means: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions that rejections leave out, by what stands in their names."""
    fractions = {}
    for name, value in means.items():
        if name.startswith(REJECTION_PREFIX):
            rejection = name.removeprefix(REJECTION_PREFIX)
            fractions["" if rejection == ALL else f"{rejection}_"] = value
    return fractions


def _smallest(largest_inverse: float) -> float:
    """Return the smallest of some values from the largest of their inverses.

    It is NaN if there are no values, whose largest inverse is 0.
    """
    if largest_inverse == 0:
        return math.nan
    return 1 / largest_inverse
