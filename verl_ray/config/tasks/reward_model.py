"""Training of a reward model: `train --config-name reward_model`.

It learns from pairs of a better and a worse response to the same prompt.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl_ray.config.data import PreferenceDataConfig, RowFormat
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.schema import Config
from verl_ray.settings.section import NonNegativeFloat, Positive, Section


class PreferenceConfig(Section):
    """The loss on pairs, and their number and size."""

    batch_size: Positive
    """Pairs per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    margin: NonNegativeFloat | Literal["record"]
    """Margin by which the chosen response should score higher; record = each pair's own
    `margin`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """Probability with which a pair is taken to be the wrong way round."""


class PreferenceEvaluationConfig(Section):
    """The evaluation on held-out pairs."""

    num_pairs: Positive | None
    """The first N held-out pairs; null = all."""


class RewardModelConfig(Config):
    """A run that trains a reward model on pairs of responses."""

    data: PreferenceDataConfig
    reward: SupervisedRole
    preference: PreferenceConfig
    evaluation: PreferenceEvaluationConfig

    main_metrics: ClassVar[str] = "val-core/held_out/pair_accuracy"

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"reward": self.reward}

    def head_of(self, role: str) -> Literal["policy", "value"]:
        return "value"

    @property
    def examples_per_step(self) -> int:
        """Number of pairs per step."""
        return self.preference.batch_size

    @property
    def examples_key(self) -> str:
        return "preference.batch_size"

    @property
    def rows_per_step(self) -> int:
        """Number of rows per step, two for each pair."""
        return 2 * self.preference.batch_size

    @property
    def step_in_words(self) -> str:
        return f"{self.preference.batch_size} pairs = {self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """Number of rows of a pair."""
        return 2

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(
            "preference",
            self.preference.max_tokens,
            "preference.max_tokens",
            self.data,
            self.preference.margin,
        )

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.preference.max_tokens, "preference.max_tokens"
