"""The weight of the entropy bonus, and its course over a run.

Invariant: the weight depends on the configuration, the entropies of the steps so far,
and nothing else. `state()` holds all of it, and is part of the checkpoint. Deliberately
not here: the entropy itself (`ops/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from verl_ray.config.algorithm import AlgorithmConfig

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
