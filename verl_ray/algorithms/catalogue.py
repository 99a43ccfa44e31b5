"""The choices of an algorithm whose functions need torch, and the settings of all.

Invariant: light, and the only place that lists these choices; a function is named by
its import address, and imported when it is called. Deliberately not here: advantages
(`advantages.py`) and aggregations (`row_weights.py`), which NumPy computes and which
are declared next to their functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.config.section import PositiveFloat
from verl_ray.lazy import Lazy

# ----------------------------------------------------------------------- policy losses

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


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Declaration):
    """A choice of `algorithm.policy_loss`.

    Attributes:
        function: Maps (log_probs, old_log_probs, advantages), float32 [T] each over
            response tokens, and its settings to a TokenLoss. With one update per batch
            `old_log_probs` is `log_probs.detach()`.
        has_ratio: True if tokens are weighted by their ratio to the old policy, which
            corrects for several updates on the same rollouts.
    """

    function: Lazy
    has_ratio: bool


POLICY_LOSSES = by_name(
    PolicyLoss(
        name="ppo_clip",
        paper="PPO (arXiv:1707.06347)",
        function=Lazy("verl_ray.algorithms.losses:ppo_clip"),
        has_ratio=True,
        reads={CLIP_LOW: 0.2, CLIP_HIGH: 0.2, DUAL_CLIP: None},
    ),
    PolicyLoss(
        name="reinforce",
        paper="Williams, 1992",
        function=Lazy("verl_ray.algorithms.losses:reinforce"),
        has_ratio=False,
    ),
)

# ----------------------------------------------------- divergence from the reference


@dataclass(frozen=True, kw_only=True)
class KLEstimator(Declaration):
    """A choice of `algorithm.kl.estimator`.

    Attributes:
        function: Maps (log_probs, ref_log_probs), arrays or tensors, to an estimate per
            element.
        has_gradient: True if its gradient, as a loss, is not 0 in expectation.
    """

    function: Lazy
    has_gradient: bool = True


_SCHULMAN = "Schulman, Approximating KL divergence (2020)"

KL_ESTIMATORS = by_name(
    KLEstimator(
        name="k1",
        paper=_SCHULMAN,
        function=Lazy("verl_ray.ops.kl:k1"),
        has_gradient=False,
    ),
    KLEstimator(name="k2", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k2")),
    KLEstimator(name="k3", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k3")),
    KLEstimator(
        name="abs",
        paper="the mean bounds that of |k1|",
        function=Lazy("verl_ray.ops.kl:absolute"),
    ),
)

# ------------------------------------- corrections of a mismatch of sampler and trainer


@dataclass(frozen=True, kw_only=True)
class Correction(Declaration):
    """A choice of `algorithm.correction.kind`.

    Attributes:
        function: Maps (ratio float32 [T], lower, upper) to (weight float32 [T], mask
            bool [T]), where the mask is False at tokens that leave the loss.
        two_sided: True if there is a lower bound as well.
        weights_by_ratio: True if tokens are weighted by their ratio; False: by 1.
        drops_tokens: True if tokens beyond a bound leave the loss.
    """

    function: Lazy
    two_sided: bool = False
    weights_by_ratio: bool = True
    drops_tokens: bool = True


_LIU = "Liu et al., When speed kills stability (2025)"

CORRECTIONS = by_name(
    Correction(
        name="tis",
        paper="Ionides, 2008",
        function=Lazy("verl_ray.algorithms.correction:tis"),
        drops_tokens=False,
    ),
    Correction(
        name="mis", paper=_LIU, function=Lazy("verl_ray.algorithms.correction:mis")
    ),
    Correction(
        name="icepop",
        paper="IcePop (arXiv:2510.18855)",
        function=Lazy("verl_ray.algorithms.correction:icepop"),
        two_sided=True,
    ),
    Correction(
        name="reject",
        paper=_LIU,
        function=Lazy("verl_ray.algorithms.correction:reject"),
        two_sided=True,
        weights_by_ratio=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class CorrectionLevel(Declaration):
    """A choice of `algorithm.correction.level`.

    Attributes:
        function: Maps (log_ratio float32 [T], row int64 [T]) to the logarithm of the
            ratio that is bounded, float32 [T].
    """

    function: Lazy


LEVELS = by_name(
    CorrectionLevel(
        name="token",
        paper="Yao et al., 2025",
        function=Lazy("verl_ray.algorithms.correction:token_log_ratio"),
    ),
    CorrectionLevel(
        name="sequence",
        paper=_LIU,
        function=Lazy("verl_ray.algorithms.correction:sequence_log_ratio"),
    ),
    CorrectionLevel(
        name="geometric",
        paper=_LIU,
        function=Lazy("verl_ray.algorithms.correction:geometric_log_ratio"),
    ),
)

# ---------------------------------------------------------------- settings of formulas

CHOICES: Mapping[str, Mapping[str, Declaration]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
}
"""The choices that read settings, by the key of `algorithm` that makes the choice."""


def declared_settings() -> dict[Setting, list[str]]:
    """Return every setting, with the keys in `CHOICES` whose choices may read it."""
    readers: dict[Setting, list[str]] = {}

    for key, table in CHOICES.items():
        for declaration in table.values():
            for setting in declaration.reads:
                # Several choices of one key may read a setting.
                keys = readers.setdefault(setting, [])
                if key not in keys:
                    keys.append(key)

    names = {setting.name for setting in readers}
    assert len(names) == len(readers), "each setting is declared once"
    return readers
