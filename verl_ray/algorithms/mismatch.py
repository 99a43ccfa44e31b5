"""How far the policy that the trainer computes is from the one that the sampler drew tokens from.

Invariant: what tokens say is added up over micro-batches and ranks, and metrics are made of the sums alone; so they
depend on neither. All are 0 (perplexities: equal) up to rounding while both hold one policy and compute alike.
Deliberately not here: what is done about it (`correction.py`), and when it is too much
(`controllers/watch/mismatch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verl_ray.ops.kl import MAX_EXPONENT, k1, k3
from verl_ray.ops.rows import row_lengths, row_sums

COMPARED = "mismatch/"
"""Names of token means and maxima that begin so are what `mismatch_metrics` reads."""

FLOAT32_NOISE = 1e-6  # of a variance that is a difference of means of float32 probabilities


def compare(log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values to average over tokens, and values of which the largest counts; all float32 [T], without gradients.

    `log_probs` and `rollout_log_probs` float32 [T]: of the trainer, before it learns from these tokens, and of the
    sampler; `row` int64 [T]. What is said of a whole row is shared out over its tokens, so that sums over tokens are
    sums over rows.
    """
    log_probs = log_probs.detach()
    log_ratio, length = log_probs - rollout_log_probs, row_lengths(row)
    trainer_mean, rollout_mean = row_sums(log_probs, row) / length, row_sums(rollout_log_probs, row) / length
    trainer, rollout = log_probs.exp(), rollout_log_probs.exp()
    difference = (trainer - rollout).abs()
    of_tokens = {
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
    of_rows = {
        "count": torch.ones_like(length),
        "trainer_ppl": _exp(-trainer_mean),
        "rollout_ppl": _exp(-rollout_mean),
        "log_ppl_diff": rollout_mean - trainer_mean,
        "ppl_ratio": _exp(rollout_mean - trainer_mean),
        "chi2": _squared_less_one(row_sums(log_ratio, row)),
    }
    means = {f"{COMPARED}token/{name}": values for name, values in of_tokens.items()}
    means |= {f"{COMPARED}row/{name}": values / length for name, values in of_rows.items()}
    return means, {f"{COMPARED}difference": difference}


def mismatch_metrics(means: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their published names, from the token means and maxima of what `compare` returned; nothing where
    nothing was compared.

    With rho = p_trainer / p_rollout of a sampled token: rollout_corr/kl and k3_kl estimate KL(rollout || trainer) per
    token; chi2_token is the mean of rho^2 - 1 (an estimate of the chi-squared divergence), chi2_seq the same with the
    product of rho over each response; training_ppl, rollout_ppl and ppl_ratio are means over responses of
    exp(-mean log p) and of the quotient of both. training/rollout_probs_diff_* is of |p_trainer - p_rollout|.
    """
    token, of_row = (
        {name.removeprefix(prefix): value for name, value in means.items() if name.startswith(prefix)}
        for prefix in (f"{COMPARED}token/", f"{COMPARED}row/")
    )
    if not token:
        return {}
    row = {name: value / of_row["count"] for name, value in of_row.items()}
    spread = token["difference_squared"] - token["difference"] ** 2
    trainer, rollout = (token[f"{name}_squared"] - token[name] ** 2 for name in ("trainer", "rollout"))
    varies = min(trainer, rollout) > FLOAT32_NOISE
    covariance = token["product"] - token["trainer"] * token["rollout"]
    return {
        "training/rollout_probs_diff_mean": token["difference"],
        "training/rollout_probs_diff_max": maxima[f"{COMPARED}difference"],
        "training/rollout_probs_diff_std": math.sqrt(max(spread, 0.0)),
        "training/rollout_actor_probs_pearson_corr": covariance / math.sqrt(trainer * rollout) if varies else math.nan,
        "rollout_corr/kl": token["kl"],
        "rollout_corr/k3_kl": token["k3_kl"],
        "rollout_corr/training_ppl": row["trainer_ppl"],
        "rollout_corr/rollout_ppl": row["rollout_ppl"],
        "rollout_corr/log_ppl_diff": row["log_ppl_diff"],
        "rollout_corr/ppl_ratio": row["ppl_ratio"],
        "rollout_corr/chi2_token": token["chi2"],
        "rollout_corr/chi2_seq": row["chi2"],
    }


def _exp(exponent: Tensor) -> Tensor:
    """Clamped where float32 would overflow."""
    return exponent.clamp(max=MAX_EXPONENT).exp()


def _squared_less_one(log_ratio: Tensor) -> Tensor:
    """rho^2 - 1, with the digits that exp(x) - 1 would lose near 0; clamped likewise."""
    return torch.expm1(2 * log_ratio.clamp(max=MAX_EXPONENT))
