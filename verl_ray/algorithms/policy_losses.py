"""Losses of the policy that judge each token by itself, and the table of all.

Below each function stand its settings and its declaration: its paper, what it needs,
and the usual values of what it reads. Settings of several losses stand at the first one
or, if sequences have them too, in `losses.py`. Losses that judge sequences are in
`sequence_losses.py`.

Invariant: those of `losses.py`. At log_probs = old_log_probs, where all ratios are 1,
every loss has the gradient -A of the plain policy gradient. A value that is not finite
is not masked, so that the step is skipped and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from verl_ray.algorithms.declaration import Setting, by_name
from verl_ray.algorithms.losses import (
    CLIP_HIGH,
    CLIP_LOW,
    PolicyLoss,
    PolicyTokens,
    TokenLoss,
    as_token_loss,
    clip_metrics,
    clipped_surrogate,
)
from verl_ray.algorithms.own_functions import Choices, OwnFunction, keywords_of
from verl_ray.algorithms.sequence_losses import SEQUENCE_LOSSES
from verl_ray.algorithms.token_selection import (
    largest_covariance,
    smallest_second_moment,
    some_of_covariance,
)
from verl_ray.settings.function_specs import in_words
from verl_ray.settings.section import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


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


DUAL_CLIP = Setting(
    "dual_clip",
    Annotated[float, Field(gt=1)],
    "Lower bound of the surrogate at negative advantages, as a multiple of the"
    " advantage; null = none.",
)

PPO_CLIP = PolicyLoss(
    name="ppo_clip",
    paper="PPO (arXiv:1707.06347)",
    function=ppo_clip,
    needs_another_policy=False,
    reads={CLIP_LOW: 0.2, CLIP_HIGH: 0.2, DUAL_CLIP: None},
)


def reinforce(tokens: PolicyTokens) -> TokenLoss:
    """-A * log pi, whatever policy sampled the token: for one update per batch.

    Source: R. J. Williams, "Simple statistical gradient-following algorithms" (1992),
    eq. 4.

    Returns:
        The loss, with the metric actor/ppo_kl.
    """
    return TokenLoss(-tokens.advantages * tokens.log_probs, tokens.metrics)


REINFORCE = PolicyLoss(
    name="reinforce",
    paper="Williams, 1992",
    function=reinforce,
    has_ratio=False,
    needs_another_policy=False,
)


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


RATIO_MIN = Setting(
    "ratio_min", PositiveFloat, "Lower bound of the ratio itself; null = none."
)
RATIO_MAX = Setting("ratio_max", PositiveFloat, "Upper bound of the ratio itself.")

CISPO = PolicyLoss(
    name="cispo",
    paper="MiniMax-M1 (arXiv:2506.13585)",
    function=cispo,
    bounds_ratio=True,
    reads={RATIO_MIN: None, RATIO_MAX: 5.0},
)


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


TEMPERATURE_POSITIVE = Setting(
    "temperature_positive",
    PositiveFloat,
    "How fast the gate closes at positive advantages.",
)
TEMPERATURE_NEGATIVE = Setting(
    "temperature_negative",
    PositiveFloat,
    "How fast the gate closes at negative advantages.",
)

SAPO = PolicyLoss(
    name="sapo",
    paper="SAPO (arXiv:2511.20347)",
    function=sapo,
    bounds_ratio=True,
    reads={TEMPERATURE_POSITIVE: 1.0, TEMPERATURE_NEGATIVE: 1.05},
)


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


DIVERGENCE_LOW = Setting(
    "divergence_low",
    PositiveFloat,
    "Largest divergence of a token that negative advantages have moved.",
)
DIVERGENCE_HIGH = Setting(
    "divergence_high",
    PositiveFloat,
    "Largest divergence of a token that positive advantages have moved.",
)

DPPO_TV = PolicyLoss(
    name="dppo_tv",
    paper="DPPO (arXiv:2602.04879)",
    function=dppo_tv,
    bounds_ratio=True,
    reads={DIVERGENCE_LOW: 0.2, DIVERGENCE_HIGH: 0.2, RATIO_MAX: 20.0},
)


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


DPPO_KL = PolicyLoss(
    name="dppo_kl",
    paper="DPPO (arXiv:2602.04879)",
    function=dppo_kl,
    bounds_ratio=True,
    reads={DIVERGENCE_LOW: 0.05, DIVERGENCE_HIGH: 0.05, RATIO_MAX: 20.0},
)


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


DISTANCE_PENALTY = Setting(
    "distance_penalty",
    PositiveFloat,
    "Weight of the squared distance of log-probs from the old policy.",
)

DRO = PolicyLoss(
    name="dro",
    paper="DRO (arXiv:2405.19107)",
    function=dro,
    reads={DISTANCE_PENALTY: 0.1},  # ours: no value has been published
)


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


SECOND_MOMENT = Setting(
    "second_moment",
    PositiveFloat,
    "Largest mean of squared log ratios to the sampler; tokens beyond are left out.",
)

M2PO = PolicyLoss(
    name="m2po",
    paper="M2PO (arXiv:2510.01161)",
    function=m2po,
    bounds_ratio=True,
    needs_another_policy=False,
    selection=smallest_second_moment,
    selection_reads=(SECOND_MOMENT,),
    reads={SECOND_MOMENT: 0.04},
)


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


COV_SHARE = Setting(
    "cov_share",
    Annotated[float, Field(gt=0, lt=1)],
    "Share of the tokens of a mini-batch that is chosen by covariance.",
)
COV_MIN = Setting("cov_min", float, "Covariances below are not chosen.")
COV_MAX = Setting("cov_max", float, "Covariances above are not chosen.")

CLIP_COV = PolicyLoss(
    name="clip_cov",
    paper="Cui et al. (arXiv:2505.22617)",
    function=clip_cov,
    needs_another_policy=False,
    selection=some_of_covariance,
    selection_reads=(COV_SHARE, COV_MIN, COV_MAX),
    reads={
        CLIP_LOW: 0.2,
        CLIP_HIGH: 0.2,
        COV_SHARE: 2e-4,
        COV_MIN: 1.0,
        COV_MAX: 5.0,
    },
)


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


COV_PENALTY = Setting(
    "cov_penalty", PositiveFloat, "Weight of |log ratio| at the chosen tokens."
)

KL_COV = PolicyLoss(
    name="kl_cov",
    paper="Cui et al. (arXiv:2505.22617)",
    function=kl_cov,
    selection=largest_covariance,
    selection_reads=(COV_SHARE,),
    reads={COV_SHARE: 2e-4, COV_PENALTY: 1.0},
)


# -------------------------------------------------------------------------- all of them


def own_loss(spec: str, settings: Mapping[Setting, object]) -> PolicyLoss:
    """Return the loss of a user's own function.

    It takes (tokens), PolicyTokens, then any settings as keyword arguments. It returns
    float32 [T], or a TokenLoss with metrics. Each token is judged by itself, and its
    ratio is taken to be in the loss.

    Raises:
        OwnFunctionMistake: It cannot be one.
    """
    reads, _ = keywords_of(spec, ("tokens",), settings)
    return PolicyLoss(
        name=in_words(spec),
        paper="your own",
        function=OwnFunction(spec, as_token_loss),
        needs_another_policy=False,
        reads=reads,
    )


_DECLARED = by_name(
    PPO_CLIP,
    REINFORCE,
    CISPO,
    SAPO,
    DPPO_TV,
    DPPO_KL,
    DRO,
    *SEQUENCE_LOSSES,
    M2PO,
    CLIP_COV,
    KL_COV,
)

POLICY_LOSSES: Choices[PolicyLoss] = Choices(_DECLARED, own_loss)
"""Every choice of `algorithm.policy_loss`, by its name."""
