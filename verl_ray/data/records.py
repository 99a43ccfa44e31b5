"""Records of a data set: prompts, demonstrations and preferences, typed.

Invariant: a record is checked where it is read, so an error names the file, the line
and the field; what leaves this module is typed. Deliberately not here: file formats
(`files.py`) and tokens (`prompts.py`, `conversations.py`).

Fields of each kind of record, where `?` marks an optional one::

    prompt      {"prompt": text or messages, "answer": text,
                 "data_source": text?, "extra": object?}
    supervised  {"prompt": text or messages, "response": text}
                or {"messages": messages}
    preference  {"prompt": text or messages, "chosen": text, "rejected": text,
                 "margin": number?}
                or {"chosen": messages, "rejected": messages, "margin": number?}

Messages are a list of {"role": text, "content": text}. The messages of `chosen` and
`rejected` are the whole conversation, and differ in the last message alone, the
response. Further fields are ignored, so one file can serve all three kinds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from verl_ray.data.field_names import missing_field, refuse_misspelt
from verl_ray.data.files import Fields, read_rows
from verl_ray.errors import DataError

Message = dict[str, object]
Content = tuple[str, str] | list[Message]
"""A (prompt, response) pair of plain texts, or a conversation with assistant turns."""

_EXCERPT_LENGTH = 40  # characters of a value that an error shows


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One problem: the input of the model, and what its response is compared with."""

    where: str
    prompt: str | list[Message]
    answer: str
    data_source: str
    extra: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class SupervisedRecord:
    """One demonstration of what the model should write."""

    where: str
    content: Content


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


def read_prompts(path: str | Path, most: int | None = None) -> list[PromptRecord]:
    """Read the prompt records of a file or folder, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    # A record without a data source has the name of its file.
    path = Path(path)
    return [
        _prompt_record(where, fields, default_source=path.stem)
        for where, fields in islice(read_rows(path), most)
    ]


def read_supervised(
    path: str | Path, most: int | None = None
) -> list[SupervisedRecord]:
    """Read the supervised records of a file or folder, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    rows = islice(read_rows(Path(path)), most)
    return [_supervised_record(where, fields) for where, fields in rows]


def read_preferences(
    path: str | Path, most: int | None = None
) -> list[PreferenceRecord]:
    """Read the preference records of a file or folder, in its order.

    Args:
        most: Number of records to read at most; None reads all of them.

    Raises:
        DataError: the path, a line or a field is not what it should be, or two
            conversations have different prompts.
    """
    rows = islice(read_rows(Path(path)), most)
    return [_preference_record(where, fields) for where, fields in rows]


def require_text(fields: Fields, name: str, where: str) -> str:
    """Return the text of a field.

    Raises:
        DataError: the field is missing, is null, holds something else, or holds a text
            that cannot be encoded.
    """
    value = fields.get(name)
    if value is None:
        raise DataError(f"{where}: {missing_field((name,), fields)}")
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {name} is {_excerpt(value)}, expected text (a JSON string)"
        )
    require_encodable(value, f"{where}, {name}")
    return value


