"""Corrections for tokens that another policy sampled than the one that learns.

A correction weights tokens, or leaves them out.

Invariant: a weight is a constant for the gradient, and depends on its row alone; a
token that is left out bears no term of the loss. Denominators remain as they are
without a correction (`row_weights.py`): all response tokens, or rows, that are learned
from, including those that are left out. So the weight of a token does not depend on
what happens to others. A ratio that is NaN is beyond no bound: its token remains with a
weight of NaN, so that the step is skipped and reported. Which policies are compared and
where the weights enter the loss is decided in `policy_objective.py`. torch is imported
when a function is called: the configuration reads the choices at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.algorithms.declaration import Declaration, by_name
from verl_ray.ops.kl import MAX_EXPONENT
from verl_ray.ops.rows import row_lengths, row_maxima, row_sums

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.config.algorithm import CorrectionConfig

CORRECTION_PREFIX = "correction/"
"""The beginning of names of the token means and maxima that `correction_metrics`
reads."""


REJECTION_PREFIX = "rejection/"
"""The beginning of names of the token means that say what rejections leave out."""

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

    means = {
        "ratio": ratio,
        "share": share,
        "high": share * (ratio > upper),
        "low": share * (ratio < lower),
        "weight": weight,
        # From 1, where weights lie: a difference of squares would lose its digits.
        "deviation_squared": (weight - 1).square(),
        "left_out": ~mask,
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
    about them. With algorithm.correction.normalise all of these describe the weights
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
    own_means = {
        name.removeprefix(CORRECTION_PREFIX): value
        for name, value in means.items()
        if name.startswith(CORRECTION_PREFIX)
    }
    if not own_means:
        return rejected

    mean = own_means["weight"]
    # The variance around the mean from that around 1; rounding may make it negative.
    variance = max(own_means["deviation_squared"] - (mean - 1) ** 2, 0.0)
    sample_size = mean**2 / (variance + mean**2) if mean else 0.0
    smallest_weight = _smallest(maxima[f"{CORRECTION_PREFIX}inverse_weight"])
    smallest_ratio = _smallest(maxima[f"{CORRECTION_PREFIX}inverse_ratio"])
    # Ratios beyond a bound, as a fraction of all ratios.
    high = own_means["high"] / own_means["share"]
    low = own_means["low"] / own_means["share"]
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_std": math.sqrt(variance),
        "rollout_corr/rollout_is_min": smallest_weight,
        "rollout_corr/rollout_is_max": maxima[f"{CORRECTION_PREFIX}weight"],
        "rollout_corr/rollout_is_eff_sample_size": sample_size,
        "rollout_corr/rollout_is_ratio_fraction_high": high,
        "rollout_corr/rollout_is_ratio_fraction_low": low,
        "rollout_corr/rollout_rs_masked_fraction": own_means["left_out"],
        "rollout_corr/ratio_mean": own_means["ratio"],
        "rollout_corr/ratio_max": maxima[f"{CORRECTION_PREFIX}ratio"],
        "rollout_corr/ratio_min": smallest_ratio,
        **rejected,
        **_of_normalisation(own_means),
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


# ------------------------------------------------------------------------------ levels


@dataclass(frozen=True, kw_only=True)
class CorrectionLevel(Declaration):
    """A choice of `algorithm.correction.level`.

    Attributes:
        function: Maps (log_ratio float32 [T], row int64 [T]) to the logarithm of the
            ratio that is bounded, float32 [T].
    """

    function: Callable[[Tensor, Tensor], Tensor]


def token_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log ratio of each token by itself."""
    return log_ratio


def sequence_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log ratio of each token's response.

    It is that of the product over the response's tokens, which alone is unbiased.
    """
    return row_sums(log_ratio, row)


def geometric_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log of the geometric mean over each token's response.

    It does not depend on the response's length.
    """
    return row_sums(log_ratio, row) / row_lengths(row)


# ------------------------------------------------------------------------------- kinds


@dataclass(frozen=True, kw_only=True)
class Correction(Declaration):
    """A choice of `algorithm.correction.kind`.

    Attributes:
        function: Maps (ratio float32 [T], lower, upper) to (weight float32 [T], mask
            bool [T]), where the mask is False at tokens that leave the loss.
        two_sided: True if there is a lower bound as well.
        may_have_lower: True if there may be one.
        weights_by_ratio: True if tokens are weighted by their ratio; False: by 1.
        drops_tokens: True if tokens beyond a bound leave the loss.
    """

    function: Callable[[Tensor, float | None, float], tuple[Tensor, Tensor]]
    two_sided: bool = False
    may_have_lower: bool = False
    weights_by_ratio: bool = True
    drops_tokens: bool = True


