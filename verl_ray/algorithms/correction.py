"""What is done about tokens that another policy sampled than the one that learns: weights, and tokens left out.

Invariant: a weight is a constant for the gradient, and depends on its row alone; a token that is left out bears no term
of the loss. Denominators stay what they are without a correction (`row_weights.py`): all response tokens, or rows, that
are learned from, those left out among them; so a token is weighed the same whatever becomes of the others. A ratio that
is NaN is beyond no bound: its token is kept with a weight of NaN, so that the step is skipped and says so.
Deliberately not here: which policies are compared and where the weights go (`objectives.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ray.algorithms.catalogue import CORRECTIONS, LEVELS
from verl_ray.config.algorithm import CorrectionConfig
from verl_ray.ops.kl import MAX_EXPONENT
from verl_ray.ops.rows import row_lengths, row_sums

APPLIED = "correction/"
"""Names of token means and maxima that begin so are what `correction_metrics` reads."""


@dataclass(frozen=True)
class Weights:
    """What becomes of each token. `means` and `maxima`, float32 [T], are what the metrics are made of."""

    weight: Tensor  # float32 [T], of the token's policy loss; 0 where it is left out
    kept: Tensor  # bool [T]; False: the token leaves the loss
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


def correct(config: CorrectionConfig, log_ratio: Tensor, row: Tensor) -> Weights:
    """The weights that `config` asks for. `log_ratio` float32 [T] is log(p / p_rollout) of each sampled token under the
    policy to correct towards, and `row` int64 [T] says whose token it is."""
    kind, level, upper = config.kind, config.level, config.upper
    assert kind is not None and level is not None and upper is not None, "the configuration requires them of a form"
    ratio = LEVELS[level].function(log_ratio.detach(), row).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    weight, kept = CORRECTIONS[kind].function(ratio, config.lower, upper)
    low = 1 / upper if config.lower is None else config.lower
    # Fractions count whatever has one ratio, a token or a row. A row is shared out over its tokens, which are summed.
    share = torch.ones_like(ratio) if level == "token" else 1 / row_lengths(row)
    means = {
        "ratio": ratio,
        "share": share,
        "high": share * (ratio > upper),
        "low": share * (ratio < low),
        "weight": weight,
        "deviation_squared": (weight - 1).square(),  # from 1, where weights lie: squares of them would lose its digits
        "left_out": ~kept,
    }
    return Weights(
        weight,
        kept,
        {APPLIED + name: values.float() for name, values in means.items()},
        {
            f"{APPLIED}weight": weight,
            f"{APPLIED}inverse_weight": 1 / weight,  # infinite where a token is left out: the smallest weight is 0 then
            f"{APPLIED}ratio": ratio,
            f"{APPLIED}inverse_ratio": 1 / ratio,
        },
    )


def correction_metrics(means: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their published names, from the token means and maxima of `Weights`; nothing without them.

    As on the field's dashboards, rollout_corr/rollout_is_mean, _max, _min, _std and _eff_sample_size, a fraction of all
    tokens ((sum w)^2 / (n * sum w^2)), are of the weights in use: after truncation, and 0 where a token is left out.
    rollout_is_ratio_fraction_high and _low count the ratios beyond the bounds (without a lower one, below 1 / upper),
    each token's, or each response's where the ratio is one of responses. rollout_rs_masked_fraction is of the tokens
    left out. Ours: rollout_corr/ratio_mean, _max and _min are of the ratios before anything is done about them.
    """
    of = {name.removeprefix(APPLIED): value for name, value in means.items() if name.startswith(APPLIED)}
    if not of:
        return {}
    mean = of["weight"]
    variance = max(of["deviation_squared"] - (mean - 1) ** 2, 0.0)
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_std": math.sqrt(variance),
        "rollout_corr/rollout_is_min": _inverse(maxima[f"{APPLIED}inverse_weight"]),
        "rollout_corr/rollout_is_max": maxima[f"{APPLIED}weight"],
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / (variance + mean**2) if mean else 0.0,
        "rollout_corr/rollout_is_ratio_fraction_high": of["high"] / of["share"],
        "rollout_corr/rollout_is_ratio_fraction_low": of["low"] / of["share"],
        "rollout_corr/rollout_rs_masked_fraction": of["left_out"],
        "rollout_corr/ratio_mean": of["ratio"],
        "rollout_corr/ratio_max": maxima[f"{APPLIED}ratio"],
        "rollout_corr/ratio_min": _inverse(maxima[f"{APPLIED}inverse_ratio"]),
    }


def _inverse(largest: float) -> float:
    """The smallest value, from the largest inverse of one; NaN of nothing."""
    return 1 / largest if largest else math.nan


# ------------------------------------------------------------------------------------------------------- the levels


def of_token(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Of the token by itself."""
    return log_ratio


def of_sequence(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Of the response as a whole: the product over its tokens, which alone is unbiased."""
    return row_sums(log_ratio, row)


def geometric(log_ratio: Tensor, row: Tensor) -> Tensor:
    """The geometric mean over the response, which does not depend on its length."""
    return row_sums(log_ratio, row) / row_lengths(row)


# -------------------------------------------------------------------------------------------------------- the kinds


def tis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """min(ratio, upper): truncated importance sampling. Every token is kept.

    E. L. Ionides, "Truncated importance sampling" (2008); per token, between a sampler and a trainer: F. Yao
    et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); per sequence: J. Liu et
    al., "When speed kills stability" (2025).
    """
    return ratio.clamp(max=upper), torch.ones_like(ratio, dtype=torch.bool)


def mis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """ratio where ratio <= upper; other tokens are left out: masked importance sampling.

    J. Liu et al., "When speed kills stability" (2025), there per sequence.
    """
    kept = ~(ratio > upper)
    return torch.where(kept, ratio, 0.0), kept


def icepop(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """ratio where lower <= ratio <= upper; other tokens are left out: masked on two sides.

    IcePop, in "Every step evolves" (arXiv:2510.18855): the function M of its objective, there per token. Deviation:
    what is left out bears no divergence from the reference either.
    """
    kept = _within(ratio, lower, upper)
    return torch.where(kept, ratio, 0.0), kept


def reject(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """1 where lower <= ratio <= upper; other tokens are left out: a mask without weights.

    With the geometric mean, the sequence mask of J. Liu et al., "When speed kills stability" (2025).
    """
    kept = _within(ratio, lower, upper)
    return torch.where(ratio.isnan(), ratio, kept.float()), kept


def _within(ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    assert lower is not None, "the configuration requires it of corrections with two bounds"
    return ~((ratio < lower) | (ratio > upper))
