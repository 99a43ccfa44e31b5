"""Fields of a record: their names, and their values, which are texts or chat messages.

Invariant: a value is checked where it is read, so an error names the place and the
field, and a hint names only fields that the record has. Which field is read for what
is in `schemas.py`.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal

from verl_ray.data.media import is_typed_part, refuse_media, text_of_part
from verl_ray.errors import DataError
from verl_ray.settings.function_specs import DEFAULT

Fields = dict[str, object]
"""Fields of one record, as the file has them."""

Message = dict[str, object]

_EXCERPT_LENGTH = 40  # characters of a value that an error shows

_MOST_EXACT_INTEGER = 2**53  # a float is exact up to here

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}

_KNOWN_ROLES = (*_SHAREGPT_ROLES, "developer")

# What a text begins with that spells a list or an object in JSON, or as Python or NumPy
# prints it; in quotes where it was written twice.
_BRACKET = re.compile(r"[\s\ufeff\"'\\]*(array\s*)?[\[{(]")

# Quotes in a text in quotes have backslashes.
_ROLE = re.compile(
    r"[\"'](?:role|from)\\*[\"']\s*:\s*\\*[\"']"
    rf"({'|'.join(_KNOWN_ROLES)})\\*[\"']"
)
_CONTENT = re.compile(r"[\"'](?:content|value|tool_calls)\\*[\"']\s*:")
_PART_TYPE = re.compile(
    r"[\"']type\\*[\"']\s*:\s*\\*[\"']"
    r"(?:input_|output_)?(?:text|image|video|audio)"
)

_TOKEN = re.compile(
    r"(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<opening>[\[{(])|(?P<closing>[\]})])|(?P<word>\w+)",
    re.DOTALL,
)

TRAINABLE = "trainable"
"""Key of messages as they are read: false for an answer that is context alone."""

_TRAINABLE_NAMES = (TRAINABLE, "weight", "train", "training", "loss")
"""Names by which files say whether an answer is learned, with 0, 1, false or true."""


# -------------------------------------------------------------------------------- texts


def require_text(fields: Fields, name: str, where: str) -> str:
    """Return the text of a field.

    Raises:
        DataError: the field is missing, is null, holds something else, or holds a text
            that cannot be encoded.
    """
    value = fields.get(name)
    if value is None:
        raise missing_field(name, fields, where)
    return text_of(value, name, where)


def text_of(value: object, name: str, where: str) -> str:
    """Return a value that is a text.

    Raises:
        DataError: it is something else, or cannot be encoded.
    """
    if not isinstance(value, str):
        raise DataError(
            f"{name} is {excerpt(value)}", expected="text (a JSON string)", place=where
        )
    require_encodable(value, f"{where}, {name}")
    return value


def short_text_of(value: object, name: str, where: str) -> str:
    """Return a text, or a number as the text that a person would write: 72.0 is "72".

    Raises:
        DataError: the value is something else, or no finite number.
    """
    # Python counts a bool as an int.
    if isinstance(value, bool):
        return json_text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if value.is_integer() and abs(value) <= _MOST_EXACT_INTEGER:
            return str(int(value))
        if not math.isfinite(value):
            raise DataError(
                f"{name} is {value}", expected="a text or a number", place=where
            )
        return str(value)
    # Parquet and databases have them.
    if isinstance(value, Decimal) and value.is_finite():
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return text_of(value, name, where)


def answer_of(value: object, name: str, where: str) -> str:
    """Return an answer as text.

    The answer of messages is the content of the last one. Other lists, and objects, are
    JSON texts.
    """
    if is_messages(value):
        return str(messages_of(value, name, where)[-1]["content"])
    if isinstance(value, list | dict):
        require_encodable(value, f"{where}, {name}")
        return json_text(value)
    return short_text_of(value, name, where)


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
                f"character {error.start + 1} is {half!r}, half of a surrogate pair,"
                " which no encoding has",
                fix="write the whole character or leave it out",
                place=where,
            ) from None


# ----------------------------------------------------------------------------- messages


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """Return a prompt as messages: a plain text is the message of a user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def is_messages(value: object) -> bool:
    """Return whether a value is a list that begins with a chat message."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, dict) and ("role" in first or "from" in first)


def unwritten_messages(
    value: object, name: str, where: str, *, from_assistant: bool = False
) -> object:
    """Return chat messages where a text spells them out, and other values as they are.

    A list that goes through a CSV file or `json.dumps` becomes a text. One message is a
    list, too, and so is a record that has nothing but its messages. A text that spells
    other things stays one, and so do messages whose roles are all unknown.

    Args:
        name: The name of the value, for errors.
        from_assistant: Whether only messages that end with the assistant's are meant.

    Raises:
        DataError: The text begins as messages do, has a known role and a content, and
            cannot be read as messages.
    """
    if not isinstance(value, str) or not _BRACKET.match(value):
        return value
    roles = _ROLE.findall(value)
    if not roles or not _CONTENT.search(value):
        return value

    spelled = _spelled(value)
    if isinstance(spelled, dict):
        spelled = _list_in(spelled, name, where) or [spelled]
    messages = _items_of(value, spelled, _is_known_message)
    last_role = roles[-1]
    if messages:
        last = messages[-1]
        last_role = last.get("role") or last.get("from")
    if from_assistant and _SHAREGPT_ROLES.get(last_role) != "assistant":
        return value
    if messages is None:
        raise _unreadable("chat messages", value, name, where)
    return messages or value


def _list_in(spelled: Fields, name: str, where: str) -> object:
    """Return the messages that an object holds in a field of its own; None if none.

    Raises:
        DataError: It has something beside them, which no prompt would have.
    """
    for key in ("messages", "conversations", "prompt"):
        messages = spelled.get(key)
        if not is_messages(messages):
            continue
        others = sorted(other for other in spelled if other != key and spelled[other])
        if others:
            raise DataError(
                f"{name} spells a whole record, with {', '.join(others)} beside its"
                f" {key}",
                fix=f"make {key} and what the run reads of the others columns",
                place=where,
            )
        return messages
    return None


def unwritten_parts(value: object, name: str, where: str) -> object:
    """Return the parts of a content where a text spells them out, and others as is.

    Raises:
        DataError: The text begins as a list of parts does and cannot be read as one.
    """
    if not isinstance(value, str) or not _PART_TYPE.search(value):
        return value
    bracket = _BRACKET.match(value)
    if bracket is None or bracket[0].endswith("{"):
        return value
    parts = _items_of(value, _spelled(value), is_typed_part)
    if parts is None:
        raise _unreadable("parts of a content", value, name, where)
    return parts or value


def content_of(value: object, name: str, where: str) -> object:
    """Return the text of a content that comes in parts; another content as it is.

    Raises:
        DataError: A part has no text, or the parts cannot be read.
    """
    parts = unwritten_parts(value, name, where)
    return _joined(parts, where) if isinstance(parts, list) else parts


def _items_of(
    text: str, spelled: object, is_known: Callable[[object], bool]
) -> list[Message] | None:
    """Return the items that a text spells; none if it spells something else.

    Args:
        spelled: What the text spells; None if that cannot be read.
        is_known: Whether an item is what the list should consist of.

    Returns:
        The items; None if the text is cut off, or some items alone are known.
    """
    if spelled is None:
        return [] if _has_words_outside(text) else None
    if not isinstance(spelled, list | tuple):
        return []
    known = [item for item in spelled if is_known(item)]
    return None if known and len(known) < len(spelled) else known


def _is_known_message(value: object) -> bool:
    """Return whether a value is a message of a role that is known."""
    if not isinstance(value, dict):
        return False
    if value.get("role") in _KNOWN_ROLES:
        return "content" in value or "tool_calls" in value
    sender, text = value.get("from"), value.get("value")
    # The edges of a graph have such fields, too.
    return sender in tuple(_SHAREGPT_ROLES) and isinstance(text, str)


def _spelled(text: str) -> object:
    """Return what a text spells in JSON or in Python; None if nothing.

    A text that spells a text spells what that one does.
    """
    value: object = text
    # Each text is shorter than the one that spells it.
    while isinstance(value, str):
        value = _parsed(value.strip("\ufeff \t\r\n"))
    return value


def _parsed(text: str) -> object:
    """Return the value that a text spells in JSON or in Python; None if in neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    # A text of many brackets exceeds the stack of Python's parser.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _has_words_outside(text: str) -> bool:
    """Return whether words stand outside of all brackets and quotes, as in prose."""
    depth = 0
    for token in _TOKEN.finditer(text.strip().removeprefix("array")):
        if token.lastgroup == "opening":
            depth += 1
        elif token.lastgroup == "closing":
            depth -= 1
        elif token.lastgroup == "word" and depth <= 0:
            return True
    return False


