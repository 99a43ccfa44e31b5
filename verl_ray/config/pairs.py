"""Tasks that learn from pairs of a better and a worse response to the same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from verl_ray.config.data import PreferenceDataConfig
from verl_ray.config.run import RolloutTrackingConfig, rollout_bound_is_used
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.settings.section import OverriddenKeys, Positive, Section


class PairsConfig(Section):
    """The number and the size of pairs."""

    batch_size: Positive
    """Pairs per optimizer step, over all ranks; responses, if these have labels instead
    of partners."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""


class PairsEvaluationConfig(Section):
    """The evaluation on held-out pairs."""

    num_pairs: Positive | None
    """The first N held-out pairs, or responses with labels; null = all."""


class PreferenceTaskConfig(Config):
    """A run that learns from pairs of responses."""

    data: PreferenceDataConfig
    preference: PairsConfig
    evaluation: PairsEvaluationConfig
    tracking: RolloutTrackingConfig

    main_metrics: ClassVar[str] = "val-core/held_out/pair_accuracy"

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
        return self.rows_per_unit * self.preference.batch_size

    @property
    def step_in_words(self) -> str:
        return f"{self.preference.batch_size} pairs = {self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """Number of rows of a pair."""
        return 2

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.preference.max_tokens, "preference.max_tokens"

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        yield from super().problems(overridden)
        yield from rollout_bound_is_used(self.tracking, overridden)
