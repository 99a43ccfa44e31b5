"""Supervised fine-tuning: `train --config-name sft`."""

from __future__ import annotations

from verl_ray.config.data import RowFormat
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rules.run import stopping_is_measured
from verl_ray.config.schema import Config
from verl_ray.config.section import Fraction, Positive, Section


class SupervisedConfig(Section):
    """The rows of a step, and when the run stops."""

    batch_size: Positive
    """Rows per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    stop_at_accuracy: Fraction | None
    """Stop once held-out greedy accuracy reaches this; null = train for
    run.total_steps."""


class SupervisedEvaluationConfig(Section):
    """The evaluation on held-out rows.

    Greedy accuracy and loss are read from one forward pass.
    """

    num_prompts: Positive | None
    """The first N held-out rows; null = all."""


class SFTConfig(Config):
    """A run that fine-tunes the actor on rows with given responses."""

    actor: SupervisedRole
    sft: SupervisedConfig
    evaluation: SupervisedEvaluationConfig

    own_rules = (stopping_is_measured,)

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"actor": self.actor}

    @property
    def main_metric(self) -> str:
        # Long answers are hardly ever right word by word, so the loss tells more.
        return "val-core/held_out/loss"

    @property
    def examples_per_step(self) -> int:
        """Number of rows per step."""
        return self.sft.batch_size

    @property
    def row_format(self) -> RowFormat:
        return RowFormat("supervised", self.sft.max_tokens, "sft.max_tokens")

    @property
    def examples_key(self) -> str:
        return "sft.batch_size"

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.sft.max_tokens, "sft.max_tokens"
