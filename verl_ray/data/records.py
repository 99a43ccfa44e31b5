"""Records of a data set: prompts, demonstrations and preferences, typed.

Invariant: a record is checked where it is read, so an error names the file, the line
and the field; what leaves this module is typed. Deliberately not here: file formats
(`files.py`), the columns of a file (`schemas.py`), and tokens (`prompts.py`,
`conversations.py`).

Fields of each kind of record in our own schema, where `?` marks an optional one::

    prompt      {"prompt": text or messages, "answer": text?,
                 "data_source": text?, "extra": object?}
    supervised  {"prompt": text or messages, "response": text}
                or {"messages": messages}
    preference  {"prompt": text or messages, "chosen": text, "rejected": text,
                 "margin": number?}
                or {"chosen": messages, "rejected": messages, "margin": number?}

Messages are a list of {"role": text, "content": text}. The messages of `chosen` and
`rejected` are the whole conversation, and differ in the last message alone, the
response. Each kind may have `chat_template_kwargs`, an object, and `enable_thinking`,
which the chat template gets. Further fields of a prompt are for its reward, and are
else ignored, so one file can serve all three kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from verl_ray.config.data import DataSet
from verl_ray.data.chat_templates import TemplateArguments, arguments_of
from verl_ray.data.contents import (
    Content,
    demonstration,
    pair_of_contents,
    problem_and_answer,
)
from verl_ray.data.field_names import refuse_misspelt
from verl_ray.data.field_values import (
    Message,
    excerpt,
    refuse_media,
    require_encodable,
    text_of,
)
from verl_ray.data.file_formats import Fields
from verl_ray.data.files import is_glob, read_rows
from verl_ray.data.json_values import json_text
from verl_ray.data.schemas import Schema, choose_schema
from verl_ray.errors import DataError

Record = TypeVar("Record", covariant=True)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One problem: the input of the model, and what its response is compared with."""

    where: str
    prompt: str | list[Message]
    answer: str | None
    """None where the record has none: not every reward compares."""
    data_source: str
    extra: str
    """A JSON object, as text."""
    template_arguments: TemplateArguments = field(default_factory=dict)
    """What the record gives to the chat template."""


@dataclass(frozen=True, slots=True)
class SupervisedRecord:
    """One demonstration of what the model should write.

    A content that is one text is learned as a whole.
    """

    where: str
    content: Content | str
    template_arguments: TemplateArguments = field(default_factory=dict)
    """What the record gives to the chat template."""


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """Two responses to one prompt, of which the first is better.

    A conversation ends with its response.
    """

    where: str
    chosen: Content
    rejected: Content
    margin: float | None
    """Least difference of the scores, chosen minus rejected; None without the field."""
    template_arguments: TemplateArguments = field(default_factory=dict)
    """What the record gives to the chat template."""


@dataclass(frozen=True)
class Reading(Generic[Record]):
    """The way in which all records of one data set are read.

    Attributes:
        description: The schema of the set, in one line.
    """

    description: str
    _read: Callable[[str, Fields], Record]

    def record(self, where: str, fields: Fields) -> Record:
        """Return a record of the set.

        Args:
            where: The place of the record, for errors.

        Raises:
            DataError: a field is not what it should be.
        """
        return self._read(where, fields)


# ----------------------------------------------------------------------------- readings


def prompt_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[PromptRecord]:
    """Return how to read a set of prompts, from its first record.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("prompt", data_set.columns, first, where)
    source = _default_source(data_set)
    return Reading(schema.description, partial(_prompt_record, schema, source))


def supervised_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[SupervisedRecord]:
    """Return how to read a set of demonstrations, from its first record.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("supervised", data_set.columns, first, where)
    return Reading(schema.description, partial(_supervised_record, schema))


def preference_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[PreferenceRecord]:
    """Return how to read a set of preferences, from its first record.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("preference", data_set.columns, first, where)
    return Reading(schema.description, partial(_preference_record, schema))


def read_prompts(
    source: str | Path | DataSet, most: int | None = None
) -> list[PromptRecord]:
    """Read the prompt records of a set, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    return _read(source, prompt_reading, most)