def _unreadable(what: str, text: str, name: str, where: str) -> DataError:
    """Return the error about a text that should have been a list."""
    return DataError(
        f"{name} looks like {what} that were written as a text, but cannot be read"
        f" as such: {excerpt(text)}",
        fix="write them as a list, or with json.dumps; if a text is meant, begin it"
        " with a word",
        place=where,
    )


def messages_of(value: object, name: str, where: str) -> list[Message]:
    """Return chat messages with `role` and `content`, whatever the file calls them.

    An answer of the assistant that the file excludes from what is learned has the key
    `TRAINABLE` with the value false. No other message has that key.

    Raises:
        DataError: the value is no list of messages, or they hold more than text.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{name} is {excerpt(value)}",
            expected="a list of chat messages",
            place=where,
        )

    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise DataError(
                f"{name} holds {excerpt(message)}",
                expected="messages with role and content",
                place=where,
            )
        messages.append(_message(message, f"{where}, {name}, message {number}"))
    return messages


def without_nulls(value: object) -> object:
    """Return a value whose objects, at every depth, lack the fields that are null."""
    if isinstance(value, dict):
        items = value.items()
        return {name: without_nulls(part) for name, part in items if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def without_marks(messages: list[Message]) -> list[Message]:
    """Return messages without what says whether they are learned."""
    if not any(TRAINABLE in message for message in messages):
        return messages
    return [
        {key: part for key, part in message.items() if key != TRAINABLE}
        for message in messages
    ]


def as_context(messages: list[Message]) -> list[Message]:
    """Return messages with a mark on each answer, so that none of them is learned."""
    return [
        {**message, TRAINABLE: False} if message["role"] == "assistant" else message
        for message in messages
    ]


def is_learned(message: Message) -> bool:
    """Return whether a message is an answer that is learned."""
    return message["role"] == "assistant" and message.get(TRAINABLE) is not False


def _message(message: Message, place: str) -> Message:
    # The arguments of a call are texts that the model wrote.
    refuse_media(message, place, read=("content", "tool_calls"))
    # A chat template would take a null for a value.
    present = {key: part for key, part in message.items() if part is not None}
    marks = {key: present.pop(key) for key in _TRAINABLE_NAMES if key in present}
    if "from" in present and "role" not in present:
        role = require_text(present, "from", place)
        if role not in _SHAREGPT_ROLES:
            raise DataError(
                f"from is {role!r}",
                expected=f"one of {', '.join(_SHAREGPT_ROLES)}",
                place=place,
            )
        present = {
            "role": _SHAREGPT_ROLES[role],
            "content": require_text(message, "value", place),
        }

    # Tools answer in JSON, of which a model sees the text.
    if "content" in present and present.get("role") != "tool":
        present["content"] = unwritten_parts(present["content"], "content", place)
    if isinstance(present.get("content"), list):
        present["content"] = _joined(present["content"], place)
    for name in ("role", "content"):
        if not isinstance(present.get(name), str):
            # It names a null, or what there is in the place of a text.
            require_text({**message, **present}, name, place)
    # A message may have more than these two, such as calls of tools.
    require_encodable(present, place)

    # Other turns are never learned, whatever their marks are.
    if present["role"] == "assistant" and not _is_trainable(marks, place):
        present[TRAINABLE] = False
    return present


def _is_trainable(marks: dict[str, object], place: str) -> bool:
    """Return whether no mark of an answer says that it is not to be learned."""
    for name, value in marks.items():
        # A bool is equal to 0 or 1.
        if value not in (0, 1):
            raise DataError(
                f"{name} is {excerpt(value)}",
                expected="0 or 1, or false or true: an answer is learned or it is not",
                fix="correct the record",
                place=place,
            )
    return all(marks.values())


def _joined(parts: object, place: str) -> str:
    """Return the text of a content that comes in parts."""
    assert isinstance(parts, list)
    texts = []
    for part in parts:
        text = text_of_part(part, place)
        if text is None:
            raise DataError(
                f"content holds {excerpt(part)}",
                expected="parts with a text",
                place=place,
            )
        texts.append(text)
    return "".join(texts)


def excerpt(value: object) -> str:
    """Return the type of a value and its beginning, for errors."""
    return f"{type(value).__name__} {str(value)[:_EXCERPT_LENGTH]!r}"


# -------------------------------------------------------------------------------- names

ENVIRONMENT = "environment"
"""Field of a prompt that names the entry of agent.environments which it is about."""

TOOLS = "tools"
"""Field of a prompt that names those tools of its environment which are offered."""


def environment_of(
    extra: Mapping[str, object], data_source: str, names: Collection[str]
) -> str | None:
    """Return the name of the environment that a record is about.

    Args:
        extra: The other fields of the record; `environment` goes before all else.
        data_source: The data source of the record.
        names: Names of the environments of the run.

    Returns:
        The name; None where the record is about no environment, so that it gets a
        single response.
    """
    own = extra.get(ENVIRONMENT)
    if own is not None:
        return str(own)
    for name in (data_source, DEFAULT):
        if name in names:
            return name
    return None


def missing_field(name: str, fields: Fields, where: str) -> DataError:
    """Return the error about a field that is missing or null.

    Args:
        name: The field, or the path of one in an object.
        fields: The record.
        where: The place of the record.
    """
    section, _, inner = name.rpartition(".")
    outer = fields.get(section)
    if name in fields or (isinstance(outer, dict) and inner in outer):
        return DataError(
            f"{name} is null", fix="expected a value, or no such record", place=where
        )

    present = ", ".join(repr(other) for other in fields) or "none"
    similar = difflib.get_close_matches(name, fields, n=1)
    hint = f"add {name!r} to every record"
    if similar:
        hint = f"rename {similar[0]!r} to {name!r}"
    rule = f"no field {name!r}; the fields found are {present}"
    return DataError(rule, fix=hint, place=where)


def require_names_of_tools(fields: Fields, where: str) -> None:
    """Raise DataError if a record has tools that are no list of names."""
    tools = fields.get(TOOLS)
    is_list = isinstance(tools, list) and all(isinstance(each, str) for each in tools)
    if tools is not None and not is_list:
        raise DataError(
            f"{TOOLS} is {excerpt(tools)}",
            expected="a list of names of tools of the record's environment",
            place=where,
        )


def refuse_misspelt(
    where: str, present: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Raise DataError if a field looks like a misspelt optional one.

    Nobody would notice otherwise: the record is complete without it.
    """
    pair = _similar_field(present, optional)
    if pair is not None:
        misspelt, intended = pair
        raise DataError(
            f"found field {misspelt!r}",
            expected=f"{intended!r}",
            fix="rename it, or it would be ignored",
            place=where,
        )


