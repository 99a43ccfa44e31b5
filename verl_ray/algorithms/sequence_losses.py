"""Losses of the policy that judge a sequence as a whole; here it is called a row.

With algorithm.sequence=trajectory a "row" is all rows of a trajectory, whose tokens are
then neighbours.

Every token of a row bears the loss of its row, with the gradient through its own
log-prob alone. Summed with weights that are equal within a row, this is the gradient of
the sequence's loss: the weights of `row_weights.py` are, and so nothing here depends on
how rows are packed.

Invariant: that of `policy_losses.py`. A row whose log ratios are all 0 has ratio 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ray.algorithms.declaration import Setting
from verl_ray.algorithms.losses import (
    CLIP_HIGH,
    CLIP_LOW,
    MAX_LOG_RATIO,
    PolicyLoss,
    PolicyTokens,
    TokenLoss,
    clip_metrics,
    clipped_surrogate,
)
from verl_ray.ops.rows import row_lengths, row_sums
from verl_ray.settings.section import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss of the geometric mean of the ratios of a row.

    With s the mean's value, the ratio of a token is sg(s) * pi / sg(pi): its value is
    s, and advantages may differ between the tokens of a row.

    Sources: GSPO and GSPO-token (arXiv:2507.18071, eqs. 5, 7, 13 and 14), clipped at
    3e-4 and 4e-4. With the aggregation seq_mean_token_mean it is GSPO, and with
    seq_mean_token_sum, which weights a row by its length, LUSPO (arXiv:2602.05261).

    Returns:
        The loss, with the metrics of `clip_metrics` (tokens of rows where the clipped
        side decides) and actor/ppo_kl.
    """
    log_ratio = tokens.log_ratio
    ratio = _with_value_of_row(log_ratio, tokens.row)
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low, clip_high)
    metrics = clip_metrics(is_clipped, tokens.advantages)
    return TokenLoss(loss, tokens.metrics | metrics)


GSPO = PolicyLoss(
    name="gspo",
    paper="GSPO (arXiv:2507.18071)",
    function=gspo,
    sequence="row",
    is_per_row=True,
    reads={CLIP_LOW: 3e-4, CLIP_HIGH: 4e-4},
)


def gmpo(
    tokens: PolicyTokens, *, log_clip_low: float, log_clip_high: float
) -> TokenLoss:
    """-A * geometric mean over a row of its ratios, each clipped on its own.

    A log ratio is clipped at log_clip_high where A > 0, and at -log_clip_low where
    A < 0: the side that PPO's minimum takes. A is the mean over the row.

    Source: GMPO (arXiv:2507.20673, eq. 4), with log ratios clipped at 0.4.

    Returns:
        The loss, with the metrics of `clip_metrics` (tokens that are clipped) and
        actor/ppo_kl.
    """
    import torch

    log_ratio = tokens.log_ratio
    high = torch.where(tokens.advantages > 0, log_clip_high, MAX_LOG_RATIO)
    low = torch.where(tokens.advantages < 0, -log_clip_low, -MAX_LOG_RATIO)
    clipped = log_ratio.clamp(low, high)
    ratio = _with_value_of_row(clipped, tokens.row)

    advantage = _row_means(tokens.advantages, tokens.row)
    is_clipped = (clipped != log_ratio).float()
    metrics = clip_metrics(is_clipped, tokens.advantages)
    return TokenLoss(-advantage * ratio, tokens.metrics | metrics)


LOG_CLIP_LOW = Setting(
    "log_clip_low",
    PositiveFloat,
    "At negative advantages a log ratio is clipped at -log_clip_low.",
)
LOG_CLIP_HIGH = Setting(
    "log_clip_high",
    PositiveFloat,
    "At positive advantages a log ratio is clipped at log_clip_high.",
)

GMPO = PolicyLoss(
    name="gmpo",
    paper="GMPO (arXiv:2507.20673)",
    function=gmpo,
    sequence="row",
    is_per_row=True,
    reads={LOG_CLIP_LOW: 0.4, LOG_CLIP_HIGH: 0.4},
)


def vespo(
    tokens: PolicyTokens,
    *,
    power_positive: float,
    rate_positive: float,
    power_negative: float,
    rate_negative: float,
) -> TokenLoss:
    """-sg(phi(w)) * A * log pi, with w the product of the ratios of a row.

    phi(w) = e^rate * w^power * e^(-rate * w): 1 at w = 1, and it falls on both sides.
    Power and rate are those of the sign of A; at A = 0 there is no effect.

    Source: VESPO (arXiv:2602.10693), with power 2 and rate 3 at A >= 0, power 3 and
    rate 2 at A < 0. The logarithm of w is clamped to [log 1e-8, 20], as its
    implementations do.

    Returns:
        The loss, with the metrics actor/gate (phi) and actor/ppo_kl.
    """
    import torch

    difference = (tokens.log_probs - tokens.old_log_probs).detach()
    log_w = row_sums(difference, tokens.row).clamp(_LOG_SMALLEST, MAX_LOG_RATIO)
    negative = tokens.advantages < 0
    power = torch.where(negative, power_negative, power_positive)
    rate = torch.where(negative, rate_negative, rate_positive)

    # In the exponent: w^power alone may overflow.
    phi = (rate + power * log_w - rate * log_w.exp()).exp()
    loss = -phi * tokens.advantages * tokens.log_probs
    return TokenLoss(loss, tokens.metrics | {"actor/gate": phi})


_LOG_SMALLEST = -18.420680743952367
"""The logarithm of 1e-8."""

POWER_POSITIVE = Setting(
    "power_positive", PositiveFloat, "Power of the ratio at advantages >= 0."
)
RATE_POSITIVE = Setting(
    "rate_positive", PositiveFloat, "Decay in the ratio at advantages >= 0."
)
POWER_NEGATIVE = Setting(
    "power_negative", PositiveFloat, "Power of the ratio at negative advantages."
)
RATE_NEGATIVE = Setting(
    "rate_negative", PositiveFloat, "Decay in the ratio at negative advantages."
)

VESPO = PolicyLoss(
    name="vespo",
    paper="VESPO (arXiv:2602.10693)",
    function=vespo,
    bounds_ratio=True,
    sequence="row",
    reads={
        POWER_POSITIVE: 2.0,
        RATE_POSITIVE: 3.0,
        POWER_NEGATIVE: 3.0,
        RATE_NEGATIVE: 2.0,
    },
)


def _row_means(values: Tensor, row: Tensor) -> Tensor:
    """Return the mean over each token's row, float32 [T]."""
    return row_sums(values, row) / row_lengths(row)


def _with_value_of_row(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return exp of the mean log ratio of each token's row.

    Its gradient is that of the token's own log ratio.
    """
    mean = _row_means(log_ratio.detach(), row)
    own = log_ratio - log_ratio.detach()
    return (mean + own).exp()


SEQUENCE_LOSSES = (GSPO, GMPO, VESPO)
"""The losses above, for the table in `policy_losses.py`."""
