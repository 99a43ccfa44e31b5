"""A reward model, from pairs of a better and a worse response: `train --config-name reward_model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.data import PreferenceDataConfig
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.schema import Config
from verl_ray.config.section import NonNegativeFloat, Positive, Section


class PreferenceConfig(Section):
    batch_size: Positive
    """Pairs per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    margin: NonNegativeFloat | Literal["record"]
    """By how much the chosen response should score higher; record = each pair's own `margin`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """How often the preference is taken to be the wrong way round."""


class PreferenceEvaluationConfig(Section):
    num_pairs: Positive | None
    """The first N held-out pairs; null = all."""


class RewardModelConfig(Config):
    data: PreferenceDataConfig
    reward: SupervisedRole
    preference: PreferenceConfig
    evaluation: PreferenceEvaluationConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"reward": self.reward}

    def head_of(self, role: str) -> Literal["policy", "value"]:
        return "value"

    @property
    def drawn_per_step(self) -> int:
        """Pairs."""
        return self.preference.batch_size

    @property
    def rows_per_step(self) -> int:
        """Two rows per pair."""
        return 2 * self.preference.batch_size

    @property
    def step_in_words(self) -> str:
        return f"{self.preference.batch_size} pairs = {self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """The rows of a pair."""
        return 2

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.preference.max_tokens, "preference.max_tokens"
