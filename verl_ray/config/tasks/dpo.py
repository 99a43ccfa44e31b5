"""Preferences without a reward model: `train --config-name dpo`.

The policy learns from pairs of a better and a worse response to the same prompt, or
from single responses with labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

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
    """A run that trains a policy on pairs of responses, or on single ones."""

    actor: SupervisedRole
    reference: ReferenceRole
    preference: PolicyPreferenceConfig

    # pair_accuracy, or auc where the held-out responses have no partners.
    main_metrics: ClassVar[str] = "val-core/held_out/[ap]*"

    @property
    def main_metric(self) -> str:
        if self.preference.declared.is_unpaired:
            return self.main_metrics
        return PreferenceTaskConfig.main_metrics

    @property
    def rows_per_unit(self) -> int:
        """Number of rows that a loss compares."""
        return 1 if self.preference.declared.is_unpaired else 2

    @property
    def step_in_words(self) -> str:
        if self.preference.declared.is_unpaired:
            return f"{self.preference.batch_size} responses"
        return super().step_in_words

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
        return RowFormat(
            "unpaired" if self.preference.declared.is_unpaired else "preference",
            self.preference.max_tokens,
            "preference.max_tokens",
            self.data,
        )

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        yield from super().problems(overridden)
        yield from loss_settings_are_read(self.preference)
        yield from single_responses_suffice(self.preference)
        without = f"preference.loss={self.preference.loss} has no reference"
        yield from reference_settings_are_used(self, without, overridden)


# -------------------------------------------------------------------------------- rules


def single_responses_suffice(preference: PolicyPreferenceConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that single responses with labels cannot do."""
    if not preference.declared.is_unpaired:
        return

    if preference.rpo_alpha is not None:
        rule = f"preference.loss={preference.loss} has no chosen response of a pair"
        fix = "Set it to null, or take a loss of pairs."
        yield Problem("preference.rpo_alpha", preference.rpo_alpha, rule, fix)
    if preference.declared.needs_kl and preference.batch_size < 2:
        rule = (
            f"preference.loss={preference.loss} estimates the divergence from the"
            " reference on each prompt with the response to another one"
        )
        fix = "Set it to 2 or more, or use preference.loss=apo_zero_unpaired."
        yield Problem("preference.batch_size", preference.batch_size, rule, fix)
