"""Losses of the policy that judge each token by itself.

Invariant: those of `losses.py`. At log_probs = old_log_probs, where all ratios are 1,
every loss has the gradient -A of the plain policy gradient. A value that is not finite
is not masked, so that the step is skipped and reported. Losses that judge sequences are
in `sequence_losses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.algorithms.losses import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The bound of log ratios. exp overflows float32 past 88, and inf times an advantage of
0 is NaN; e^20 is far beyond any clip range. `PolicyObjective` counts what lies past
it."""


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of whole rows, as losses of the policy see them.

    Tensors are float32 [T] unless noted.

    Attributes:
        log_probs: Log-probs of the policy that learns, differentiable.
        old_log_probs: Log-probs of the policy that it is compared with. With one update
            per batch these are `log_probs.detach()`.
        advantages: Advantages.
        row: int64, the row of each token.
        selected: 1 where the token was chosen from its whole mini-batch, else 0; None
            if nothing was chosen.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """The log of pi / pi_old; past +-20 it has no gradient."""
        return _bounded(self.log_probs - self.old_log_probs)

    @property
    def choice(self) -> Tensor:
        """`selected`, of a loss that needs it.

        Raises:
            ValueError: Nothing was chosen.
        """
        if self.selected is None:
            raise ValueError("the loss needs a choice of tokens, which the rows lack")
        return self.selected

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of every loss: actor/ppo_kl, k1 of pi_old from pi."""
        return {"actor/ppo_kl": self.old_log_probs - self.log_probs.detach()}


def as_token_loss(returned: object, tokens: PolicyTokens) -> TokenLoss:
    """Return the loss that a user's function has returned, with the usual metrics.

    Raises:
        ValueError: It is no loss of these tokens.
    """
    from torch import Tensor

    if isinstance(returned, Tensor):
        returned = TokenLoss(returned, tokens.metrics)
    if not isinstance(returned, TokenLoss):
        raise ValueError(f"{type(returned).__name__}; expected a tensor or a TokenLoss")
    if returned.loss.shape != tokens.log_probs.shape:
        raise ValueError(
            f"a loss of shape {tuple(returned.loss.shape)}; expected one number per"
            f" token, {tuple(tokens.log_probs.shape)}"
        )
    if not returned.loss.requires_grad and tokens.log_probs.requires_grad:
        raise ValueError("a loss without a gradient")
    return returned


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return pi / pi_old of each token, at least e^-20 and at most e^20.

    Past these bounds it has no gradient.
    """
    return _bounded(log_probs - old_log_probs).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The ratio is pi / pi_old of the token. With `dual_clip` c > 1, a loss at A < 0 stops
    at c * |A|. This is also the two-sided clip of INTELLECT-2 (arXiv:2505.07291, eq.
    1), whose delta is c: a ratio that is capped at c above 1 + clip_high changes
    nothing at A > 0.

    Sources: PPO (arXiv:1707.06347, eq. 7); two clip bounds, DAPO (arXiv:2503.14476, eq.
    10); dual clip (arXiv:1912.09729, eq. 5). Deviation: log ratios are clamped to +-20;
    past that the token has no gradient.

    Returns:
        The loss, with the metrics of `clip_metrics` (the clipped side decides),
        actor/pg_clipfrac_lower (the dual clip decides) and actor/ppo_kl (k1 of pi_old
        from pi).
    """
    import torch

    ratio = tokens.log_ratio.exp()
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low, clip_high)
    metrics = tokens.metrics | clip_metrics(is_clipped, tokens.advantages)

    if dual_clip is not None:
        worst = -tokens.advantages * dual_clip
        bound = torch.where(tokens.advantages < 0, worst, torch.inf)
        metrics["actor/pg_clipfrac_lower"] = (loss > bound).float()
        loss = torch.minimum(loss, bound)

    return TokenLoss(loss, metrics)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss of ratios, and where the clipped side decides.

    Returns:
        float32 [T] each; the second is 1 or 0, and detached.
    """
    import torch

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    # The minimum of the surrogates, negated.
    loss = torch.maximum(unclipped, clipped)
    return loss, (clipped > unclipped).float()


