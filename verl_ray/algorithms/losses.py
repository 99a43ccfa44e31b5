"""Losses of the policy and of the critic, one per response token.

Invariant: losses and metrics are per token and not reduced; weights and sums belong to the caller
(`row_weights.py`), so no mean depends on how a mini-batch was cut. Nothing here makes the host wait for the device.
Not here: entropy bonus and divergence, which are token values of their own (`ops/`), and aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp overflows float32 past 88, and inf times an advantage of 0 is NaN; e^20 is far beyond any clip range."""


@dataclass(frozen=True)
class TokenLoss:
    """Losses float32 [T], differentiable, and what is reported of them, float32 [T] by name and detached.

    `metrics` are averaged over tokens: the sum over all parts of a mini-batch, divided by the sum of their token
    counts. `terms` are terms of the loss: they are aggregated as the loss itself is, with the weights of its rows. Of
    `maxima`, which are not negative, the largest value is kept.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = pi / pi_old of the token.

    With `dual_clip` c > 1, a loss at A < 0 stops at c * |A|. Metrics: actor/pg_clipfrac (the clipped side decides),
    actor/pg_clipfrac_lower (the dual clip decides), actor/ppo_kl (k1 of pi_old from pi).

    Sources: PPO (arXiv:1707.06347, eq. 7); two clip bounds, DAPO (arXiv:2503.14476, eq. 10); dual clip
    (arXiv:1912.09729, eq. 5). Deviation: log ratios are clamped to +-20; past that the token has no gradient.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, clipped)
    metrics = {"actor/pg_clipfrac": clipped > free, "actor/ppo_kl": -log_ratio.detach()}
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
        metrics["actor/pg_clipfrac_lower"] = loss > bound
        loss = torch.minimum(loss, bound)
    return TokenLoss(loss, {name: metric.float() for name, metric in metrics.items()})


def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A * log pi, whatever policy sampled the token: for one update per batch. Metric: actor/ppo_kl.

    Source: R. J. Williams, "Simple statistical gradient-following algorithms" (1992), eq. 4.
    """
    return TokenLoss(-advantages * log_probs, {"actor/ppo_kl": old_log_probs - log_probs.detach()})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> TokenLoss:
    """Half the squared error of the critic; with `clip`, of the worse of the value and the value held within `clip` of
    the old one. All float32 [T]. Metric, with a clip: critic/vf_clipfrac (the held value is the worse one).

    Source: the PPO baseline of arXiv:1707.06347 (section 5) as its authors published it; the half is the usual one.
    """
    error = (values - returns).square()
    metrics = {}
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        held_error = (held - returns).square()
        metrics["critic/vf_clipfrac"] = (held_error > error).float()
        error = torch.maximum(error, held_error)
    return TokenLoss(0.5 * error, metrics)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, label_smoothing: float) -> TokenLoss:
    """-(1 - e) log sigmoid(d - m) - e log sigmoid(-d - m), d = chosen - rejected, per pair. All float32 [pairs].

    `margin` m is demanded of whichever response is taken to be the better one; e is `label_smoothing`.

    Metrics: reward/accuracy (the chosen one scores higher; a tie counts half), reward/log_loss (of the preference by
    the scores alone: margin and smoothing left out), reward/margin, reward/chosen, reward/rejected.

    Sources: R. A. Bradley and M. E. Terry (1952); as a reward model's loss, arXiv:2203.02155, eq. 1; the margin,
    Llama 2 (arXiv:2307.09288, eq. 2); smoothed labels, arXiv:2401.06080.
    """
    difference = chosen - rejected
    log_sigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(difference - margin) - label_smoothing * log_sigmoid(
        -difference - margin
    )
    told = difference.detach()
    metrics = {
        "reward/accuracy": (1 + told.sign()) / 2,
        "reward/log_loss": -log_sigmoid(told),
        "reward/margin": told,
        "reward/chosen": chosen.detach(),
        "reward/rejected": rejected.detach(),
    }
    return TokenLoss(loss, metrics)
