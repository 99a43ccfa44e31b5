"""Losses of a policy on preferences: the choices of `preference.loss`.

Invariant: a loss is a function of log-probs of whole responses, and gives one number
per pair, or per response where these have labels instead of partners. It depends on no
other pair or response, but for an estimate that is the same for the whole mini-batch.
Each is declared once, with its paper, its equation, and the settings that it reads.
Functions import torch when they are called, since the configuration reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from verl_ray.algorithms.declaration import (
    DeclarationWithUsualValues,
    Setting,
    by_name,
)
from verl_ray.algorithms.own_functions import Choices, OwnFunction, keywords_of
from verl_ray.settings.section import NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Pairs of responses as losses see them; all tensors are float64 [pairs].

    Attributes:
        chosen: Log-prob of the better response by the policy, differentiable.
        rejected: Log-prob of the other response, differentiable.
        ref_chosen: Log-prob of the better response by the reference; 0 for a loss
            without one.
        ref_rejected: Log-prob of the other response by the reference; likewise.
        chosen_tokens: Number of tokens of the better response.
        rejected_tokens: Number of tokens of the other response.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """The log of pi / pi_ref of the better response."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """The log of pi / pi_ref of the other response."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """The log ratio of the better response less that of the other."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_margin(self) -> Tensor:
        """`margin` of log ratios per token."""
        chosen = self.chosen_ratio / self.chosen_tokens
        return chosen - self.rejected_ratio / self.rejected_tokens


@dataclass(frozen=True)
class LabelledResponses:
    """Single responses with labels, as losses see them; float64 [responses].

    Attributes:
        log_prob: Log-prob by the policy, differentiable.
        ref_log_prob: Log-prob by the reference.
        is_desirable: bool, the label.
        kl: Estimate of the divergence of the policy from the reference over the whole
            mini-batch, at least 0; 0 for a loss without one.
    """

    log_prob: Tensor
    ref_log_prob: Tensor
    is_desirable: Tensor
    kl: float = 0.0

    @property
    def log_ratio(self) -> Tensor:
        """The log of pi / pi_ref."""
        return self.log_prob - self.ref_log_prob


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(DeclarationWithUsualValues):
    """A choice of `preference.loss`.

    Attributes:
        function: Maps Pairs and its settings to a loss, [pairs]; or LabelledResponses
            and its settings to a loss, [responses].
        has_reference: Whether it compares with the reference; if not, a run has none.
        is_unpaired: Whether it is one of single responses.
        needs_kl: Whether it reads the estimate of the divergence.
    """

    section: ClassVar[str] = "preference"

    function: Callable[..., Tensor]
    has_reference: bool = True
    is_unpaired: bool = False
    needs_kl: bool = False


BETA = Setting(
    "beta",
    PositiveFloat,
    "Strength of the penalty for leaving the reference, or scale of the implicit"
    " reward.",
)
LABEL_SMOOTHING = Setting(
    "label_smoothing",
    Annotated[float, Field(ge=0, lt=0.5)],
    "Probability with which a pair is taken to be the wrong way round.",
)
GAMMA = Setting(
    "gamma",
    NonNegativeFloat,
    "Margin by which the implicit reward of the chosen response should be larger.",
)
DESIRABLE_WEIGHT = Setting(
    "desirable_weight", PositiveFloat, "Weight of the losses of desirable responses."
)
UNDESIRABLE_WEIGHT = Setting(
    "undesirable_weight",
    PositiveFloat,
    "Weight of the losses of undesirable responses.",
)


def sigmoid(pairs: Pairs, *, beta: float) -> Tensor:
    """-log sigmoid(beta * margin).

    Source: DPO (arXiv:2305.18290, eq. 7).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * pairs.margin)


def cdpo(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin).

    Source: conservative DPO (E. Mitchell, A note on DPO with noisy preferences, 2023).
    """
    from torch.nn.functional import logsigmoid

    if_right = -(1 - label_smoothing) * logsigmoid(beta * pairs.margin)
    return if_right - label_smoothing * logsigmoid(-beta * pairs.margin)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """DPO's loss without the bias of labels that are wrong with a known probability.

    It is ((1 - e) l(margin) - e l(-margin)) / (1 - 2e), l = -log sigmoid(beta * .).

    Source: robust DPO (arXiv:2403.00409).
    """
    from torch.nn.functional import logsigmoid

    if_right = -(1 - label_smoothing) * logsigmoid(beta * pairs.margin)
    if_wrong = -label_smoothing * logsigmoid(-beta * pairs.margin)
    return (if_right - if_wrong) / (1 - 2 * label_smoothing)


