"""Records of a data set: prompts, demonstrations and preferences, typed.

Invariant: a record is checked where it is read, so an error names the file, the line
and the field; what leaves this module is typed. A prompt is a text or messages of which
the next turn is the model's; a content is a prompt with its response, in one form,
whatever the schema of the set (`schemas.py`).

Fields of each kind of record in our own schema, where `?` marks an optional one::

    prompt      {"prompt": text or messages, "answer": text?,
                 "data_source": text?, "extra": object?}
    supervised  {"prompt": text or messages, "response": text}
                or {"messages": messages}
    preference  {"prompt": text or messages, "chosen": text, "rejected": text,
                 "margin": number?}
                or {"chosen": messages, "rejected": messages, "margin": number?}
    unpaired    {"prompt": text or messages, "response": text, "label": true or false}
                or {"messages": messages, "label": true or false}
                or pairs, each of which is a response of either label
    teacher     see `teacher_rows.py`

Messages are a list of {"role": text, "content": text}. The messages of `chosen` and
`rejected` are the whole conversation, and differ in the last message alone, the
response. Each kind may have `chat_template_kwargs`, an object, and `enable_thinking`,
which the chat template gets. Further fields of a prompt are for its reward, and are
else ignored, so one file can serve several kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from verl_ray.config.data import DataSet
from verl_ray.data.fields import (
    TOOLS,
    Fields,
    Message,
    answer_of,
    as_context,
    as_messages,
    content_of,
    excerpt,
    is_learned,
    is_messages,
    messages_of,
    missing_field,
    refuse_misspelt,
    require_names_of_tools,
    short_text_of,
    text_of,
    unwritten_messages,
    without_marks,
)
from verl_ray.data.files import is_glob, read_rows
from verl_ray.data.further_fields import extra_json
from verl_ray.data.media import refuse_media
from verl_ray.data.schemas import Schema, choose_schema, fitting_schema
from verl_ray.data.tokenizers import TemplateArguments, arguments_of
from verl_ray.errors import DataError
from verl_ray.shell import table_override

Record = TypeVar("Record", covariant=True)
_Read = TypeVar("_Read")

Prompt = str | list[Message]

Content = tuple[str, str] | list[Message]
"""A (prompt, response) pair of plain texts, or a conversation with assistant turns.

A mark on a turn of the assistant says that it is not learned (`is_learned`).
"""

_ContentOrPrompt = TypeVar("_ContentOrPrompt", Content, Prompt)

# The beginning of a response in a dialogue that is written as a text.
_RESPONSE_MARK = re.compile(
    r"(?:^|\n)\W*(?:assistant|response|answer)\s*:", re.IGNORECASE
)

_LAST_WORD = re.compile(r"\s*\w*$")

_LABELS = {
    "true": True,
    "1": True,
    "1.0": True,
    "false": False,
    "0": False,
    "0.0": False,
}
"""Labels as a file may write them, in lower case. Of columns with nulls, Parquet and
CSV files make numbers with a point."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One problem: the input of the model, and what its response is compared with."""

    where: str
    prompt: Prompt
    answer: str | None
    """None where the record has none: not every reward compares."""
    data_source: str
    extra: str
    """A JSON object, as text."""
    template_arguments: TemplateArguments = field(default_factory=dict)
    """What the record gives to the chat template."""
    has_default_source: bool = False
    """Whether the data source is the name of the file, as the record names none."""
    has_json_answer: bool = False
    """Whether the answer is the JSON text of a list or an object in the record."""


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


@dataclass(frozen=True, slots=True)
class UnpairedRecord:
    """A response that is desirable or not. A conversation ends with it."""

    where: str
    content: Content
    is_desirable: bool
    template_arguments: TemplateArguments = field(default_factory=dict)
    """What the record gives to the chat template."""


@dataclass(frozen=True)
class Reading(Generic[Record]):
    """The way in which all records of one data set are read.

    Attributes:
        description: The schema of the set, in one line.
    """

    description: str
    _reads: tuple[Callable[[str, Fields], Record], ...]

    @property
    def per_row(self) -> int:
        """Number of records that a row of the file holds."""
        return len(self._reads)

    def record(self, where: str, fields: Fields, number: int = 0) -> Record:
        """Return a record of the set.

        Args:
            where: The place of the record, for errors.
            fields: The row of the file that holds it.
            number: Which of the records of the row.

        Raises:
            DataError: a field is not what it should be.
        """
        return self._reads[number](where, fields)