def read_supervised(
    source: str | Path | DataSet, most: int | None = None
) -> list[SupervisedRecord]:
    """Read the supervised records of a set, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    return _read(source, supervised_reading, most)


def read_preferences(
    source: str | Path | DataSet, most: int | None = None
) -> list[PreferenceRecord]:
    """Read the preference records of a set, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be, or two
            conversations have different prompts.
    """
    return _read(source, preference_reading, most)


def _read(
    source: str | Path | DataSet,
    reading_of: Callable[[DataSet, Fields, str], Reading[Record]],
    most: int | None,
) -> list[Record]:
    data_set = source if isinstance(source, DataSet) else DataSet(str(source))
    records = []
    reading = None
    for where, fields in islice(read_rows(data_set), most):
        if reading is None:
            reading = reading_of(data_set, fields, where)
        records.append(reading.record(where, fields))
    return records


def _default_source(data_set: DataSet) -> str:
    """Return the data source of records that name none: the name of their file."""
    path = Path(data_set.path)
    # A pattern is no name.
    while is_glob(Path(path.name)):
        path = path.parent
    return path.stem


# --------------------------------------------------------------------- kinds of records


def _prompt_record(
    schema: Schema, default_source: str, where: str, fields: Fields
) -> PromptRecord:
    refuse_misspelt(where, tuple(fields), ("data_source", "extra"))
    refuse_media(fields, where)
    if "answer" not in schema.columns and fields.get("answer") is not None:
        raise DataError(
            "found an answer, which the first record of the set does not have",
            fix="add one to every record or to none",
            place=where,
        )
    prompt, answer = problem_and_answer(schema, fields, where)

    source = default_source
    value = schema.value("data_source", fields)
    if value is not None:
        source = text_of(value, schema.columns["data_source"], where)

    of_prompt = ("prompt", "input", "system", "messages")
    hidden = [schema.columns[name] for name in of_prompt if name in schema.columns]
    # A column that the answer is taken from under its own name is told once.
    hidden += [
        name for name in ("answer", "data_source") if schema.columns.get(name) == name
    ]
    if "prompt" not in schema.columns and "chosen" in schema.columns:
        hidden.append(schema.columns["chosen"])
    extra = extra_json(fields, hidden, where)
    arguments = arguments_of(fields, where)
    return PromptRecord(where, prompt, answer, source, extra, arguments)


def _supervised_record(schema: Schema, where: str, fields: Fields) -> SupervisedRecord:
    refuse_media(fields, where)
    # TRL marks bad completions so, which are not to be learned.
    if fields.get("label") is False:
        raise DataError(
            "label is false, as of a bad completion in unpaired preferences",
            fix="take the records whose label is true",
            place=where,
        )
    content = demonstration(schema, fields, where)
    return SupervisedRecord(where, content, arguments_of(fields, where))


def _preference_record(schema: Schema, where: str, fields: Fields) -> PreferenceRecord:
    refuse_misspelt(where, tuple(fields), ("margin",))
    refuse_media(fields, where)
    margin = _margin(schema, where, fields)
    chosen, rejected = pair_of_contents(schema, fields, where)
    arguments = arguments_of(fields, where)
    return PreferenceRecord(where, chosen, rejected, margin, arguments)


def _margin(schema: Schema, where: str, fields: Fields) -> float | None:
    value = schema.value("margin", fields)
    if value is None:
        return None

    # Python counts a bool as an int.
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(
            f"{schema.columns['margin']} is {excerpt(value)}",
            expected="a finite number of at least 0",
            place=where,
        )
    return float(value)


# ----------------------------------------------------------------------- further fields

# The fields of a record that a run does not know, as JSON for its reward.
#
# Invariant: nothing that a reward could use is lost, and nothing in it stops a run
# that does not ask for it.


def extra_json(fields: Fields, hidden: Collection[str], where: str) -> str:
    """Return all columns but the hidden ones, which have fields of their own.

    The fields of the objects `extra` and verl's `extra_info` stand beside them, in the
    place of columns of the same name.

    Returns:
        A JSON object, as text.

    Raises:
        DataError: `extra` is no object, or a text cannot be encoded.
    """
    own = fields.get("extra")
    if own is not None and not isinstance(own, dict):
        raise DataError(
            f"extra is {excerpt(own)}",
            expected="an object (or no such field)",
            place=where,
        )
    opened: dict[str, Fields] = {"extra": own or {}}
    # Other systems may have something else under this name, which is a column then.
    verls = fields.get("extra_info")
    if isinstance(verls, dict):
        opened = {"extra_info": verls, **opened}

    shown = {name: value for name, value in fields.items() if name not in hidden}
    require_encodable(shown, where)

    extra = {name: value for name, value in shown.items() if name not in opened}
    for value in opened.values():
        extra |= value
    return json_text(extra)
