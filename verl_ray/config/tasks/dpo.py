"""Preferences without a reward model: `train --config-name dpo`.

The policy learns from pairs of a better and a worse response to the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.data import RowFormat
from verl_ray.config.pairs import PairsConfig, PreferenceTaskConfig
from verl_ray.config.preference import PreferenceLossConfig, loss_settings_are_read
from verl_ray.config.roles import (
    ModelRole,
    ReferenceRole,
    SupervisedRole,
    reference_settings_are_used,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import OverriddenKeys


class PolicyPreferenceConfig(PreferenceLossConfig, PairsConfig):
    """The loss of the policy on pairs, and their number and size."""


class DPOConfig(PreferenceTaskConfig):
    """A run that trains a policy on pairs of responses."""

    actor: SupervisedRole
    reference: ReferenceRole
    preference: PolicyPreferenceConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        roles: dict[str, ModelRole] = {"actor": self.actor}
        if self.has_reference:
            roles["reference"] = self.reference
        return roles

    def active_models(self, *, learns: bool) -> dict[str, ModelRole]:
        # Implicit rewards of held-out pairs are ratios to the reference.
        return self.model_roles

    @property
    def has_reference(self) -> bool:
        """Whether a reference role is created."""
        return self.preference.declared.has_reference and not self.reference_is_base

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor without its adapter is the reference."""
        same_model = self.reference.model.is_same(self.actor.model)
        has_adapter = self.actor.lora.rank > 0
        return self.preference.declared.has_reference and has_adapter and same_model

    @property
    def row_format(self) -> RowFormat:
        max_tokens = self.preference.max_tokens
        return RowFormat("preference", max_tokens, "preference.max_tokens", self.data)

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        yield from super().problems(overridden)
        yield from loss_settings_are_read(self.preference)
        without = f"preference.loss={self.preference.loss} has no reference"
        yield from reference_settings_are_used(self, without, overridden)
