"""Preferences without a reward model: `train --config-name dpo`.

The policy learns from pairs of a better and a worse response to the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import create_model

from verl_ray.algorithms.declaration import fields_of_settings
from verl_ray.algorithms.preference_losses import (
    BETA,
    DECLARED_SETTINGS,
    PREFERENCE_LOSSES,
    PreferenceLoss,
)
from verl_ray.config.algorithm import FUNCTION_AS_TEXT, own_function_of
from verl_ray.config.data import RowFormat
from verl_ray.config.pairs import PairsConfig, PreferenceTaskConfig
from verl_ray.config.roles import (
    ModelRole,
    ReferenceRole,
    SupervisedRole,
    reference_settings_are_used,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import OneOf, OverriddenKeys, PositiveFloat
from verl_ray.suggest import either

PreferenceLossName = Annotated[
    str, OneOf(PREFERENCE_LOSSES, own_function_of(PREFERENCE_LOSSES)), *FUNCTION_AS_TEXT
]

_FIELDS = fields_of_settings(DECLARED_SETTINGS, "loss")
_ReadByLosses = create_model("_ReadByLosses", __base__=PairsConfig, **_FIELDS)


class PolicyPreferenceConfig(_ReadByLosses):
    """The loss of the policy on pairs, and their number and size."""

    loss: PreferenceLossName
    """How log-probs of a pair become a loss; each names its paper
    (docs/preferences.md)."""
    rpo_alpha: PositiveFloat | None
    """Weight of the negative log-likelihood per token of the chosen response (RPO,
    arXiv:2404.19733, eq. 1); null = none."""

    @property
    def declared(self) -> PreferenceLoss:
        """The declaration of the loss."""
        return PREFERENCE_LOSSES[self.loss]

    def implicit_reward(self, log_ratio: Any, num_tokens: Any) -> Any:
        """Return the rewards that log-probs of responses stand for.

        They are beta * log(pi / pi_ref), or beta * log pi per token where the loss has
        no reference. Arguments are arrays or tensors of one shape.
        """
        # A function of the user's may have no beta, or one of its own.
        scale = self.declared.settings(self).get(BETA.name) or 1.0
        if self.declared.has_reference:
            return scale * log_ratio
        return scale * log_ratio / num_tokens


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


def loss_settings_are_read(preference: PolicyPreferenceConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that the loss does not read."""
    reads = preference.declared.reads
    for setting in DECLARED_SETTINGS:
        value = getattr(preference, setting.name)
        if value is None or setting in reads:
            continue

        readers = [
            f"preference.loss={name}"
            for name, loss in PREFERENCE_LOSSES.items()
            if setting in loss.reads
        ]
        rule = f"preference.loss={preference.loss} does not use it"
        fix = f"Set it to null, or {either(readers)}."
        yield Problem(f"preference.{setting.name}", value, rule, fix)
