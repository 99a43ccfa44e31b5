"""The rows of a run: their files, and what happens to rows that cannot be used.

Deliberately not here: reading them (`verl_ray/data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from verl_ray.config.paths import ChatTemplate, HubPath
from verl_ray.config.section import (
    Auto,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
)

SpecialTokens = Literal["refuse", "escape", "allow"]

RecordKind = Literal["prompt", "supervised", "preference"]
"""What a record is for: reinforcement learning, imitation, or comparison."""

FIELDS_OF_KIND: Mapping[RecordKind, frozenset[str]] = {
    "prompt": frozenset(
        ("prompt", "input", "messages", "answer", "data_source", "system")
    ),
    "supervised": frozenset(
        ("prompt", "input", "messages", "response", "text", "system")
    ),
    "preference": frozenset(
        ("prompt", "input", "chosen", "rejected", "margin", "system")
    ),
}
"""Our fields, which `columns` may name the columns of. `input` stands behind the
prompt, and `system` before it."""


RESERVED_ARGUMENTS = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message",
        "conversation", "max_length", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "strftime_now",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    )
)  # fmt: skip
"""Names that no argument of a chat template may have: they steer the rendering."""


@dataclass(frozen=True)
class DataSet:
    """One set of records, as the settings of `data` name it.

    Attributes:
        path: A file, a folder, a glob, or the id of a data set on the hub.
        weight: How often each record is used in an epoch.
        columns: Our field -> the column that holds it; a point leads into an object.
            Fields that are not in it are recognised by the usual names of columns.
        subset: The subset of a data set on the hub; None if it has only one.
        split: The split of a data set on the hub, or of a saved folder.
        revision: The commit of a data set on the hub.
    """

    path: HubPath
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str | None = None
    revision: str | None = None


class DataSetEntry(Section):
    """One data set of several, or one that needs more than a path.

    Unlike other sections, it has defaults: it is an item of a list, and no list stands
    in YAML.
    """

    path: HubPath
    """A file, a folder, a glob, or the id of a data set on the hub."""
    weight: PositiveFloat = 1.0
    """How often each record is used in an epoch: 2 = twice; 0.5 = half of the records,
    and the other half in the next epoch."""
    columns: dict[str, str] | None = None
    """Columns of this set, in place of data.columns."""
    subset: str | None = None
    """Subset of a data set on the hub."""
    split: str | None = None
    """Split of a data set on the hub, or of a folder that holds several."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub."""


_Entries = Annotated[list[HubPath | DataSetEntry], Field(min_length=1)]


def _day(value: str) -> str:
    date.fromisoformat(value)
    return value


Day = Annotated[str, AfterValidator(_day)]
"""A day, as in 2026-01-31."""

DataPath = HubPath | DataSetEntry | _Entries
"""A path, an entry such as {path: a.parquet, weight: 2}, or a list of both."""


class DataFilesConfig(Section):
    """Files that rows come from, and how these become tokens.

    A supervised run needs no further settings of its data.
    """

    train_path: DataPath
    """A .jsonl, .json, .csv or .parquet file, a folder, a glob, the id of a data set on
    the hub, or a list such as [{path: a.parquet, weight: 2}, b.jsonl]."""
    validation_path: DataPath | None
    """The same for held-out problems; needed when run.evaluate_every > 0."""
    columns: Annotated[
        dict[str, str] | None,
        Field(examples=["{prompt: question, answer: extra_info.truth}"]),
    ]
    """Our field -> the column that holds it; a point leads into an object. null = the
    fields are recognised by the usual names of columns."""
    stream_above_gib: NonNegativeFloat
    """Training sets that take more than this on disk stay there, and are read as they
    are used; others are tokenized at the start, where every mistake is told."""
    overlong: Literal["refuse", "skip"]
    """refuse = the run does not start if a prompt or row is too long; skip = such rows
    are left out and counted."""
    shuffle: bool
    """Read rows in an order seeded by run.seed and the epoch, instead of the file's."""
    apply_chat_template: bool | Auto
    """Whether prompts go through the chat template; auto = if the tokenizer has one, or
    chat_template gives one."""
    chat_template: Annotated[
        ChatTemplate | None, Field(examples=["chatml", "plain", "template.jinja"])
    ]
    """Chat template in place of the tokenizer's, with which the model is exported:
    chatml and plain are ours, anything else is the path of a file, of which the run
    keeps the text. null = the tokenizer's."""
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(examples=["{enable_thinking: false}"])
    ]
    """Variables of the chat template and their values; those of a record
    (chat_template_kwargs, enable_thinking) go before them."""
    template_day: Auto | Day | None
    """Day that a chat template writes as today, such as 2026-01-31; auto = the day on
    which the run began, if the template writes one. null = today."""
    special_tokens: SpecialTokens
    """What happens if a text spells out a special token, such as <eos>. refuse = the
    run does not start; escape = the text stays text (responses of preference pairs lose
    it, as in scoring); allow = it becomes the token, for texts that a chat template has
    written already."""

    @property
    def train_sets(self) -> tuple[DataSet, ...]:
        """The data sets that the run learns from."""
        return _data_sets(self.train_path, self.columns)

    @property
    def validation_sets(self) -> tuple[DataSet, ...]:
        """The data sets of held-out problems; none without `validation_path`."""
        return _data_sets(self.validation_path, self.columns)


class PreferenceDataConfig(DataFilesConfig):
    """Pairs of responses to a prompt, one of which is better."""

    unusable: Literal["refuse", "skip"]
    """refuse = the run does not start if the responses of a pair are equal or empty;
    skip = such pairs are left out and counted."""


class CurriculumConfig(Section):
    """Prompts that an epoch leaves out, by the mean score of their last group."""

    hard_to: float
    """The largest mean score of the last group of a hard prompt."""
    hard_share: PositiveFraction
    """Share of the hard prompts that an epoch draws; 1 = all."""
    easy_from: float
    """The smallest mean score of the last group of an easy prompt."""
    easy_share: PositiveFraction
    """Share of the easy prompts that an epoch draws; 1 = all."""
    solved_from: float | None
    """The smallest mean score of the last group of a prompt that is not drawn again;
    null = all are."""

    @property
    def is_on(self) -> bool:
        """Whether some prompts are not drawn again in each epoch."""
        return min(self.hard_share, self.easy_share) < 1 or self.solved_from is not None


class DataConfig(DataFilesConfig):
    """Prompts that rollouts are generated for."""

    curriculum: CurriculumConfig
    """Prompts that are drawn less often than in each epoch."""
    prompts_per_step: Positive
    """Prompts read from train_path for each step."""
    max_prompt_tokens: Positive
    """The longest prompt, in tokens after the chat template."""


def in_words(data_sets: Sequence[DataSet]) -> str:
    """Return the paths of data sets, for messages."""
    return ", ".join(data_set.path for data_set in data_sets)


def _data_sets(
    value: DataPath | None, columns: Mapping[str, str] | None
) -> tuple[DataSet, ...]:
    """Return the data sets of a setting.

    Args:
        columns: The columns of sets that name none of their own.
    """
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    entries = [
        DataSetEntry(path=item) if isinstance(item, str) else item for item in items
    ]
    return tuple(
        DataSet(
            path=entry.path,
            weight=entry.weight,
            columns=entry.columns if entry.columns is not None else columns or {},
            subset=entry.subset,
            split=entry.split,
            revision=entry.revision,
        )
        for entry in entries
    )


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

    kind: RecordKind
    max_tokens: int
    max_tokens_key: str
    preference: PreferenceDataConfig | None = None
    margin: float | Literal["record"] = 0.0