def tis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return the ratio, at most upper: truncated importance sampling.

    No token is left out. With a lower bound, weights are at least that.

    E. L. Ionides, "Truncated importance sampling" (2008); per token, between a sampler
    and a trainer: F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training" (2025); per sequence: J. Liu et al., "When speed kills
    stability" (2025).
    """
    import torch

    weight = ratio.clamp(min=lower, max=upper)
    return weight, torch.ones_like(ratio, dtype=torch.bool)


def mis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return ratio where ratio <= upper: masked importance sampling.

    Other tokens are left out.

    J. Liu et al., "When speed kills stability" (2025), there per sequence.
    """
    import torch

    # Not `ratio <= upper`, which would leave NaN out.
    mask = ~(ratio > upper)
    return torch.where(mask, ratio, 0.0), mask


def icepop(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return ratio where lower <= ratio <= upper: masked on two sides.

    Other tokens are left out.

    IcePop, in "Every step evolves" (arXiv:2510.18855): the function M of its objective,
    there per token. Deviation: a token that is left out bears no divergence from the
    reference either.
    """
    import torch

    mask = _is_within(ratio, lower, upper)
    return torch.where(mask, ratio, 0.0), mask


def reject(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """1 where lower <= ratio <= upper: a mask without weights.

    Other tokens are left out.

    With the geometric mean, the sequence mask of J. Liu et al., "When speed kills
    stability" (2025).
    """
    import torch

    mask = _is_within(ratio, lower, upper)
    # A NaN remains the weight, so that it reaches the loss.
    return torch.where(ratio.isnan(), ratio, mask.float()), mask


def _is_within(ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    """Return a mask of the ratios within the bounds; NaN counts as within."""
    assert lower is not None, (
        "the configuration requires it of corrections with two bounds"
    )
    return ~((ratio < lower) | (ratio > upper))


# -------------------------------------------------------------------------- rejections

# Tokens that leave the loss because a statistic of theirs is too large.
#
# Several rejections may apply at once; a token counts if each of them lets it pass. The
# names are those of the field's rollout correction: where the statistic is taken, and
# of what. A statistic that is NaN is beyond no bound.

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
    import torch

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


@dataclass(frozen=True, kw_only=True)
class Rejection(Declaration):
    """A choice in `algorithm.correction.rejections`.

    Attributes:
        statistic: Maps log ratios to what is judged, float32 [T] each.
        over: Maps those and the rows, int64 [T], to a value at each token, float32 [T].
        two_sided: True if the ratio is bounded on both sides; False: there is an upper
            bound alone.
    """

    statistic: Callable[[Tensor], Tensor]
    over: Callable[[Tensor, Tensor], Tensor]
    two_sided: bool


def k1(log_ratio: Tensor) -> Tensor:
    """Return log r itself, r = p / p_sampler."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return (log r)^2 / 2."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r; log r is clamped at 20."""
    bounded = log_ratio.clamp(max=MAX_EXPONENT)
    return bounded.expm1() - bounded


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


# ------------------------------------------------------------------------- the choices

_LIU = "Liu et al., When speed kills stability (2025)"

CORRECTIONS = by_name(
    Correction(
        name="tis",
        paper="Ionides, 2008",
        function=tis,
        drops_tokens=False,
        may_have_lower=True,
    ),
    Correction(name="mis", paper=_LIU, function=mis),
    Correction(
        name="icepop",
        paper="IcePop (arXiv:2510.18855)",
        function=icepop,
        two_sided=True,
    ),
    Correction(
        name="reject",
        paper=_LIU,
        function=reject,
        two_sided=True,
        weights_by_ratio=False,
    ),
)

LEVELS = by_name(
    CorrectionLevel(
        name="token",
        paper="Yao et al., 2025",
        function=token_log_ratio,
    ),
    CorrectionLevel(
        name="sequence",
        paper=_LIU,
        function=sequence_log_ratio,
    ),
    CorrectionLevel(
        name="geometric",
        paper=_LIU,
        function=geometric_log_ratio,
    ),
)

_STATISTICS = {"k1": k1, "k2": k2, "k3": k3}

REJECTIONS = by_name(
    *(
        Rejection(
            name=f"{place}_{statistic}",
            paper=_LIU,
            statistic=_STATISTICS[statistic],
            over=over,
            two_sided=statistic == "k1",
        )
        for place, over, statistics in (
            ("token", token, ("k1", "k2", "k3")),
            ("seq_sum", seq_sum, ("k1", "k2", "k3")),
            ("seq_mean", seq_mean, ("k1", "k2", "k3")),
            ("seq_max", seq_max, ("k2", "k3")),
        )
        for statistic in statistics
    )
)
