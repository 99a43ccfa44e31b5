"""Objectives of policies on preferences, for tests."""

from __future__ import annotations

from typing import Any

from verl_ray.config.tasks.dpo import PolicyPreferenceConfig
from verl_ray.learning.preference_objective import (
    PolicyPreferenceObjective,
    UnpairedPreferenceObjective,
)

USUAL = {
    "batch_size": 4, "max_tokens": 64, "beta": None, "label_smoothing": None, "gamma": None, "rpo_alpha": None,
    "desirable_weight": None, "undesirable_weight": None,
}  # fmt: skip


def preference_objective(loss: str, **settings: Any) -> PolicyPreferenceObjective:
    """Return the objective of a loss, with its usual settings and these."""
    values = {**USUAL, "loss": loss, **settings}
    return PolicyPreferenceObjective(PolicyPreferenceConfig.model_validate(values))


def unpaired_objective(
    loss: str, kl: float | None = None, **settings: Any
) -> UnpairedPreferenceObjective:
    """Return the objective of a loss of single responses, likewise."""
    return UnpairedPreferenceObjective(
        preference_objective(loss, **settings).config, kl
    )