# ----------------------------------------------------------------------------- readings


def prompt_reading(
    data_set: DataSet, first: Fields, where: str, *, has_episodes: bool = False
) -> Reading[PromptRecord]:
    """Return how to read a set of prompts, from its first record.

    Args:
        has_episodes: Whether they are tasks of episodes, which may name tools.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("prompt", data_set.columns, first, where)
    source = _default_source(data_set)
    read = partial(_prompt_record, schema, source, has_episodes)
    return Reading(schema.description, (read,))


def supervised_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[SupervisedRecord]:
    """Return how to read a set of demonstrations, from its first record.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("supervised", data_set.columns, first, where)
    return Reading(schema.description, (partial(_supervised_record, schema),))


def preference_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[PreferenceRecord]:
    """Return how to read a set of preferences, from its first record.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    schema = choose_schema("preference", data_set.columns, first, where)
    return Reading(schema.description, (partial(_preference_record, schema),))


def unpaired_reading(
    data_set: DataSet, first: Fields, where: str
) -> Reading[UnpairedRecord]:
    """Return how to read a set of responses with labels, from its first record.

    A row of pairs holds two of them.

    Raises:
        DataError: the record has not the columns of the set, or fits no schema.
    """
    columns = data_set.columns
    pairs = None
    if fitting_schema("unpaired", columns, first) is None:
        pairs = fitting_schema("preference", columns, first)
    if pairs is None:
        schema = choose_schema("unpaired", columns, first, where)
        return Reading(schema.description, (partial(_unpaired_record, schema),))

    description = f"pairs ({pairs.description}): chosen is desirable, rejected is not"
    sides = (partial(_record_of_pair, pairs, label) for label in (True, False))
    return Reading(description, tuple(sides))


def holds_pairs(data_set: DataSet) -> bool:
    """Return whether a set of preferences is one of pairs.

    Raises:
        DataError: its first record cannot be read.
    """
    for where, first in read_rows(data_set):
        return unpaired_reading(data_set, first, where).per_row > 1
    return False


def read_prompts(
    source: str | Path | DataSet, *, has_episodes: bool = False
) -> list[PromptRecord]:
    """Read the prompt records of a set, in its order.

    Args:
        has_episodes: As in `prompt_reading`.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    return read_records(source, partial(prompt_reading, has_episodes=has_episodes))


