"""Losses per token or pair, and those of the critic and the reward model.

Invariant: losses and metrics are not reduced; weights and sums belong to the caller
(`row_weights.py`), so no mean depends on how a mini-batch was cut. Nothing here makes
the host wait for the device. torch is imported when a function is called: the table of
the policy's losses is read by the configuration, which imports no framework.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Losses, and what is reported about them.

    Metrics, maxima and terms are float32 [T] by name, and detached.

    Attributes:
        loss: float32 [T], differentiable.
        metrics: Values to average over tokens: the sum over all parts of a mini-batch,
            divided by the sum of their token counts.
        maxima: Values of which the largest counts. They are not negative.
        terms: Terms of the loss. They are aggregated like the loss, with the weights of
            its rows.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> TokenLoss:
    """Half the squared error of the critic.

    With `clip`, it is the larger error of the value and of the value clamped to within
    `clip` of the old one.

    Source: the PPO baseline of arXiv:1707.06347 (section 5) as its authors published
    it; the half is the usual one.

    Args:
        values: float32 [T].
        old_values: float32 [T].
        returns: float32 [T].
        clip: The largest distance from the old value, or None.

    Returns:
        The loss, with the metric critic/vf_clipfrac (the clamped value is worse) if
        there is a clip.
    """
    import torch

    error = (values - returns).square()
    metrics = {}

    if clip is not None:
        # The larger error counts: a step beyond the clip gains nothing.
        clamped = old_values + (values - old_values).clamp(-clip, clip)
        clamped_error = (clamped - returns).square()
        metrics["critic/vf_clipfrac"] = (clamped_error > error).float()
        error = torch.maximum(error, clamped_error)

    return TokenLoss(0.5 * error, metrics)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor, *, label_smoothing: float
) -> TokenLoss:
    """-(1 - e) log sigmoid(d - m) - e log sigmoid(-d - m), d = chosen - rejected.

    The margin m is required of whichever response is taken to be the better one; e is
    `label_smoothing`.

    Sources: R. A. Bradley and M. E. Terry (1952); as a reward model's loss,
    arXiv:2203.02155, eq. 1; the margin, Llama 2 (arXiv:2307.09288, eq. 2); smoothed
    labels, arXiv:2401.06080.

    Args:
        chosen: float32 [pairs], scores of the preferred responses.
        rejected: float32 [pairs], scores of the other responses.
        margin: float32 [pairs].
        label_smoothing: The probability that a label is wrong.

    Returns:
        The loss per pair, with the metrics reward/accuracy (the chosen response scores
        higher; a tie counts half), reward/log_loss (of the preference by the scores
        alone: margin and smoothing left out), reward/margin, reward/chosen and
        reward/rejected.
    """
    from torch.nn.functional import logsigmoid

    difference = chosen - rejected
    # A wrong label means that the rejected response is the better one.
    if_right = -(1 - label_smoothing) * logsigmoid(difference - margin)
    if_wrong = label_smoothing * logsigmoid(-difference - margin)

    detached = difference.detach()
    metrics = {
        "reward/accuracy": (1 + detached.sign()) / 2,
        "reward/log_loss": -logsigmoid(detached),
        "reward/margin": detached,
        "reward/chosen": chosen.detach(),
        "reward/rejected": rejected.detach(),
    }
    return TokenLoss(if_right - if_wrong, metrics)
