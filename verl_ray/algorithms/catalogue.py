"""The choices of an algorithm whose functions need torch, and the settings of all.

Invariant: light, and the only place that lists these choices; a function is named by
its import address, and imported when it is called. Deliberately not here: losses of
the policy (`policy_loss_choices.py`), and advantages (`advantages.py`) and aggregations
(`row_weights.py`), which NumPy computes and which are declared next to their functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.lazy import Lazy

# ----------------------------------------------------- divergence from the reference


@dataclass(frozen=True, kw_only=True)
class KLEstimator(Declaration):
    """A choice of `algorithm.kl.estimator`.

    Attributes:
        function: Maps (log_probs, ref_log_probs), arrays or tensors, to an estimate per
            element.
        has_gradient: True if its gradient, as a loss, is not 0 in expectation.
        bound: The largest estimate, which stands for any larger one; None: unbounded.
        reward_form: The estimator of the same values, if this one differs from it only
            by its gradient, which a penalty in the reward does not have.
    """

    function: Lazy
    has_gradient: bool = True
    bound: float | None = None
    reward_form: str | None = None


_SCHULMAN = "Schulman, Approximating KL divergence (2020)"
_MAX_K3 = 10.0  # `ops.kl.MAX_K3`, whose module needs torch

KL_ESTIMATORS = by_name(
    KLEstimator(
        name="k1",
        paper=_SCHULMAN,
        function=Lazy("verl_ray.ops.kl:k1"),
        has_gradient=False,
    ),
    KLEstimator(name="k2", paper=_SCHULMAN, function=Lazy("verl_ray.ops.kl:k2")),
    KLEstimator(
        name="k3",
        paper=_SCHULMAN,
        function=Lazy("verl_ray.ops.kl:bounded_k3"),
        bound=_MAX_K3,
    ),
    KLEstimator(
        name="k1_straight_through",
        paper="k1 with the gradient of k2",
        function=Lazy("verl_ray.ops.kl:straight_through_k1"),
        reward_form="k1",
    ),
    KLEstimator(
        name="k3_straight_through",
        paper="k3 with the gradient of k2",
        function=Lazy("verl_ray.ops.kl:straight_through_k3"),
        bound=_MAX_K3,
        reward_form="k3",
    ),
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
        may_have_lower: True if there may be one.
        weights_by_ratio: True if tokens are weighted by their ratio; False: by 1.
        drops_tokens: True if tokens beyond a bound leave the loss.
    """

    function: Lazy
    two_sided: bool = False
    may_have_lower: bool = False
    weights_by_ratio: bool = True
    drops_tokens: bool = True


_LIU = "Liu et al., When speed kills stability (2025)"

CORRECTIONS = by_name(
    Correction(
        name="tis",
        paper="Ionides, 2008",
        function=Lazy("verl_ray.algorithms.correction:tis"),
        drops_tokens=False,
        may_have_lower=True,
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


@dataclass(frozen=True, kw_only=True)
class Rejection(Declaration):
    """A choice in `algorithm.correction.rejections`.

    Attributes:
        statistic: Maps log ratios to what is judged, float32 [T] each.
        over: Maps those and the rows, int64 [T], to a value at each token, float32 [T].
        two_sided: True if the ratio is bounded on both sides; False: there is an upper
            bound alone.
    """

    statistic: Lazy
    over: Lazy
    two_sided: bool


_REJECTION = "verl_ray.algorithms.rejection"

REJECTIONS = by_name(
    *(
        Rejection(
            name=f"{over}_{statistic}",
            paper=_LIU,
            statistic=Lazy(f"{_REJECTION}:{statistic}"),
            over=Lazy(f"{_REJECTION}:{over}"),
            two_sided=statistic == "k1",
        )
        for over, statistics in {
            "token": ("k1", "k2", "k3"),
            "seq_sum": ("k1", "k2", "k3"),
            "seq_mean": ("k1", "k2", "k3"),
            "seq_max": ("k2", "k3"),
        }.items()
        for statistic in statistics
    )
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