def read_records(
    source: str | Path | DataSet,
    reading_of: Callable[[DataSet, Fields, str], Reading[_Read]],
) -> list[_Read]:
    """Read the records of a set, in its order, as its first one says.

    Args:
        reading_of: `prompt_reading` or one of its siblings.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    data_set = source if isinstance(source, DataSet) else DataSet(str(source))
    records = []
    reading = None
    for where, fields in read_rows(data_set):
        if reading is None:
            reading = reading_of(data_set, fields, where)
        numbers = range(reading.per_row)
        records += [reading.record(where, fields, number) for number in numbers]
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
    schema: Schema, default_source: str, has_episodes: bool, where: str, fields: Fields
) -> PromptRecord:
    refuse_misspelt(where, tuple(fields), ("data_source", "extra"))
    if has_episodes:
        require_names_of_tools(fields, where)
        _refuse_unseen(schema, {**fields, TOOLS: None}, where)
    else:
        _refuse_unseen(schema, fields, where)
    if "answer" not in schema.columns and fields.get("answer") is not None:
        raise DataError(
            "found an answer, which the first record of the set does not have",
            fix="add one to every record or to none",
            place=where,
        )
    prompt, answer = _problem_and_answer(schema, fields, where)

    source = default_source
    value = schema.value("data_source", fields)
    if value is not None:
        source = text_of(value, schema.columns["data_source"], where)

    prompt_fields = ("prompt", "input", "system", "messages")
    hidden = [schema.columns[name] for name in prompt_fields if name in schema.columns]
    # A column that the answer is taken from under its own name is told once.
    hidden += [
        name for name in ("answer", "data_source") if schema.columns.get(name) == name
    ]
    if "prompt" not in schema.columns and "chosen" in schema.columns:
        hidden.append(schema.columns["chosen"])
    extra = extra_json(fields, hidden, where)
    arguments = arguments_of(fields, where)
    return PromptRecord(
        where,
        prompt,
        answer,
        source,
        extra,
        arguments,
        has_default_source=value is None,
        has_json_answer=_is_json(schema.value("answer", fields)),
    )


def _is_json(answer: object) -> bool:
    """Return whether `answer_of` writes an answer as JSON."""
    return isinstance(answer, list | dict) and not is_messages(answer)


def _supervised_record(schema: Schema, where: str, fields: Fields) -> SupervisedRecord:
    _refuse_unseen(schema, fields, where)
    # TRL marks bad completions so, which are not to be learned.
    if fields.get("label") is False:
        raise DataError(
            "label is false, as of a bad completion in unpaired preferences",
            fix="take the records whose label is true",
            place=where,
        )
    content = _demonstration(schema, fields, where)
    return SupervisedRecord(where, content, arguments_of(fields, where))


def _preference_record(schema: Schema, where: str, fields: Fields) -> PreferenceRecord:
    refuse_misspelt(where, tuple(fields), ("margin",))
    _refuse_unseen(schema, fields, where)
    margin = _margin(schema, where, fields)
    chosen, rejected = _pair_of_contents(schema, fields, where)
    arguments = arguments_of(fields, where)
    return PreferenceRecord(where, chosen, rejected, margin, arguments)


def _unpaired_record(schema: Schema, where: str, fields: Fields) -> UnpairedRecord:
    _refuse_unseen(schema, fields, where)
    value = _required(schema, "label", fields, where)
    label = _LABELS.get(str(value).lower())
    if label is None:
        raise DataError(
            f"{schema.columns['label']} is {excerpt(value)}",
            expected="true or 1 for a desirable response, false or 0 for another",
            place=where,
        )

    prompt = _prompt(schema, fields, where) if "prompt" in schema.columns else None
    name = "messages" if "messages" in schema.columns else "response"
    content = _answered(schema, prompt, name, fields, where)
    arguments = arguments_of(fields, where)
    return UnpairedRecord(where, _unmarked(content), label, arguments)


def _record_of_pair(
    schema: Schema, is_desirable: bool, where: str, fields: Fields
) -> UnpairedRecord:
    """Return one of the responses of a pair: the better one is desirable."""
    pair = _preference_record(schema, where, fields)
    content = pair.chosen if is_desirable else pair.rejected
    side = "chosen" if is_desirable else "rejected"
    return UnpairedRecord(
        f"{where}, {side}", content, is_desirable, pair.template_arguments
    )


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


def _refuse_unseen(schema: Schema, fields: Fields, where: str) -> None:
    """Raise DataError if a record has what the model would not see."""
    refuse_media(fields, where, read=schema.columns.values())
    if fields.get(TOOLS):
        raise DataError(
            "found something in 'tools', which a prompt would not show: tools are not"
            " supported yet",
            fix="take records without, or remove the column",
            place=where,
        )


# ----------------------------------------------------------------------------- contents


def _required(schema: Schema, field: str, fields: Fields, where: str) -> object:
    """Return the value of our field, which every record of the schema has.

    Messages that were written as a text are messages again. What a response is
    compared with stays a text, unless it is a completion.

    Raises:
        DataError: this record has none.
    """
    value = schema.value(field, fields)
    name = schema.columns[field]
    if value is None:
        raise missing_field(name, fields, where)
    if field == "answer" and name != "completion":
        return value
    is_response = field in ("answer", "response")
    return unwritten_messages(value, name, where, from_assistant=is_response)


def _problem_and_answer(
    schema: Schema, fields: Fields, where: str
) -> tuple[Prompt, str | None]:
    """Return the prompt of a record, and what its response is compared with, if any."""
    answer = None
    if "answer" in schema.columns:
        value = _required(schema, "answer", fields, where)
        answer = answer_of(value, schema.columns["answer"], where)

    if "chosen" in schema.columns:
        chosen, _ = _pair_of_contents(schema, fields, where)
        prompt, response = _parted(chosen)
    elif "messages" in schema.columns:
        prompt, response = _parted(_conversation(schema, fields, where))
    else:
        prompt, response = _prompt(schema, fields, where), None
    return _unmarked(prompt), response if answer is None else answer


def _demonstration(schema: Schema, fields: Fields, where: str) -> Content | str:
    """Return a prompt with its response, a conversation, or a text as a whole.

    Answers that are not learned are marked: those of a prompt, which are context, and
    those that the record excludes.
    """
    if "text" in schema.columns:
        value = _required(schema, "text", fields, where)
        name = schema.columns["text"]
        if is_messages(value):
            raise DataError(
                f"{name} holds chat messages",
                expected="a text that is learned as a whole",
                fix=f"set {table_override('data.columns', {'messages': name})}",
                place=where,
            )
        return text_of(value, name, where)

    has_messages = schema.value("messages", fields) is not None
    if has_messages or "prompt" not in schema.columns:
        name = schema.columns["messages"]
        content: Content = _conversation(schema, fields, where)
    else:
        name = schema.columns["response"]
        prompt = _prompt(schema, fields, where)
        if isinstance(prompt, list):
            prompt = as_context(prompt)
        content = _answered(schema, prompt, "response", fields, where)

    if isinstance(content, list) and not any(map(is_learned, content)):
        excluded = any(message["role"] == "assistant" for message in content)
        reason = " that its weight or trainable does not exclude" if excluded else ""
        raise DataError(
            f"{name} has no assistant turn to learn from{reason}",
            fix="expected at least one; leave out the record",
            place=where,
        )
    return content


def _pair_of_contents(
    schema: Schema, fields: Fields, where: str
) -> tuple[Content, Content]:
    """Return the better and the worse response, each with the prompt of both."""
    sides = [_required(schema, name, fields, where) for name in ("chosen", "rejected")]
    is_list = isinstance(sides[0], list)
    if is_list != isinstance(sides[1], list):
        expected = "a list of chat messages" if is_list else "a text"
        raise DataError(
            f"rejected is {excerpt(sides[1])}",
            expected=f"{expected}, as chosen is",
            place=where,
        )

    prompt = None
    # Messages may be the whole conversation, whatever other records have.
    has_prompt = schema.value("prompt", fields) is not None
    if has_prompt or ("prompt" in schema.needs and not is_list):
        prompt = _prompt(schema, fields, where)
    if prompt is None and not is_list:
        return _parted_at_difference(schema, fields, where)

    # Pairs compare their last turns, whatever is learned of them elsewhere.
    chosen = _unmarked(_answered(schema, prompt, "chosen", fields, where))
    rejected = _unmarked(_answered(schema, prompt, "rejected", fields, where))
    if is_list and chosen[:-1] != rejected[:-1]:
        raise DataError(
            "chosen and rejected differ before their last message",
            fix="expected two responses to one prompt",
            place=where,
        )
    return chosen, rejected


# ------------------------------------------------------------------------------ prompts


def _prompt(schema: Schema, fields: Fields, where: str) -> Prompt:
    """Return the prompt of a record with its system message and its input."""
    name = schema.columns["prompt"]
    value = _required(schema, "prompt", fields, where)
    prompt: Prompt
    if isinstance(value, list):
        prompt = messages_of(value, name, where)
        if prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{name} ends with an assistant message",
                expected="the next turn to be the model's",
                place=where,
            )
    else:
        prompt = text_of(content_of(value, name, where), name, where)
    return _with_system(
        schema, _with_input(schema, prompt, fields, where), fields, where
    )


def _with_input(schema: Schema, prompt: Prompt, fields: Fields, where: str) -> Prompt:
    """Return a prompt with what it is about behind it, if the record has that."""
    value = schema.value("input", fields)
    if value is None or value == "":
        return prompt

    name = schema.columns["input"]
    if not isinstance(prompt, str):
        raise DataError(
            f"{name} cannot stand behind a prompt of messages",
            fix="expected a prompt that is a text",
            place=where,
        )
    return f"{prompt}\n\n{text_of(value, name, where)}"


def _with_system(schema: Schema, prompt: Prompt, fields: Fields, where: str) -> Prompt:
    """Return a prompt with the record's system message in front, if it has one."""
    value = schema.value("system", fields)
    if value is None or value == "":
        return prompt

    name = schema.columns["system"]
    content = unwritten_messages(content_of(value, name, where), name, where)
    message: Message = {"role": "system", "content": text_of(content, name, where)}
    messages = as_messages(prompt)
    if messages[0] == message:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{name} and the first message are different system messages",
            fix="leave out the column or that message",
            place=where,
        )
    return [message, *messages]


