"""The rows of a run: their files, and what happens to rows that cannot be used.

Deliberately not here: reading them (`verl_ray/data`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.config.section import Auto, Positive, Section


class DataFilesConfig(Section):
    """Files that rows come from, and how these become tokens.

    A supervised run needs no further settings of its data.
    """

    train_path: str
    """A .jsonl or .parquet file, or a folder saved by Hugging Face datasets."""
    validation_path: str | None
    """The same for held-out problems; needed when run.evaluate_every > 0."""
    overlong: Literal["refuse", "skip"]
    """refuse = the run does not start if a prompt or row is too long; skip = such rows
    are left out and counted."""
    shuffle: bool
    """Read rows in an order seeded by run.seed and the epoch, instead of the file's."""
    apply_chat_template: bool | Auto
    """Whether prompts go through the tokenizer's chat template; auto = if it has
    one."""


class PreferenceDataConfig(DataFilesConfig):
    """Pairs of responses to a prompt, one of which is better."""

    unusable: Literal["refuse", "skip"]
    """refuse = the run does not start if the responses of a pair are equal or empty;
    skip = such pairs are left out and counted."""


class DataConfig(DataFilesConfig):
    """Prompts that rollouts are generated for."""

    prompts_per_step: Positive
    """Prompts read from train_path for each step."""
    max_prompt_tokens: Positive
    """The longest prompt, in tokens after the chat template."""
