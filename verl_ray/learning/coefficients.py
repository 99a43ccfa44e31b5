"""The coefficients of divergence and entropy in the loss, and their course over a run.

Invariant: a coefficient depends on the configuration, what was measured in the steps so
far, and nothing else. `state()` holds all of it, and is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Protocol

from verl_ray.config.algorithm import AlgorithmConfig, KLConfig
from verl_ray.errors import CheckpointError, NonFiniteError

MAX_ERROR = 0.2
"""The largest relative error that an update acts on (arXiv:1909.08593, section 2.2)."""


class KLController(Protocol):
    """The owner of the coefficient."""

    @property
    def coefficient(self) -> float:
        """The present cost of a nat, >= 0."""

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """Take the divergence of a step's rollouts into account.

        Args:
            mean_kl: Mean over responses of the divergence, summed over their tokens, in
                nats.
            num_rollouts: Number of responses.
        """

    def state(self) -> dict[str, float]:
        """Return everything that `load_state` needs to continue."""

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from the state of a controller of the same kind.

        Raises:
            CheckpointError: The state is of another kind of controller.
        """


class FixedKL:
    """The coefficient of the configuration, throughout the run.

    Its state is empty: a resumed run uses its configuration.
    """

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """Change nothing."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        _check_state(state, set(), "fixed")


class AdaptiveKL:
    """A coefficient that rises while the divergence is above a target, and falls below.

    Ziegler et al. (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target,
    -0.2, 0.2) and coefficient *= 1 + K * e. Deviation: K is 0.1 per step in the paper;
    here it is num_rollouts / horizon, at most 1, so that the pace does not depend on
    the number of rollouts per step and the coefficient never turns negative.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        """Begin with a coefficient.

        Args:
            coefficient: The initial cost of a nat.
            target: The divergence to aim at, in nats per response.
            horizon: Number of rollouts over which K adds up to 1.
        """
        self._coefficient = coefficient
        self._target = target
        self._horizon = horizon

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, mean_kl: float, num_rollouts: int) -> None:
        """Take the divergence of a step's rollouts into account.

        Raises:
            NonFiniteError: The divergence is not finite; nothing changes then.
        """
        if not isfinite(mean_kl):
            raise NonFiniteError(
                f"the mean divergence from the reference policy over {num_rollouts}"
                f" rollouts is {mean_kl}; expected a finite number"
                " (algorithm.kl.estimator)"
            )

        # Both factors are bounded, so one unusual step changes the coefficient little.
        error = min(max(mean_kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        gain = min(num_rollouts / self._horizon, 1)
        self._coefficient *= 1 + error * gain

    def state(self) -> dict[str, float]:
        return {"coefficient": self._coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        _check_state(state, {"coefficient"}, "adaptive")
        self._coefficient = state["coefficient"]


def _check_state(state: dict[str, float], keys: set[str], kind: str) -> None:
    """Raise CheckpointError if the state is of another kind of controller."""
    if state.keys() != keys:
        raise CheckpointError(
            f"the checkpoint's KL controller holds {sorted(state)}, but a {kind} one"
            f" holds {sorted(keys)}: algorithm.kl.controller is not what it was when"
            " the checkpoint was written"
        )


def make_kl_controller(config: KLConfig) -> KLController:
    """Return the controller that the section `algorithm.kl` describes.

    If the divergence is charged nowhere, the controller's coefficient is 0.
    """
    if config.place == "none":
        return FixedKL(0.0)

    assert config.coefficient is not None, (
        "the configuration requires a coefficient where there is a place"
    )
    if config.controller == "adaptive":
        assert config.target is not None and config.horizon is not None, (
            "required with the adaptive controller"
        )
        return AdaptiveKL(config.coefficient, config.target, config.horizon)

    return FixedKL(config.coefficient)


# ---------------------------------------------------------- the weight of the entropy


ENTROPY_PER_TOKEN = "actor/entropy_per_token"
"""The token mean of the entropy, in nats. actor/entropy is aggregated like the loss."""


class EntropyControl:
    """A weight that grows while the entropy is below a target, and falls above it.

    Without algorithm.entropy_target it is algorithm.entropy_coefficient throughout.

    Source: Skywork-OR1 (arXiv:2505.22312, section 4), with a step of 0.005: after each
    training step the weight grows by `entropy_step` if the entropy was below the
    target, else it falls by as much, within [0, entropy_max]; it counts only while the
    entropy is below. Deviation: the entropy is that of the last step's updates, not of
    the rollouts at hand.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self._weight = algorithm.entropy_coefficient
        self._is_low = True

    @property
    def coefficient(self) -> float:
        """The weight of the entropy in the next step's loss, >= 0."""
        return self._weight if self._is_low else 0.0

    def update(self, metrics_of_updates: Mapping[str, float]) -> dict[str, float]:
        """Take the entropy per token of a step's updates into account.

        Returns:
            The metric actor/entropy_coefficient of that step; none without a target.
        """
        algorithm = self._algorithm
        if algorithm.entropy_target is None:
            return {}
        metrics = {"actor/entropy_coefficient": self.coefficient}
        entropy = metrics_of_updates[ENTROPY_PER_TOKEN]
        if not isfinite(entropy):
            return metrics
        step, largest = algorithm.entropy_step, algorithm.entropy_max
        assert step is not None and largest is not None, "required with a target"

        self._is_low = entropy < algorithm.entropy_target
        change = step if self._is_low else -step
        self._weight = min(max(self._weight + change, 0.0), largest)
        return metrics

    def state(self) -> dict[str, float]:
        """Return everything that `load_state` needs to continue."""
        if self._algorithm.entropy_target is None:
            return {}
        return {"weight": self._weight, "is_low": float(self._is_low)}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a state; without a target there is none, and none is taken."""
        if self._algorithm.entropy_target is not None and state:
            self._weight = state["weight"]
            self._is_low = bool(state["is_low"])
