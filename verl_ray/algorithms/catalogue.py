"""The estimators of a divergence, and the settings that all choices read.

Invariant: light, since the configuration is made of it. The other choices are declared
next to their functions (`advantages.py`, `policy_losses.py`, `row_weights.py`,
`correction.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.declaration import Declaration, Setting, by_name
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.ops import kl

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

    function: Callable[[Any, Any], Any]
    has_gradient: bool = True
    bound: float | None = None
    reward_form: str | None = None


_SCHULMAN = "Schulman, Approximating KL divergence (2020)"

KL_ESTIMATORS = by_name(
    KLEstimator(
        name="k1",
        paper=_SCHULMAN,
        function=kl.k1,
        has_gradient=False,
    ),
    KLEstimator(name="k2", paper=_SCHULMAN, function=kl.k2),
    KLEstimator(
        name="k3",
        paper=_SCHULMAN,
        function=kl.bounded_k3,
        bound=kl.MAX_K3,
    ),
    KLEstimator(
        name="k1_straight_through",
        paper="k1 with the gradient of k2",
        function=kl.straight_through_k1,
        reward_form="k1",
    ),
    KLEstimator(
        name="k3_straight_through",
        paper="k3 with the gradient of k2",
        function=kl.straight_through_k3,
        bound=kl.MAX_K3,
        reward_form="k3",
    ),
    KLEstimator(
        name="abs",
        paper="the mean bounds that of |k1|",
        function=kl.absolute,
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
