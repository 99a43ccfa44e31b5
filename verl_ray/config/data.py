"""The rows of a run: which files, and what becomes of those that are too long or of no use.

Deliberately not here: reading them (`verl_ray/data`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.config.section import Auto, Positive, Section


class DataFilesConfig(Section):
    """Where rows come from and how they become tokens; all that a supervised run needs."""

    train_path: str
    """A .jsonl or .parquet file, or a folder saved by Hugging Face datasets."""
    validation_path: str | None
    """The same for held-out problems; needed when run.evaluate_every > 0."""
    overlong: Literal["refuse", "skip"]
    """What happens to a longer prompt or row: the run refuses to start, or it is left out and counted."""
    shuffle: bool
    """Draw in an order seeded by run.seed and the epoch, instead of the file's order."""
    apply_chat_template: bool | Auto
    """Whether prompts go through the tokenizer's chat template; auto = when it has one."""


class PreferenceDataConfig(DataFilesConfig):
    """Pairs of responses to one prompt, of which one is better."""

    unusable: Literal["refuse", "skip"]
    """What happens to a pair whose responses are equal or empty: the run refuses to start, or it is left out and
    counted."""


class DataConfig(DataFilesConfig):
    prompts_per_step: Positive
    """Prompts drawn from train_path for each step."""
    max_prompt_tokens: Positive
    """The longest prompt, in tokens after the chat template."""