# Cached, because a file has few distinct sets of fields, and many rows.
@functools.lru_cache(maxsize=256)
def _similar_field(
    present: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[str, str] | None:
    """Return (field of the record, optional field that it resembles), if any."""
    for name in optional:
        if name in present:
            continue
        similar = difflib.get_close_matches(name, present, n=1, cutoff=0.85)
        if similar:
            return similar[0], name
    return None


# --------------------------------------------------------------------------------- JSON


def json_text(value: object) -> str:
    """Return a value as a line of JSON.

    What JSON has is written as it is, and nothing else stops the writing. Dates and
    times are texts in ISO 8601, bytes are their UTF-8 text or null, numbers that are
    not finite are null, and all else is the text that Python prints.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def canonical_json(value: object) -> str:
    """Return the JSON text that all spellings of a value share.

    Keys are sorted, fields that are null are left out, and 1.0 is 1: Arrow orders the
    fields of objects, adds nulls, and may store whole numbers as floats.

    Args:
        value: A value that JSON has.
    """
    return json.dumps(_canonical(value), ensure_ascii=False, sort_keys=True)


def _canonical(value: object) -> object:
    """Return a value without null fields, and with whole numbers as integers."""
    if isinstance(value, dict):
        items = value.items()
        return {name: _canonical(part) for name, part in items if part is not None}
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain(value: object) -> object:
    """Return a value as JSON can hold it."""
    if isinstance(value, dict):
        items = value.items()
        return {str(key): _plain(part) for key, part in items}
    if isinstance(value, list | tuple | set):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value)
