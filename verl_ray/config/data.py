"""The rows of a run: their files, and what happens to rows that cannot be used.

Invariant: a field that no record of the task has is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from verl_ray.config.paths import ChatTemplate, HubPath
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Auto,
    NonNegativeFloat,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
)
from verl_ray.shell import table_override
from verl_ray.suggest import did_you_mean

SpecialTokens = Literal["refuse", "escape", "allow"]

RecordKind = Literal["prompt", "supervised", "preference", "unpaired", "teacher"]
"""What a record is for: reinforcement learning, imitation, comparison, preferences
without pairs (a response with a label), or distillation."""

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
    # Files that `generate` has written have one form.
    "teacher": frozenset(),
    # Pairs can be read as two responses each.
    "unpaired": frozenset(
        (
            "prompt",
            "input",
            "messages",
            "response",
            "label",
            "chosen",
            "rejected",
            "system",
        )
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
    """Pairs of responses to a prompt, one of which is better; or single ones."""

    unusable: Literal["refuse", "skip"]
    """refuse = the run does not start if the responses of a pair are equal, or one is
    empty; skip = such pairs, or single responses, are left out and counted."""


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
        preference: Settings of the files where the records are pairs, or responses with
            labels; else None.
        margin: Margin of every pair, or "record" for one in each record; None where no
            loss reads one.
        top_k: A teacher's most probable tokens in the place of each; 0 for none.
    """

    kind: RecordKind
    max_tokens: int
    max_tokens_key: str
    preference: PreferenceDataConfig | None = None
    margin: float | Literal["record"] | None = None
    top_k: int = 0

    @property
    def fields(self) -> frozenset[str]:
        """The fields of a record that the run reads."""
        unread = {"margin"} if self.margin is None else set()
        return FIELDS_OF_KIND[self.kind] - unread


# -------------------------------------------------------------------------------- rules


def columns_are_of_fields(
    data: DataFilesConfig, fields: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for each field with a column that no record has."""
    named = {"data.columns": data.columns or {}}
    for key, value in (
        ("data.train_path", data.train_path),
        ("data.validation_path", data.validation_path),
    ):
        entries = value if isinstance(value, list) else [value]
        for number, entry in enumerate(entries):
            if isinstance(entry, DataSetEntry):
                item = f".{number}" if isinstance(value, list) else ""
                named[f"{key}{item}.columns"] = entry.columns or {}

    for key, columns in named.items():
        yield from _column_problems(key, columns, sorted(fields))


def _column_problems(
    key: str, columns: Mapping[str, str], fields: Sequence[str]
) -> Iterator[Problem]:
    """Yield a problem for each field of `columns` that records have not.

    Args:
        key: The setting that holds the columns.
    """
    for name, path in columns.items():
        if name in fields:
            continue
        rule = f"records of this task have no field {name!r}"
        # The two are the same thing in two tasks.
        counterparts = {"answer": "response", "response": "answer"}
        meant = counterparts.get(name)
        if meant is not None and meant in fields:
            fix = f"Use {table_override(key, {meant: path})}."
        else:
            fix = did_you_mean(name, fields, "field")
        yield Problem(f"{key}.{name}", path, rule, fix)


def template_settings_have_a_use(
    data: DataFilesConfig, *, makes_inputs: bool
) -> Iterator[Problem]:
    """Yield a problem for each setting of the chat template without a use.

    Args:
        data: The settings.
        makes_inputs: Whether the run makes its own problems and model.
    """
    template = data.chat_template
    if template is not None and data.apply_chat_template is False:
        rule = "this setting would be ignored: data.apply_chat_template = false"
        fix = "Leave it out, or set data.apply_chat_template=auto."
        yield Problem("data.chat_template", template, rule, fix)
    elif template is not None and makes_inputs:
        rule = "the run makes its own problems and model, which have no turns"
        fix = "Leave it out, or set prepare=null with a model and data of yours."
        yield Problem("data.chat_template", template, rule, fix)

    for name, value in data.chat_template_kwargs.items():
        key = f"data.chat_template_kwargs.{name}"
        if name in RESERVED_ARGUMENTS:
            rule = "the run itself gives this to the chat template"
            yield Problem(key, value, rule, "Leave it out.")
        elif data.apply_chat_template is False:
            rule = "this setting would be ignored: data.apply_chat_template = false"
            fix = "Leave it out, or set data.apply_chat_template=auto."
            yield Problem(key, value, rule, fix)


def curriculum_is_consistent(
    curriculum: CurriculumConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each bound of scores without use, or at odds with others."""
    if not curriculum.is_on:
        for name in ("hard_to", "easy_from"):
            if overridden.under(f"data.curriculum.{name}"):
                rule = "every prompt is drawn in each epoch, whatever its score"
                fix = (
                    "Leave it out, or set data.curriculum.hard_share, easy_share or"
                    " solved_from."
                )
                value = getattr(curriculum, name)
                yield Problem(f"data.curriculum.{name}", value, rule, fix)
        return

    hard_to = curriculum.hard_to
    is_hard = f"a prompt with this score is hard: data.curriculum.hard_to={hard_to:g}"
    if curriculum.easy_from <= hard_to:
        fix = "Set it above data.curriculum.hard_to."
        yield Problem("data.curriculum.easy_from", curriculum.easy_from, is_hard, fix)
    solved_from = curriculum.solved_from
    if solved_from is not None and solved_from <= hard_to:
        fix = "Set it above data.curriculum.hard_to, or to null."
        yield Problem("data.curriculum.solved_from", solved_from, is_hard, fix)
    easy_share = curriculum.easy_share
    if (
        solved_from is not None
        and solved_from <= curriculum.easy_from
        and easy_share < 1
    ):
        rule = "a prompt with data.curriculum.easy_from is solved, so none is ever easy"
        fix = "Set it to 1, or data.curriculum.solved_from above easy_from."
        yield Problem("data.curriculum.easy_share", easy_share, rule, fix)
