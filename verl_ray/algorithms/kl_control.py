"""What one nat of divergence from the reference policy costs, and how that changes over the run.

Invariant: the coefficient depends on the configuration, the divergences seen so far, and nothing else; `state()`
holds all of it, and is part of the checkpoint. Not here: the estimators (`ops/kl.py`).
"""

from __future__ import annotations

from math import isfinite
from typing import Protocol

from verl_ray.config.algorithm import KLConfig
from verl_ray.errors import CheckpointError, NonFiniteError

MAX_ERROR = 0.2
"""The relative error acted on in one update (arXiv:1909.08593, section 2.2)."""


class KLController(Protocol):
    @property
    def coefficient(self) -> float:
        """What one nat costs now, >= 0."""

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """Take note of the mean divergence per response (nats, summed over its tokens) of the step's rollouts."""

    def state(self) -> dict[str, float]:
        """All that `load_state` needs to continue."""

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a state of the same kind of controller; raises CheckpointError on another."""


class FixedKL:
    """The coefficient of the configuration, always. Its state is empty: a resumed run obeys its configuration."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        _check_state(state, set(), "fixed")


class AdaptiveKL:
    """Raises the coefficient while the divergence is above `target` (nats per response), and lowers it below.

    Ziegler et al. (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2) and
    coefficient *= 1 + K * e. Deviation: K is 0.1 per step in the paper; here it is num_rollouts / horizon, at most 1,
    so that the pace does not depend on the number of rollouts per step and the coefficient never turns negative.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        self._coefficient, self._target, self._horizon = coefficient, target, horizon

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """As the contract says; raises NonFiniteError on a divergence that is not finite, and changes nothing."""
        if not isfinite(mean_kl):
            raise NonFiniteError(
                f"the mean divergence from the reference policy over {num_rollouts} rollouts is {mean_kl}; expected a "
                "finite number (algorithm.kl.estimator)"
            )
        error = min(max(mean_kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self._coefficient *= 1 + error * min(num_rollouts / self._horizon, 1)

    def state(self) -> dict[str, float]:
        return {"coefficient": self._coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        _check_state(state, {"coefficient"}, "adaptive")
        self._coefficient = state["coefficient"]


def _check_state(state: dict[str, float], keys: set[str], kind: str) -> None:
    if state.keys() != keys:
        raise CheckpointError(
            f"the checkpoint's KL controller holds {sorted(state)}, but a {kind} one holds {sorted(keys)}: "
            "algorithm.kl.controller is not what it was when the checkpoint was written"
        )


def make(config: KLConfig) -> KLController:
    """The controller that `algorithm.kl` asks for; without a place for the divergence, one that charges nothing."""
    if config.place == "none":
        return FixedKL(0.0)
    assert config.coefficient is not None, "the configuration requires a coefficient where there is a place"
    if config.controller == "adaptive":
        assert config.target is not None and config.horizon is not None, "required with the adaptive controller"
        return AdaptiveKL(config.coefficient, config.target, config.horizon)
    return FixedKL(config.coefficient)
