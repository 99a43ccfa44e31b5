"""The distance of the trainer's policy from the policy that sampled the tokens.

Invariant: contributions of tokens are added up over micro-batches and ranks, and
metrics are made of the sums alone, so they depend on neither. All distances are 0
(perplexities: equal) up to rounding while both hold the same policy and compute it in
the same way. Deliberately not here: what is done about it (`correction.py`), and when
it is too large (`controllers/watch/update_measures.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_ray.ops.kl import MAX_EXPONENT, k1, k3
from verl_ray.ops.rows import row_lengths, row_sums

# The driver makes metrics of the sums, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor

MISMATCH_PREFIX = "mismatch/"
"""The beginning of names of the token means and maxima that `mismatch_metrics`
reads."""

TOKEN_PREFIX = f"{MISMATCH_PREFIX}token/"
"""The beginning of names of values of tokens."""

ROW_PREFIX = f"{MISMATCH_PREFIX}row/"
"""The beginning of names of values of rows, divided over their tokens."""

FRESH_PREFIX = f"{MISMATCH_PREFIX}fresh/"
"""The beginning of names of values of fresh tokens, which are 0 on all others."""

_COUNT = "count"
"""The name of 1 for each row, or each token."""

_FRESH_VALUES = ("kl", "k3_kl", "difference")

FLOAT32_NOISE = 1e-6
"""The noise of a variance that is a difference of means of float32 probabilities."""


def compare_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the metrics of the mismatch are made of, without gradients.

    A value of a whole row is divided over its tokens, so that sums over tokens are sums
    over rows.

    Args:
        log_probs: float32 [T], the trainer's, before it learns from these tokens.
        rollout_log_probs: float32 [T], the sampler's.
        row: int64 [T], the row of each token.

    Returns:
        Values to average over tokens, and values of which the largest counts; float32
        [T] each.
    """
    log_probs = log_probs.detach()
    length = row_lengths(row)

    trainer = log_probs.exp()
    rollout = rollout_log_probs.exp()
    difference = (trainer - rollout).abs()
    log_ratio = log_probs - rollout_log_probs
    token_metrics = {
        "kl": k1(rollout_log_probs, log_probs),
        "k3_kl": k3(rollout_log_probs, log_probs),
        "chi2": _squared_less_one(log_ratio),
        "difference": difference,
        "difference_squared": difference * difference,
        "trainer": trainer,
        "rollout": rollout,
        "trainer_squared": trainer * trainer,
        "rollout_squared": rollout * rollout,
        "product": trainer * rollout,
    }

    trainer_mean = row_sums(log_probs, row) / length
    rollout_mean = row_sums(rollout_log_probs, row) / length
    log_ppl_diff = rollout_mean - trainer_mean
    row_metrics = {
        _COUNT: length.new_ones(length.shape),
        "trainer_ppl": _clamped_exp(-trainer_mean),
        "rollout_ppl": _clamped_exp(-rollout_mean),
        "trainer_log_ppl": -trainer_mean,
        "rollout_log_ppl": -rollout_mean,
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": _clamped_exp(log_ppl_diff),
        "chi2": _squared_less_one(row_sums(log_ratio, row)),
    }

    means = {f"{TOKEN_PREFIX}{name}": values for name, values in token_metrics.items()}
    for name, values in row_metrics.items():
        means[f"{ROW_PREFIX}{name}"] = values / length
    maxima = {"difference": difference} | _sides_of_zero(log_ppl_diff)
    return means, {f"{MISMATCH_PREFIX}{name}": maxima[name] for name in maxima}


def fresh_means(means: Mapping[str, Tensor], is_fresh: Tensor) -> dict[str, Tensor]:
    """Return what the metrics of fresh tokens alone are made of.

    On tokens of the policy version that learns, the mismatch is that of two programs;
    on older ones the policy's own drift comes on top.

    Args:
        means: The first result of `compare_log_probs`.
        is_fresh: float32 [T], 1 where the token is of that version, else 0.
    """
    fresh_metrics = {
        name: means[f"{TOKEN_PREFIX}{name}"] * is_fresh for name in _FRESH_VALUES
    }
    fresh_metrics["share"] = is_fresh
    return {f"{FRESH_PREFIX}{name}": values for name, values in fresh_metrics.items()}