def texts_in(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each text in a value, keys of objects included.

    Args:
        place: The name of the value. A part of it is called `place, item 2` in a list
            and `place, key` in an object.
    """
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for number, part in enumerate(value, start=1):
            yield from texts_in(part, f"{place}, item {number}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from texts_in(key, place)
            yield from texts_in(part, f"{place}, {key}")


def require_encodable(value: object, place: str) -> None:
    """Raise DataError if a text in a value holds half of a surrogate pair.

    JSON can spell such halves by themselves. They are no characters, so that neither
    a tokenizer nor a file could take the text.
    """
    for where, text in texts_in(value, place):
        # Nearly every text is ASCII, which Python knows without looking at it.
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise DataError(
                f"{where}: character {error.start + 1} is {half!r}, half of a"
                " surrogate pair, which no encoding has; write the whole character"
                " or leave it out"
            ) from None


# --------------------------------------------------------------------- kinds of records


def _prompt_record(where: str, fields: Fields, default_source: str) -> PromptRecord:
    refuse_misspelt(where, tuple(fields), ("data_source", "extra"))
    prompt = _prompt(fields, where)

    extra = fields.get("extra")
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise DataError(
            f"{where}: extra is {_excerpt(extra)}, expected an object (or no such"
            " field)"
        )
    try:
        extra_text = json.dumps(extra, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: extra holds a value that JSON cannot ({error})"
        ) from None
    require_encodable(extra, f"{where}, extra")

    source = default_source
    if fields.get("data_source") is not None:
        source = require_text(fields, "data_source", where)
    answer = require_text(fields, "answer", where)
    return PromptRecord(where, prompt, answer, source, extra_text)


def _supervised_record(where: str, fields: Fields) -> SupervisedRecord:
    # A null counts as a missing field: Parquet has nulls where a record has no value.
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], "messages", where)
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: messages has no assistant turn to learn from")
        return SupervisedRecord(where, messages)

    if fields.get("prompt") is None:
        raise DataError(f"{where}: {missing_field(('prompt', 'messages'), fields)}")
    prompt = _prompt(fields, where)
    response = require_text(fields, "response", where)
    return SupervisedRecord(where, _content(prompt, response))


def _preference_record(where: str, fields: Fields) -> PreferenceRecord:
    refuse_misspelt(where, tuple(fields), ("margin",))
    margin = _margin(fields, where)

    if isinstance(fields.get("chosen"), list):
        chosen = _conversation(fields, "chosen", where)
        rejected = _conversation(fields, "rejected", where)
        if chosen[:-1] != rejected[:-1]:
            raise DataError(
                f"{where}: chosen and rejected differ before their last message;"
                " expected two responses to one prompt"
            )
        return PreferenceRecord(where, chosen, rejected, margin)

    better = require_text(fields, "chosen", where)
    worse = require_text(fields, "rejected", where)
    prompt = _prompt(fields, where)
    return PreferenceRecord(
        where, _content(prompt, better), _content(prompt, worse), margin
    )


# ------------------------------------------------------------------------------- fields


def _margin(fields: Fields, where: str) -> float | None:
    value = fields.get("margin")
    if value is None:
        return None

    # Python counts a bool as an int.
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(
            f"{where}: margin is {_excerpt(value)}, expected a finite number of at"
            " least 0"
        )
    return float(value)


def _conversation(fields: Fields, name: str, where: str) -> list[Message]:
    """Return the messages of a field that end with a response to earlier ones."""
    if fields.get(name) is None:
        raise DataError(f"{where}: {missing_field((name,), fields)}")
    messages = _messages(fields[name], name, where)

    # The response is learned from, so it has to be the assistant's.
    last_role = messages[-1]["role"]
    if last_role != "assistant":
        raise DataError(
            f"{where}: {name} ends with a message of {last_role!r}, expected one"
            " of the assistant"
        )
    if len(messages) == 1:
        raise DataError(
            f"{where}: {name} holds the response alone, expected the whole"
            " conversation; put the messages of the prompt in front, or write chosen"
            " and rejected as texts next to a prompt"
        )
    return messages


def _content(prompt: str | list[Message], response: str) -> Content:
    if isinstance(prompt, str):
        return prompt, response
    return [*prompt, {"role": "assistant", "content": response}]


def _prompt(fields: Fields, where: str) -> str | list[Message]:
    if not isinstance(fields.get("prompt"), list):
        return require_text(fields, "prompt", where)

    messages = _messages(fields["prompt"], "prompt", where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: prompt ends with an assistant message, expected the next turn"
            " to be the model's"
        )
    return messages


def _messages(value: object, name: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: {name} is {_excerpt(value)}, expected a list of chat messages"
        )

    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise DataError(
                f"{where}: {name} holds {_excerpt(message)}, expected messages with"
                " role and content"
            )
        place = f"{where}, {name}, message {number}"
        require_text(message, "role", place)
        require_text(message, "content", place)
        # A message may have more than these two, such as calls of tools.
        require_encodable(message, place)
        # Parquet gives every message the fields of all others, with null for a value,
        # which a chat template would take for a value.
        present = {key: part for key, part in message.items() if part is not None}
        messages.append(present)
    return messages


# ------------------------------------------------------------------------------- errors


def _excerpt(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:_EXCERPT_LENGTH]!r}"