def _conversation(schema: Schema, fields: Fields, where: str) -> list[Message]:
    """Return the messages of a record, with its system message in front."""
    value = _required(schema, "messages", fields, where)
    messages = messages_of(value, schema.columns["messages"], where)
    return as_messages(_with_system(schema, messages, fields, where))


# ---------------------------------------------------------------------------- responses


def _answered(
    schema: Schema, prompt: Prompt | None, field: str, fields: Fields, where: str
) -> Content:
    """Return a prompt with the response in a field, which may be a conversation."""
    value = _required(schema, field, fields, where)
    name = schema.columns[field]
    if not is_messages(value):
        if prompt is None:
            messages_of(value, name, where)
            raise AssertionError("a list without messages is refused")
        response = short_text_of(value, name, where)
        if isinstance(prompt, str):
            return prompt, response
        return [*prompt, {"role": "assistant", "content": response}]

    messages = messages_of(value, name, where)
    # The response is learned from, so it has to be the assistant's.
    last_role = messages[-1]["role"]
    if last_role != "assistant":
        raise DataError(
            f"{name} ends with a message of {last_role!r}",
            expected="one of the assistant",
            place=where,
        )
    is_whole = messages[0]["role"] != "assistant"
    if not is_whole and prompt is not None:
        return [*as_messages(prompt), *messages]
    if len(messages) == 1:
        raise DataError(
            f"{name} holds the response alone",
            expected="the whole conversation",
            fix="put the messages of the prompt in front, or write them into a column"
            " 'prompt'",
            place=where,
        )
    if isinstance(prompt, list):
        messages = _behind_prompt(prompt, messages, name, where)
    return as_messages(_with_system(schema, messages, fields, where))


