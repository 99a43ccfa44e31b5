"""Losses of the critic and of the reward model, and what all losses share.

Those of the policy are in `policy_losses.py` and `sequence_losses.py`, each with its
settings and its paper.

Invariant: losses and metrics are not reduced; weights and sums belong to the caller
(`row_weights.py`), so no mean depends on how a mini-batch was cut. Nothing here makes
the host wait for the device. torch is imported when a function is called: the table of
the policy's losses is read by the configuration, which imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl_ray.algorithms.declaration import Declaration, Setting
from verl_ray.columns.stages import Bool
from verl_ray.settings.section import PositiveFloat

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


# ----------------------------------------------------------------- losses of the policy


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


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return pi / pi_old of each token, at least e^-20 and at most e^20.

    Past these bounds it has no gradient.
    """
    return _bounded(log_probs - old_log_probs).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Declaration):
    """A choice of `algorithm.policy_loss`, and what follows from its kind.

    Each flag says what it causes, with the function or rule that reads it.
    """

    function: Callable[..., TokenLoss]
    """Maps PolicyTokens and its settings to a TokenLoss."""

    has_ratio: bool = True
    """Whether a ratio to the old policy corrects for several updates on the same rows.

    True: log ratios beyond the bound are counted in actor/log_ratio_clipfrac
    (`_uncorrected_loss`). In the two-policy form the ratio is the weight. So the
    correction only leaves tokens out (`_policy_loss`), may have no kind
    (`kind_matches_the_form`), is refused if it weighs
    (`weights_are_not_applied_twice`), and has no mean to divide by
    (`normalised_weights_are_known`). `check` prints what the ratio is one of
    (`_policy_loss_in_words`).

    False: a step makes one update, unless the correction weighs each
    (`_has_no_ratio`). The two-policy form needs a kind, which weighs the loss.
    """

    needs_another_policy: bool = True
    """Whether it is nothing but the policy gradient while the old policy learns.

    True: one update per step is refused, unless the loss compares with the sampler
    (`ratios_are_not_one`).
    """

    sequence: Literal["token", "row"] = "token"
    """The unit that it judges as a whole.

    "row": algorithm.sequence may be trajectory (`trajectories_are_judged`), and
    `check` prints it (`_policy_loss_in_words`).
    """

    is_per_row: bool = False
    """Whether a row has one loss, which each of its tokens bears.

    True: weights and masks that differ within a row are refused
    (`rows_are_corrected_as_a_whole`), and so are aggregations over the tokens of all
    rows (`sequences_are_weighted_as_such`). Older tokens are corrected by rows
    (`corrected_as`). A comparison with the sampler is not proposed in place of several
    updates (`ratios_are_not_one`).
    """

    bounds_ratio: bool = False
    """Whether it bounds the effect of any ratio itself, large or small.

    True: older tokens need no mask, which would make another loss of it
    (`corrected_as`).
    """

    selection: Callable[..., Bool] | None = None
    """Maps SelectableTokens and its settings to a mask of the whole mini-batch.

    With one, log-probs are computed before the update, and refused where no policy has
    them (`chooses_tokens`). Each mini-batch is chosen from as a whole
    (`select_tokens`), and the choice is `PolicyTokens.selected`. It is refused where a
    teacher adds to the advantages (`distillation_is_possible`).
    """

    selection_reads: tuple[Setting, ...] = ()
    """The settings of `reads` that the selection takes (`selection_settings`).

    The loss does not get them (`settings`).
    """

    @property
    def corrected_as(self) -> Literal["tokens", "rows", "itself"]:
        """The unit that a correction of older tokens judges, if the loss needs one.

        The schedules that learn from older tokens set algorithm.correction by it
        (`for_loss`), and where nothing corrects a fix proposes the same
        (`stale_tokens_are_corrected`).
        """
        if self.bounds_ratio:
            return "itself"
        return "rows" if self.is_per_row else "tokens"

    def settings(self, algorithm: object) -> dict[str, Any]:
        selection_names = {setting.name for setting in self.selection_reads}
        return {
            name: value
            for name, value in super().settings(algorithm).items()
            if name not in selection_names
        }

    def selection_settings(self, algorithm: object) -> dict[str, Any]:
        """Return the keyword arguments of the selection."""
        values = super().settings(algorithm)
        return {setting.name: values[setting.name] for setting in self.selection_reads}


CLIP_LOW = Setting(
    "clip_low", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high]."
)
CLIP_HIGH = Setting(
    "clip_high", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high]."
)


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


# -------------------------------------------------------------- critic and reward model


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
