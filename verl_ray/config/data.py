"""The rows of a run: their files, and what happens to rows that cannot be used.

Deliberately not here: reading them (`verl_ray/data`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_ray.config.section import Auto, Positive, Section

SpecialTokens = Literal["refuse", "escape", "allow"]


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
    special_tokens: SpecialTokens
    """What happens if a text spells out a special token, such as <eos>. refuse = the
    run does not start; escape = the text stays text (responses of preference pairs lose
    it, as in scoring); allow = it becomes the token, for texts that a chat template has
    written already."""


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


@dataclass(frozen=True)
class RowFormat:
    """Kind of the records of a run's data files, and how long a row may be.

    Attributes:
        kind: Kind of the records (`verl_ray/data/records.py`).
        max_tokens: Limit of a prompt, or of a whole row where the response is given.
        max_tokens_key: Setting that the limit comes from.
        preference: Settings of the files where the records are pairs, else None.
        margin: Margin of every pair, or "record" for one in each record.
    """

    kind: Literal["prompt", "supervised", "preference"]
    max_tokens: int
    max_tokens_key: str
    preference: PreferenceDataConfig | None = None
    margin: float | Literal["record"] = 0.0
