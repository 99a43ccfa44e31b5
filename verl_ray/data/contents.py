"""Contents of a record in one form, whatever the schema of its data set.

Invariant: a prompt is a text or messages of which the next turn is the model's; a
content is a prompt with its response. Deliberately not here: the columns that the
values come from (`schemas.py`), and tokens (`conversations.py`).
"""

from __future__ import annotations

import re
from typing import TypeVar

from verl_ray.data.field_names import missing_field
from verl_ray.data.field_values import (
    Message,
    answer_of,
    as_context,
    as_messages,
    excerpt,
    is_learned,
    messages_of,
    short_text_of,
    text_of,
    without_marks,
)
from verl_ray.data.file_formats import Fields, is_messages
from verl_ray.data.schemas import Schema
from verl_ray.errors import DataError

Prompt = str | list[Message]

Content = tuple[str, str] | list[Message]
"""A (prompt, response) pair of plain texts, or a conversation with assistant turns.

A mark on a turn of the assistant says that it is not learned (`is_learned`).
"""

ContentOrPrompt = TypeVar("ContentOrPrompt", Content, Prompt)

# The beginning of a response in a dialogue that is written as a text.
_RESPONSE_MARK = re.compile(
    r"(?:^|\n)\W*(?:assistant|response|answer)\s*:", re.IGNORECASE
)

_LAST_WORD = re.compile(r"\s*\w*$")


# ------------------------------------------------------------------------------- values


def required(schema: Schema, field: str, fields: Fields, where: str) -> object:
    """Return the value of our field, which every record of the schema has.

    Raises:
        DataError: this record has none.
    """
    value = schema.value(field, fields)
    if value is None:
        raise missing_field(schema.columns[field], fields, where)
    return value


def problem_and_answer(
    schema: Schema, fields: Fields, where: str
) -> tuple[Prompt, str | None]:
    """Return the prompt of a record, and what its response is compared with, if any."""
    answer = None
    if "answer" in schema.columns:
        value = required(schema, "answer", fields, where)
        answer = answer_of(value, schema.columns["answer"], where)

    if "chosen" in schema.columns:
        chosen, _ = pair_of_contents(schema, fields, where)
        prompt, response = _parted(chosen)
    elif "messages" in schema.columns:
        prompt, response = _parted(_conversation(schema, fields, where))
    else:
        prompt, response = _prompt(schema, fields, where), None
    return _unmarked(prompt), response if answer is None else answer


def demonstration(schema: Schema, fields: Fields, where: str) -> Content | str:
    """Return a prompt with its response, a conversation, or a text as a whole.

    Answers that are not learned are marked: those of a prompt, which are context, and
    those that the record excludes.
    """
    if "text" in schema.columns:
        value = required(schema, "text", fields, where)
        return text_of(value, schema.columns["text"], where)

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


def pair_of_contents(
    schema: Schema, fields: Fields, where: str
) -> tuple[Content, Content]:
    """Return the better and the worse response, each with the prompt of both."""
    sides = [required(schema, name, fields, where) for name in ("chosen", "rejected")]
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
    value = required(schema, "prompt", fields, where)
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
        prompt = text_of(value, name, where)
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
    message: Message = {"role": "system", "content": text_of(value, name, where)}
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
    value = required(schema, "messages", fields, where)
    messages = messages_of(value, schema.columns["messages"], where)
    return as_messages(_with_system(schema, messages, fields, where))


# ---------------------------------------------------------------------------- responses


def _answered(
    schema: Schema, prompt: Prompt | None, field: str, fields: Fields, where: str
) -> Content:
    """Return a prompt with the response in a field, which may be a conversation."""
    value = required(schema, field, fields, where)
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


def _unmarked(content: ContentOrPrompt) -> ContentOrPrompt:
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
            required(schema, name, fields, where), schema.columns[name], where
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
