"""Every choice of an algorithm whose function needs torch, and which choices read settings.

Invariant: light, and the only place that lists them; a function is named by its address and imported when it is called.
Deliberately not here: advantages (`advantages.py`) and aggregations (`row_weights.py`), which NumPy computes and which
are declared beside their functions.
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

# -------------------------------------------------------------------------------------------------- policy losses

CLIP_LOW = Setting("clip_low", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high].")
CLIP_HIGH = Setting("clip_high", PositiveFloat, "The ratio is clipped to [1 - clip_low, 1 + clip_high].")
DUAL_CLIP = Setting(
    "dual_clip",
    Annotated[float, Field(gt=1)],
    "Lower bound of the surrogate at negative advantages, as a multiple of the advantage; null = none.",
)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Declaration):
    """(log_probs, old_log_probs, advantages), float32 [T] each over response tokens, and its settings -> TokenLoss.

    Where one update per batch makes old and new the same, `old_log_probs` is `log_probs.detach()`.
    """

    function: Lazy
    has_ratio: bool
    """Tokens are weighed by their ratio to the old policy, which makes up for several updates on the same rollouts."""


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

# ----------------------------------------------------------------------------- the divergence from the reference


@dataclass(frozen=True, kw_only=True)
class KLEstimator(Declaration):
    """(log_probs, ref_log_probs), arrays or tensors alike -> one estimate per element."""

    function: Lazy
    has_gradient: bool = True
    """As a loss, its gradient says something in expectation."""


_SCHULMAN = "Schulman, Approximating KL divergence (2020)"

KL_ESTIMATORS = by_name(
    KLEstimator(name="k1", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k1"), has_gradient=False),
    KLEstimator(name="k2", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k2")),
    KLEstimator(name="k3", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k3")),
    KLEstimator(name="abs", paper="the mean bounds that of |k1|", function=Lazy("verl_ray.ops.kl:absolute")),
)

# ------------------------------------------------------------- corrections of what sampler and trainer disagree on


@dataclass(frozen=True, kw_only=True)
class Correction(Declaration):
    """(ratio float32 [T], lower, upper) -> (weight float32 [T], kept bool [T])."""

    function: Lazy
    two_sided: bool = False
    """It has a lower bound, too."""
    weighs: bool = True
    """What is kept is weighed by its ratio; False: by 1."""
    leaves_out: bool = True
    """Tokens beyond a bound leave the loss."""


_LIU = "Liu et al., When speed kills stability (2025)"

CORRECTIONS = by_name(
    Correction(
        name="tis", paper="Ionides, 2008", function=Lazy("verl_ray.algorithms.correction:tis"), leaves_out=False
    ),
    Correction(name="mis", paper=_LIU, function=Lazy("verl_ray.algorithms.correction:mis")),
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
        weighs=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Level(Declaration):
    """(log_ratio float32 [T], row int64 [T]) -> the logarithm of the ratio that is bounded, [T]."""

    function: Lazy


LEVELS = by_name(
    Level(name="token", paper="Yao et al., 2025", function=Lazy("verl_ray.algorithms.correction:of_token")),
    Level(name="sequence", paper=_LIU, function=Lazy("verl_ray.algorithms.correction:of_sequence")),
    Level(name="geometric", paper=_LIU, function=Lazy("verl_ray.algorithms.correction:geometric")),
)

# ------------------------------------------------------------------------------------------- settings of formulas

CHOICES: Mapping[str, Mapping[str, Declaration]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
}
"""The choices that read settings, by the key of `algorithm` that makes them."""


def settings() -> dict[Setting, list[str]]:
    """Every setting that is declared, and the keys in `CHOICES` that choose who may read it."""
    found: dict[Setting, list[str]] = {}
    for key, table in CHOICES.items():
        for setting in dict.fromkeys(setting for one in table.values() for setting in one.reads):
            found.setdefault(setting, []).append(key)
    assert len({one.name for one in found}) == len(found), "each setting is declared once"
    return found