def _behind_prompt(
    prompt: list[Message], messages: list[Message], name: str, where: str
) -> list[Message]:
    """Return a whole conversation, with the system message of its prompt in front.

    Raises:
        DataError: the conversation does not begin with the prompt.
    """
    first = prompt[0]
    if first["role"] == "system" and messages[0]["role"] != "system":
        messages = [first, *messages]
    begins = messages[: len(prompt)]
    if without_marks(begins) != without_marks(prompt):
        raise DataError(
            f"{name} is a conversation that does not begin with the messages of the"
            " prompt",
            fix="expected the response alone, or the same messages in front",
            place=where,
        )
    # The marks of the prompt hold for its messages.
    return [*prompt, *messages[len(prompt) :]]


def _unmarked(content: _ContentOrPrompt) -> _ContentOrPrompt:
    """Return a prompt or a content without marks on its turns."""
    return without_marks(content) if isinstance(content, list) else content


def _parted(content: Content) -> tuple[Prompt, str | None]:
    """Return prompt and response; None for messages that end with another turn."""
    if isinstance(content, tuple):
        return content
    last = content[-1]
    if last["role"] != "assistant" or len(content) == 1:
        return content, None
    return content[:-1], str(last["content"])


def _parted_at_difference(
    schema: Schema, fields: Fields, where: str
) -> tuple[Content, Content]:
    """Return two texts that begin with their prompt, as prompt and responses.

    In a dialogue the prompt ends where the last turn that both share begins; in any
    other text, behind the last word that both share.
    """
    chosen, rejected = (
        short_text_of(
            _required(schema, name, fields, where), schema.columns[name], where
        )
        for name in ("chosen", "rejected")
    )
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shortest = min(len(chosen), len(rejected))
    shared = chosen[: next((at for at, (a, b) in pairs if a != b), shortest)]

    marks = [match.end() for match in _RESPONSE_MARK.finditer(shared)]
    # Words of some languages have no ends, so that all letters count there.
    end = marks[-1] if marks else len(_LAST_WORD.sub("", shared)) or len(shared)
    if not end:
        raise DataError(
            "chosen and rejected have no beginning in common that could be the prompt,"
            " and there is no column for it",
            fix="set 'data.columns={prompt: COLUMN}'",
            place=where,
        )

    prompt = _with_system(schema, shared[:end], fields, where)
    contents: list[Content] = []
    for text in (chosen, rejected):
        response = text[end:]
        if isinstance(prompt, str):
            contents.append((prompt, response))
        else:
            contents.append([*prompt, {"role": "assistant", "content": response}])
    better, worse = contents
    return better, worse