def ipo(pairs: Pairs, *, beta: float) -> Tensor:
    """(margin per token - 1 / (2 beta))^2.

    Source: IPO (arXiv:2310.12036, eq. 17, where beta is tau). Log ratios are means over
    tokens, as in the experiments of the paper according to its authors.
    """
    return (pairs.mean_margin - 1 / (2 * beta)) ** 2


def hinge(pairs: Pairs, *, beta: float) -> Tensor:
    """max(0, 1 - beta * margin).

    Source: SLiC (arXiv:2305.10425), with log ratios as in RSO (arXiv:2309.06657).
    """
    return (1 - beta * pairs.margin).relu()


def sigmoid_norm(pairs: Pairs, *, beta: float) -> Tensor:
    """-log sigmoid(beta * margin per token).

    Source: length-normalised DPO (Tulu 3, arXiv:2411.15124).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * pairs.mean_margin)


def simpo(pairs: Pairs, *, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta * difference of log-probs per token - gamma).

    Source: SimPO (arXiv:2405.14734, eq. 6).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * pairs.mean_margin - gamma)


def orpo(pairs: Pairs, *, beta: float) -> Tensor:
    """Negative log-likelihood of the chosen response, and beta times an odds ratio's.

    The second term is -log sigmoid(log odds(chosen) - log odds(rejected)), with
    odds(p) = p / (1 - p) of the geometric mean p of a response's probabilities.

    Source: ORPO (arXiv:2403.07691, eqs. 6 and 7, where beta is lambda).
    """
    from torch.nn.functional import logsigmoid

    chosen = pairs.chosen_ratio / pairs.chosen_tokens
    rejected = pairs.rejected_ratio / pairs.rejected_tokens
    odds_ratio = (chosen - _log_1_minus_exp(chosen)) - (
        rejected - _log_1_minus_exp(rejected)
    )
    return -chosen - beta * logsigmoid(odds_ratio)


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """1 - sigmoid(beta * log ratio of chosen) + sigmoid(beta * that of rejected).

    It makes chosen responses more likely, and rejected ones less.

    Source: APO-zero (arXiv:2408.06266, eq. 7).
    """
    chosen = (beta * pairs.chosen_ratio).sigmoid()
    return 1 - chosen + (beta * pairs.rejected_ratio).sigmoid()


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """sigmoid(beta * log ratio of chosen) + 1 - sigmoid(beta * margin).

    It makes chosen responses less likely, and rejected ones even less: for data that is
    worse than what the model writes.

    Source: APO-down (arXiv:2408.06266, eq. 8).
    """
    chosen = (beta * pairs.chosen_ratio).sigmoid()
    return chosen + 1 - (beta * pairs.margin).sigmoid()


def kto(
    responses: LabelledResponses,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """weight * (1 - sigmoid(beta * (log ratio - kl))) of a desirable response.

    Of an undesirable one the difference has the other sign.

    Source: KTO (arXiv:2402.01306, eq. 8), where the weights are lambda_D and lambda_U.
    """
    gain = responses.log_ratio - responses.kl
    return _by_label(responses, beta * gain, desirable_weight, undesirable_weight)


def apo_zero_unpaired(
    responses: LabelledResponses,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """weight * (1 - sigmoid(beta * log ratio)) of a desirable response.

    Of an undesirable one the log ratio has the other sign.

    Source: APO-zero (arXiv:2408.06266, eq. 7), whose two terms judge one response each.
    """
    gain = responses.log_ratio
    return _by_label(responses, beta * gain, desirable_weight, undesirable_weight)


def _by_label(
    responses: LabelledResponses,
    gain: Tensor,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return weight * (1 - sigmoid(+-gain)), [responses]."""
    return (desirable_weight * (-gain).sigmoid()).where(
        responses.is_desirable, undesirable_weight * gain.sigmoid()
    )


