"""Supervised fine-tuning: `train --config-name sft`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from verl_ray.config.data import RecordKind, RowFormat
from verl_ray.config.distill import TeacherFileConfig, divergence_of_a_file_is_read
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.run import RolloutTrackingConfig, rollout_bound_is_used
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.settings.section import Fraction, OverriddenKeys, Positive, Section


class SupervisedConfig(TeacherFileConfig):
    """The rows of a step, and when the run stops."""

    batch_size: Positive
    """Rows per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    stop_at_accuracy: Fraction | None
    """Stop once held-out greedy accuracy reaches this; null = train for
    run.total_steps."""


LIKELIHOOD: Mapping[str, object] = {"divergence": None, "top_k": 1, "beta": None}
"""Settings of `sft` that learn responses alone, without a teacher."""


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
    tracking: RolloutTrackingConfig

    # Long answers are hardly ever right word by word, so the loss tells more.
    main_metrics: ClassVar[str] = "val-core/held_out/loss"

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"actor": self.actor}

    @property
    def examples_per_step(self) -> int:
        """Number of rows per step."""
        return self.sft.batch_size

    @property
    def row_format(self) -> RowFormat:
        kind: RecordKind = "teacher" if self.sft.num_top else "supervised"
        return RowFormat(
            kind, self.sft.max_tokens, "sft.max_tokens", top_k=self.sft.num_top
        )

    @property
    def num_top(self) -> int:
        return self.sft.num_top

    @property
    def examples_key(self) -> str:
        return "sft.batch_size"

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.sft.max_tokens, "sft.max_tokens"

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        yield from super().problems(overridden)
        yield from rollout_bound_is_used(self.tracking, overridden)
        yield from stopping_is_measured(self)
        yield from divergence_of_a_file_is_read(self.sft, overridden)


def stopping_is_measured(config: SFTConfig) -> Iterator[Problem]:
    """Yield a problem if a run stops at an accuracy that it does not measure."""
    accuracy = config.sft.stop_at_accuracy
    if accuracy is not None and config.run.evaluate_every == 0:
        rule = (
            "the accuracy is measured by evaluating, and run.evaluate_every=0 turns"
            " that off"
        )
        fix = "Use null, or run.evaluate_every=10."
        yield Problem("sft.stop_at_accuracy", accuracy, rule, fix)
