"""Training of a reward model: `train --config-name reward_model`.

It learns from pairs of a better and a worse response to the same prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.data import RowFormat
from verl_ray.config.pairs import PairsConfig, PreferenceTaskConfig
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.settings.section import NonNegativeFloat


class PreferenceConfig(PairsConfig):
    """The loss on pairs, and their number and size."""

    margin: NonNegativeFloat | Literal["record"]
    """Margin by which the chosen response should score higher; record = each pair's own
    `margin`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """Probability with which a pair is taken to be the wrong way round."""


class RewardModelConfig(PreferenceTaskConfig):
    """A run that trains a reward model on pairs of responses."""

    reward: SupervisedRole
    preference: PreferenceConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"reward": self.reward}

    def head_of(self, role: str) -> Literal["policy", "value"]:
        return "value"

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(
            "preference",
            self.preference.max_tokens,
            "preference.max_tokens",
            self.data,
            self.preference.margin,
        )