def _log_1_minus_exp(log_prob: Tensor) -> Tensor:
    """Return log(1 - p) of log p < 0; at p = 1 the value next to it."""
    import torch

    tiny = -torch.finfo(log_prob.dtype).eps
    bounded = log_prob.clamp(max=tiny)
    # Each form is exact on its side of log p = -log 2 (M. Maechler, 2012).
    far = torch.log1p(-bounded.exp())
    near = torch.log(-torch.expm1(bounded))
    return torch.where(bounded < -0.6931472, far, near)


DECLARED = by_name(
    PreferenceLoss(
        name="sigmoid",
        paper="DPO (arXiv:2305.18290, eq. 7)",
        function=sigmoid,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="cdpo",
        paper="cDPO (Mitchell, A note on DPO with noisy preferences, 2023)",
        function=cdpo,
        reads={BETA: 0.1, LABEL_SMOOTHING: 0.1},
    ),
    PreferenceLoss(
        name="robust",
        paper="robust DPO (arXiv:2403.00409)",
        function=robust,
        reads={BETA: 0.1, LABEL_SMOOTHING: 0.1},
    ),
    PreferenceLoss(
        name="ipo",
        paper="IPO (arXiv:2310.12036, eq. 17)",
        function=ipo,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="hinge",
        paper="SLiC (arXiv:2305.10425)",
        function=hinge,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="sigmoid_norm",
        paper="length-normalised DPO (arXiv:2411.15124)",
        function=sigmoid_norm,
        reads={BETA: 5.0},
    ),
    PreferenceLoss(
        name="simpo",
        paper="SimPO (arXiv:2405.14734, eq. 6)",
        function=simpo,
        has_reference=False,
        reads={BETA: 2.0, GAMMA: 1.0},
    ),
    PreferenceLoss(
        name="orpo",
        paper="ORPO (arXiv:2403.07691, eq. 6)",
        function=orpo,
        has_reference=False,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="apo_zero",
        paper="APO-zero (arXiv:2408.06266, eq. 7)",
        function=apo_zero,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="apo_down",
        paper="APO-down (arXiv:2408.06266, eq. 8)",
        function=apo_down,
        reads={BETA: 0.1},
    ),
    PreferenceLoss(
        name="kto",
        paper="KTO (arXiv:2402.01306, eq. 8)",
        function=kto,
        is_unpaired=True,
        needs_kl=True,
        reads={BETA: 0.1, DESIRABLE_WEIGHT: 1.0, UNDESIRABLE_WEIGHT: 1.0},
    ),
    PreferenceLoss(
        name="apo_zero_unpaired",
        paper="APO-zero (arXiv:2408.06266, eq. 7), unpaired",
        function=apo_zero_unpaired,
        is_unpaired=True,
        reads={BETA: 0.1, DESIRABLE_WEIGHT: 1.0, UNDESIRABLE_WEIGHT: 1.0},
    ),
)


DECLARED_SETTINGS = tuple(
    dict.fromkeys(setting for loss in DECLARED.values() for setting in loss.reads)
)
"""Every setting that a loss reads."""


def as_losses_of_pairs(returned: Any, pairs: Pairs) -> Tensor:
    """Return what a user's loss has returned, as one number per pair.

    Raises:
        ValueError: It is something else.
    """
    import torch

    if not isinstance(returned, torch.Tensor):
        raise ValueError(f"{type(returned).__name__}, no tensor")
    if returned.shape != pairs.chosen.shape:
        raise ValueError(
            f"a tensor of shape {tuple(returned.shape)}; expected one number per pair,"
            f" {tuple(pairs.chosen.shape)}"
        )
    return returned


def _own_loss(spec: str, settings: Mapping[Setting, object]) -> PreferenceLoss:
    reads, _ = keywords_of(spec, ("pairs",), settings, section="preference")
    return PreferenceLoss(
        name=spec,
        paper="a function of your own",
        function=OwnFunction(spec, as_losses_of_pairs),
        reads=reads,
    )


PREFERENCE_LOSSES: Choices[PreferenceLoss] = Choices(DECLARED, _own_loss)
"""The choices of `preference.loss`, and the user's own functions."""
