"""The choices of `algorithm.policy_loss`, and their settings.

Invariant: light, since the configuration reads it; the functions import torch when they
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_ray.algorithms import policy_losses, sequence_losses, token_selection
from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.own_functions import Choices, OwnFunction, keywords_of
from verl_ray.config.function_specs import in_words
from verl_ray.config.section import PositiveFloat
from verl_ray.data.stages import Bool

CLIP_LOW = Setting(
    "clip_low", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high]."
)
CLIP_HIGH = Setting(
    "clip_high", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high]."
)
DUAL_CLIP = Setting(
    "dual_clip",
    Annotated[float, Field(gt=1)],
    "Lower bound of the surrogate at negative advantages, as a multiple of the"
    " advantage; null = none.",
)


RATIO_MIN = Setting(
    "ratio_min", PositiveFloat, "Lower bound of the ratio itself; null = none."
)
RATIO_MAX = Setting("ratio_max", PositiveFloat, "Upper bound of the ratio itself.")
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
DISTANCE_PENALTY = Setting(
    "distance_penalty",
    PositiveFloat,
    "Weight of the squared distance of log-probs from the old policy.",
)
POWER_POSITIVE = Setting(
    "power_positive", PositiveFloat, "Power of the ratio at advantages >= 0."
)
POWER_NEGATIVE = Setting(
    "power_negative", PositiveFloat, "Power of the ratio at negative advantages."
)
RATE_POSITIVE = Setting(
    "rate_positive", PositiveFloat, "Decay in the ratio at advantages >= 0."
)
SECOND_MOMENT = Setting(
    "second_moment",
    PositiveFloat,
    "Largest mean of squared log ratios to the sampler; tokens beyond are left out.",
)
COV_SHARE = Setting(
    "cov_share",
    Annotated[float, Field(gt=0, lt=1)],
    "Share of the tokens of a mini-batch that is chosen by covariance.",
)
COV_MIN = Setting("cov_min", float, "Covariances below are not chosen.")
COV_MAX = Setting("cov_max", float, "Covariances above are not chosen.")
COV_PENALTY = Setting(
    "cov_penalty", PositiveFloat, "Weight of |log ratio| at the chosen tokens."
)
RATE_NEGATIVE = Setting(
    "rate_negative", PositiveFloat, "Decay in the ratio at negative advantages."
)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Declaration):
    """A choice of `algorithm.policy_loss`.

    Attributes:
        function: Maps PolicyTokens and its settings to a TokenLoss.
        has_ratio: True if tokens are weighted by their ratio to the old policy, which
            corrects for several updates on the same rollouts.
        needs_another_policy: True if it is nothing but the policy gradient while the
            old policy is the one that learns.
        sequence: What it judges as a whole: a token, or a row.
        is_per_row: True if a row has one loss, which each of its tokens bears.
        bounds_ratio: True if it bounds the effect of any ratio itself, large or small,
            so that a mask of such tokens would make another loss of it.
        selection: What chooses tokens from the whole mini-batch before it is learned
            from; None if the loss needs no choice. It maps SelectableTokens and its
            settings to a mask.
        selection_reads: The settings of `reads` that the selection takes, and not the
            loss.
    """

    function: Callable[..., TokenLoss]
    has_ratio: bool = True
    needs_another_policy: bool = True
    sequence: Literal["token", "row"] = "token"
    is_per_row: bool = False
    bounds_ratio: bool = False
    selection: Callable[..., Bool] | None = None
    selection_reads: tuple[Setting, ...] = ()

    @property
    def corrected_as(self) -> Literal["tokens", "rows", "itself"]:
        """The unit that a correction of older tokens judges, if the loss needs one."""
        if self.bounds_ratio:
            return "itself"
        return "rows" if self.is_per_row else "tokens"

    def settings(self, algorithm: object) -> dict[str, Any]:
        of_selection = {setting.name for setting in self.selection_reads}
        return {
            name: value
            for name, value in super().settings(algorithm).items()
            if name not in of_selection
        }

    def selection_settings(self, algorithm: object) -> dict[str, Any]:
        """Return the keyword arguments of the selection."""
        values = super().settings(algorithm)
        return {setting.name: values[setting.name] for setting in self.selection_reads}


_CUI = "Cui et al. (arXiv:2505.22617)"

_DECLARED = by_name(
    PolicyLoss(
        name="ppo_clip",
        paper="PPO (arXiv:1707.06347)",
        function=policy_losses.ppo_clip,
        needs_another_policy=False,
        reads={CLIP_LOW: 0.2, CLIP_HIGH: 0.2, DUAL_CLIP: None},
    ),
    PolicyLoss(
        name="reinforce",
        paper="Williams, 1992",
        function=policy_losses.reinforce,
        has_ratio=False,
        needs_another_policy=False,
    ),
    PolicyLoss(
        name="cispo",
        paper="MiniMax-M1 (arXiv:2506.13585)",
        function=policy_losses.cispo,
        bounds_ratio=True,
        reads={RATIO_MIN: None, RATIO_MAX: 5.0},
    ),
    PolicyLoss(
        name="sapo",
        paper="SAPO (arXiv:2511.20347)",
        function=policy_losses.sapo,
        bounds_ratio=True,
        reads={TEMPERATURE_POSITIVE: 1.0, TEMPERATURE_NEGATIVE: 1.05},
    ),
    PolicyLoss(
        name="dppo_tv",
        paper="DPPO (arXiv:2602.04879)",
        function=policy_losses.dppo_tv,
        bounds_ratio=True,
        reads={DIVERGENCE_LOW: 0.2, DIVERGENCE_HIGH: 0.2, RATIO_MAX: 20.0},
    ),
    PolicyLoss(
        name="dppo_kl",
        paper="DPPO (arXiv:2602.04879)",
        function=policy_losses.dppo_kl,
        bounds_ratio=True,
        reads={DIVERGENCE_LOW: 0.05, DIVERGENCE_HIGH: 0.05, RATIO_MAX: 20.0},
    ),
    PolicyLoss(
        name="dro",
        paper="DRO (arXiv:2405.19107)",
        function=policy_losses.dro,
        reads={DISTANCE_PENALTY: 0.1},  # ours: no value has been published
    ),
    PolicyLoss(
        name="gspo",
        paper="GSPO (arXiv:2507.18071)",
        function=sequence_losses.gspo,
        sequence="row",
        is_per_row=True,
        reads={CLIP_LOW: 3e-4, CLIP_HIGH: 4e-4},
    ),
    PolicyLoss(
        name="gmpo",
        paper="GMPO (arXiv:2507.20673)",
        function=sequence_losses.gmpo,
        sequence="row",
        is_per_row=True,
        reads={LOG_CLIP_LOW: 0.4, LOG_CLIP_HIGH: 0.4},
    ),
    PolicyLoss(
        name="vespo",
        paper="VESPO (arXiv:2602.10693)",
        function=sequence_losses.vespo,
        bounds_ratio=True,
        sequence="row",
        reads={
            POWER_POSITIVE: 2.0,
            RATE_POSITIVE: 3.0,
            POWER_NEGATIVE: 3.0,
            RATE_NEGATIVE: 2.0,
        },
    ),
    PolicyLoss(
        name="m2po",
        paper="M2PO (arXiv:2510.01161)",
        function=policy_losses.m2po,
        bounds_ratio=True,
        needs_another_policy=False,
        selection=token_selection.smallest_second_moment,
        selection_reads=(SECOND_MOMENT,),
        reads={SECOND_MOMENT: 0.04},
    ),
    PolicyLoss(
        name="clip_cov",
        paper=_CUI,
        function=policy_losses.clip_cov,
        needs_another_policy=False,
        selection=token_selection.some_of_covariance,
        selection_reads=(COV_SHARE, COV_MIN, COV_MAX),
        reads={
            CLIP_LOW: 0.2,
            CLIP_HIGH: 0.2,
            COV_SHARE: 2e-4,
            COV_MIN: 1.0,
            COV_MAX: 5.0,
        },
    ),
    PolicyLoss(
        name="kl_cov",
        paper=_CUI,
        function=policy_losses.kl_cov,
        selection=token_selection.largest_covariance,
        selection_reads=(COV_SHARE,),
        reads={COV_SHARE: 2e-4, COV_PENALTY: 1.0},
    ),
)


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
        function=OwnFunction(spec, policy_losses.as_token_loss),
        needs_another_policy=False,
        reads=reads,
    )


POLICY_LOSSES: Choices[PolicyLoss] = Choices(_DECLARED, own_loss)
"""Every choice of `algorithm.policy_loss`, by its name."""