def clip_metrics(is_clipped: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a loss with an upper bound at A > 0, a lower one at A < 0.

    Args:
        is_clipped: float32 [T], 1 where a bound decides, else 0.
        advantages: float32 [T].

    Returns:
        actor/pg_clipfrac, and its parts: actor/clip_ratio/high and
        actor/clip_ratio/low.
    """
    at_upper = is_clipped * (advantages > 0)
    return {
        "actor/pg_clipfrac": is_clipped,
        "actor/clip_ratio/high": at_upper,
        "actor/clip_ratio/low": is_clipped - at_upper,
    }


def reinforce(tokens: PolicyTokens) -> TokenLoss:
    """-A * log pi, whatever policy sampled the token: for one update per batch.

    Source: R. J. Williams, "Simple statistical gradient-following algorithms" (1992),
    eq. 4.

    Returns:
        The loss, with the metric actor/ppo_kl.
    """
    return TokenLoss(-tokens.advantages * tokens.log_probs, tokens.metrics)


def cispo(
    tokens: PolicyTokens, *, ratio_min: float | None, ratio_max: float
) -> TokenLoss:
    """-sg(clip(ratio, ratio_min, ratio_max)) * A * log pi: each token has a gradient.

    The bounds are ratios themselves, not distances from 1. There is no lower one unless
    `ratio_min` is set.

    Sources: MiniMax-M1 (arXiv:2506.13585, eqs. 4 and 5), whose authors tune the upper
    bound alone; ScaleRL (arXiv:2510.13786) takes 5.

    Returns:
        The loss, with the metrics actor/pg_clipfrac (ratios above the upper bound),
        actor/pg_clipfrac_lower (below the lower one) and actor/ppo_kl.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(min=ratio_min, max=ratio_max)
    metrics = tokens.metrics | {"actor/pg_clipfrac": (ratio > ratio_max).float()}
    if ratio_min is not None:
        metrics["actor/pg_clipfrac_lower"] = (ratio < ratio_min).float()
    return TokenLoss(-weight * tokens.advantages * tokens.log_probs, metrics)


def sapo(
    tokens: PolicyTokens, *, temperature_positive: float, temperature_negative: float
) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (ratio - 1)) * A: a soft gate in place of a clip.

    tau is `temperature_positive` where A > 0, else `temperature_negative`. The gate has
    slope 1 at ratio 1, and the gradient fades out on both sides.

    Source: SAPO (arXiv:2511.20347, eqs. 5 and 6), with temperatures 1.0 and 1.05.

    Returns:
        The loss, with the metrics actor/gate (the slope of the gate, 1 at ratio 1) and
        actor/ppo_kl.
    """
    import torch

    positive = tokens.advantages > 0
    temperature = torch.where(positive, temperature_positive, temperature_negative)
    ratio = tokens.log_ratio.exp()
    gate = torch.sigmoid(temperature * (ratio - 1))
    loss = -4 / temperature * gate * tokens.advantages

    slope = 4 * gate.detach() * (1 - gate.detach())
    return TokenLoss(loss, tokens.metrics | {"actor/gate": slope})


def dppo_tv(
    tokens: PolicyTokens,
    *,
    divergence_low: float,
    divergence_high: float,
    ratio_max: float,
) -> TokenLoss:
    """-sg(min(ratio, ratio_max)) * A * log pi of tokens whose probability moved little.

    A token is left out once its probability has moved too far to where A pushes it:
    pi - pi_old > divergence_high at A > 0, pi_old - pi > divergence_low at A < 0. This
    is the total variation between the outcomes "this token" and "another one". A token
    that moves back counts.

    Source: DPPO with binary total variation (arXiv:2602.04879), which compares with the
    sampler (algorithm.correction.form=two_policy). Deviation: the ratio is bounded, as
    in the implementations.

    Returns:
        The loss, with the metrics of `clip_metrics` (tokens that are left out) and
        actor/ppo_kl.
    """
    moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    too_high = (tokens.advantages > 0) & (moved > divergence_high)
    too_low = (tokens.advantages < 0) & (-moved > divergence_low)
    return _trusted(tokens, too_high | too_low, ratio_max)


def dppo_kl(
    tokens: PolicyTokens,
    *,
    divergence_low: float,
    divergence_high: float,
    ratio_max: float,
) -> TokenLoss:
    """The loss of `dppo_tv`, with a KL divergence in place of the distance.

    It is KL(pi_old || pi) of "this token" and "another one". Probabilities of another
    token below 1e-7, which float32 does not resolve, count as 1e-7.

    Source: DPPO with binary KL (arXiv:2602.04879).

    Returns:
        The loss, with the metrics of `clip_metrics` (tokens that are left out) and
        actor/ppo_kl.
    """
    new, old = tokens.log_probs.detach(), tokens.old_log_probs
    log_other_new, log_other_old = _log_of_another(new), _log_of_another(old)
    divergence = old.exp() * (old - new)
    divergence = divergence + log_other_old.exp() * (log_other_old - log_other_new)

    advantages = tokens.advantages
    too_high = (advantages > 0) & (new > old) & (divergence > divergence_high)
    too_low = (advantages < 0) & (new < old) & (divergence > divergence_low)
    return _trusted(tokens, too_high | too_low, ratio_max)


def _log_of_another(log_probs: Tensor) -> Tensor:
    """Return the log of the probability of any other token."""
    return (-log_probs.expm1()).clamp(min=1e-7).log()


def _trusted(tokens: PolicyTokens, left_out: Tensor, ratio_max: float) -> TokenLoss:
    """Return the importance-weighted policy gradient, without some tokens."""
    weight = tokens.log_ratio.detach().exp().clamp(max=ratio_max)
    loss = -weight * tokens.advantages * tokens.log_probs
    metrics = tokens.metrics | clip_metrics(left_out.float(), tokens.advantages)
    return TokenLoss(loss.masked_fill(left_out, 0.0), metrics)


def dro(tokens: PolicyTokens, *, distance_penalty: float) -> TokenLoss:
    """-(A * log pi - distance_penalty / 2 * (log pi - log pi_old)^2).

    A regression that no ratio weights, so rollouts may be of any policy.

    Source: direct reward optimisation (arXiv:2405.19107, section 3), token by token and
    with advantages for rewards less values, as implementations have it.

    Returns:
        The loss, with the metric actor/ppo_kl.
    """
    squared = tokens.log_ratio.square()
    loss = -tokens.advantages * tokens.log_probs + 0.5 * distance_penalty * squared
    return TokenLoss(loss, tokens.metrics)


def m2po(tokens: PolicyTokens) -> TokenLoss:
    """-ratio * A of the chosen tokens, without a clip; the others are left out.

    Source: M2PO (arXiv:2510.01161), whose choice is `smallest_second_moment` in
    `token_selection.py`.

    Returns:
        The loss, with the metrics actor/pg_clipfrac (tokens that are left out) and
        actor/ppo_kl.
    """
    loss = -tokens.log_ratio.exp() * tokens.advantages
    left_out = tokens.choice == 0
    metrics = tokens.metrics | {"actor/pg_clipfrac": left_out.float()}
    return TokenLoss(loss.masked_fill(left_out, 0.0), metrics)


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss, without the chosen tokens.

    Source: Clip-Cov (arXiv:2505.22617, eq. 11), whose choice is `some_of_covariance` in
    `token_selection.py`.

    Returns:
        The loss, with the metrics of `clip_metrics` (the clipped side decides),
        actor/selected (the chosen tokens) and actor/ppo_kl.
    """
    ratio = tokens.log_ratio.exp()
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low, clip_high)
    metrics = tokens.metrics | clip_metrics(is_clipped, tokens.advantages)
    metrics["actor/selected"] = tokens.choice
    return TokenLoss(loss.masked_fill(tokens.choice != 0, 0.0), metrics)


def kl_cov(tokens: PolicyTokens, *, cov_penalty: float) -> TokenLoss:
    """-ratio * A, and cov_penalty * |log pi - log pi_old| of the chosen tokens.

    Source: KL-Cov (arXiv:2505.22617, eq. 13), whose choice is `largest_covariance` in
    `token_selection.py`.

    Returns:
        The loss, with the metrics actor/selected (the chosen tokens) and actor/ppo_kl.
    """
    log_ratio = tokens.log_ratio
    penalty = cov_penalty * log_ratio.abs() * tokens.choice
    loss = -log_ratio.exp() * tokens.advantages + penalty
    return TokenLoss(loss, tokens.metrics | {"actor/selected": tokens.choice})
