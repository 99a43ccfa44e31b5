"""The loss of a policy on preferences, without the number and size of pairs."""

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
from verl_ray.errors import Problem
from verl_ray.settings.section import OneOf, PositiveFloat, Section
from verl_ray.suggest import either

PreferenceLossName = Annotated[
    str, OneOf(PREFERENCE_LOSSES, own_function_of(PREFERENCE_LOSSES)), *FUNCTION_AS_TEXT
]

_FIELDS = fields_of_settings(DECLARED_SETTINGS, "loss")
_ReadByLosses = create_model("_ReadByLosses", __base__=Section, **_FIELDS)


class PreferenceLossConfig(_ReadByLosses):
    """The loss of a policy on preferences."""

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


# -------------------------------------------------------------------------------- rules


def loss_settings_are_read(preference: PreferenceLossConfig) -> Iterator[Problem]:
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