def of_units(
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor],
    unit: Tensor,
    num_units: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return values of tokens as values of units, for a loss that has one of each.

    Args:
        means: The first result of `compare_log_probs`, of which units have the sums.
        maxima: Its second result.
        unit: int64 [T], the unit of each token, from 0.
        num_units: Number of units.

    Returns:
        Both, float32 [units] each, with the number of tokens of each unit.
    """
    zeros = next(iter(maxima.values())).new_zeros(num_units)
    counted = {**means, f"{TOKEN_PREFIX}{_COUNT}": zeros.new_ones(len(unit))}
    sums = {name: zeros.index_add(0, unit, values) for name, values in counted.items()}
    largest = {
        name: zeros.scatter_reduce(0, unit, values, "amax")
        for name, values in maxima.items()
    }
    return sums, largest


def mismatch_metrics(
    means: Mapping[str, float], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of the mismatch under their published names.

    With rho = p_trainer / p_rollout of a sampled token: rollout_corr/kl and k3_kl
    estimate KL(rollout || trainer) per token; chi2_token is the mean of rho^2 - 1 (an
    estimate of the chi-squared divergence), chi2_seq the same with the product of rho
    over each response; training_ppl, rollout_ppl and ppl_ratio are means over responses
    of exp(-mean log p) and of the quotient of both. training_log_ppl and
    rollout_log_ppl are means over responses of -mean log p; log_ppl_diff, abs_diff,
    diff_max and diff_min are of the former less the latter, response by response.
    training/rollout_probs_diff_* is about |p_trainer - p_rollout|.

    Args:
        means: The token means of the first result of `compare_log_probs`.
        maxima: The maxima of its second result.

    Returns:
        The metrics; none if nothing was compared.
    """
    token = _with_prefix(means, TOKEN_PREFIX)
    if not token:
        return {}
    # Where a loss is one of several tokens, what is averaged are sums over these.
    tokens_per_loss = token.pop(_COUNT, 1.0)
    token = {name: value / tokens_per_loss for name, value in token.items()}

    # The means of row values per token, divided by rows per token.
    row_sums_per_token = _with_prefix(means, ROW_PREFIX)
    rows_per_token = row_sums_per_token[_COUNT]
    row = {name: value / rows_per_token for name, value in row_sums_per_token.items()}

    # Rounding may make the difference of two means negative.
    variance = token["difference_squared"] - token["difference"] ** 2
    return _fresh_metrics(means) | {
        "training/rollout_probs_diff_mean": token["difference"],
        "training/rollout_probs_diff_max": maxima[f"{MISMATCH_PREFIX}difference"],
        "training/rollout_probs_diff_std": math.sqrt(max(variance, 0.0)),
        "training/rollout_actor_probs_pearson_corr": _correlation(token),
        "rollout_corr/kl": token["kl"],
        "rollout_corr/k3_kl": token["k3_kl"],
        "rollout_corr/training_ppl": row["trainer_ppl"],
        "rollout_corr/rollout_ppl": row["rollout_ppl"],
        "rollout_corr/training_log_ppl": row["trainer_log_ppl"],
        "rollout_corr/rollout_log_ppl": row["rollout_log_ppl"],
        "rollout_corr/log_ppl_diff": row["log_ppl_diff"],
        "rollout_corr/log_ppl_abs_diff": row["log_ppl_abs_diff"],
        "rollout_corr/log_ppl_diff_max": _largest(maxima, "above", "below"),
        "rollout_corr/log_ppl_diff_min": 0.0 - _largest(maxima, "below", "above"),
        "rollout_corr/ppl_ratio": row["ppl_ratio"],
        "rollout_corr/chi2_token": token["chi2"],
        "rollout_corr/chi2_seq": row["chi2"],
    }


def _fresh_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the mismatch of fresh tokens; nothing if there are none."""
    fresh = _with_prefix(means, FRESH_PREFIX)
    share = fresh.get("share", 0.0)
    if not share:
        return {}
    return {
        "staleness/fresh_kl": fresh["kl"] / share,
        "staleness/fresh_k3_kl": fresh["k3_kl"] / share,
        "staleness/fresh_probs_diff_mean": fresh["difference"] / share,
    }


def _correlation(token: Mapping[str, float]) -> float:
    """Return Pearson's correlation of the probabilities; NaN if one hardly varies."""
    trainer_variance = token["trainer_squared"] - token["trainer"] ** 2
    rollout_variance = token["rollout_squared"] - token["rollout"] ** 2
    # Below the noise the quotient would be arbitrary; NaN is not above it.
    if not min(trainer_variance, rollout_variance) > FLOAT32_NOISE:
        return math.nan

    covariance = token["product"] - token["trainer"] * token["rollout"]
    return covariance / math.sqrt(trainer_variance * rollout_variance)


def _sides_of_zero(difference: Tensor) -> dict[str, Tensor]:
    """Return what `_largest` makes the largest and the smallest difference of.

    Maxima that are reported are not negative. So the values above 0 and those below
    travel apart: as they are, and as inverses, whose largest is that of the value
    nearest to 0. The inverse of 0 is infinite.
    """
    import torch

    inverse = 1 / difference.abs()
    return {
        "above": difference.clamp(min=0),
        "below": (-difference).clamp(min=0),
        "inverse_above": torch.where(difference >= 0, inverse, 0.0),
        "inverse_below": torch.where(difference <= 0, inverse, 0.0),
    }


def _largest(maxima: Mapping[str, float], side: str, other: str) -> float:
    """Return the largest value in the direction of a side.

    That is the largest one of that side or, if there is none, the one of the other side
    that is nearest to 0.
    """
    largest = maxima[f"{MISMATCH_PREFIX}{side}"]
    # Not `> 0`, which would hide a NaN.
    if largest != 0:
        return largest
    inverse = maxima[f"{MISMATCH_PREFIX}inverse_{other}"]
    # All are infinite where none has an inverse.
    return 0.0 - 1 / inverse if inverse else -math.inf


def _with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the values whose names begin with the prefix, under their other parts."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _clamped_exp(exponent: Tensor) -> Tensor:
    """Return exp, clamped where float32 would overflow."""
    return exponent.clamp(max=MAX_EXPONENT).exp()


def _squared_less_one(log_ratio: Tensor) -> Tensor:
    """Return rho^2 - 1 from log rho, clamped where float32 would overflow.

    expm1 has the digits near 0 that exp(x) - 1 would lose.
    """
    return (2 * log_ratio.clamp(max=MAX_EXPONENT)).expm1()
