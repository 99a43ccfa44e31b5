"""Choices of algorithms with the overrides that each needs, and sections by hand."""

from __future__ import annotations

from typing import Any

from controllers.compose.listing import groups
from tests.corrections import NO_CORRECTION, NO_LIMIT
from verl_ray.algorithms.catalogue import declared_settings
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.algorithm import AlgorithmConfig

REWARDED = tuple(name for name in groups()["algorithm"] if name != "distill")
"""All but the one whose policy has a teacher alone."""

TAKES_SEVERAL_UPDATES = ("gspo", "luspo", "gmpo", "sapo", "kl_cov")
"""Their ratio is 1 with one update per step."""


def learning_at_once(algorithm: str) -> list[str]:
    """Return overrides that choose an algorithm for a run of a few steps."""
    choice = [f"algorithm={algorithm}"]
    if algorithm == "vapo":
        choice.append("algorithm.critic_warmup_steps=0")
    return choice


NO_KL: dict[str, Any] = {
    "place": "none", "estimator": None, "importance_weighted": False, "coefficient": None,
    "controller": None, "target": None, "horizon": None,
}  # fmt: skip


def with_loss(policy_loss: str, **changes: Any) -> AlgorithmConfig:
    """Return the section `algorithm` with a loss and its usual settings, and no more.

    Args:
        policy_loss: The loss.
        changes: Settings that are not as usual; `kl` may be a part of its section.
    """
    usual = {
        setting.name: value
        for setting, value in POLICY_LOSSES[policy_loss].reads.items()
    }
    kl = NO_KL | changes.pop("kl", {})
    return AlgorithmConfig.model_validate({
        **dict.fromkeys(setting.name for setting in declared_settings()), **usual,
        "name": "test", "advantage": "grpo", "whiten_advantages": False, "policy_loss": policy_loss,
        "aggregation": "token_mean", "entropy_coefficient": 0.0, "value_loss": None, "critic_warmup_steps": 0,
        "correction": NO_CORRECTION, "mismatch": NO_LIMIT, "truncated": "score", "sequence": "row", "kl": kl, **changes,
    })  # fmt: skip
