"""Prompts with their responses as rows of tokens, and a mask over the responses.

Invariant: the tokens before a response are those that a rollout of the same prompt
would start from, and a response ends with the token that ends a generation.
Deliberately not here: file formats (`files.py`), and what is learned from the rows
(`supervised.py`, `preferences.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.config.data import SpecialTokens
from verl_ray.data.batch import Int64, Ragged, offsets_of
from verl_ray.data.contents import Content
from verl_ray.data.field_values import Message, as_messages
from verl_ray.data.special_tokens import SpelledTokens
from verl_ray.data.stages import Bool
from verl_ray.data.tokenizers import render, require_chat_template
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(
    contents: Sequence[Content | str],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool,
    special_tokens: SpecialTokens,
    responses: Literal["all", "last"],
) -> tuple[Ragged, Bool]:
    """Turn contents into rows of prompt and response; a row ends with a response.

    A content that is a single text is a response from its second token on, since
    nothing predicts the first. No chat template is applied to it.

    Args:
        where: The name of each content, for errors.
        special_tokens: What happens to special tokens that a content spells out.
        responses: Which turns of the assistant are responses: all of them, or only the
            last message, to which all others are then the prompt.

    Returns:
        The tokens of each row, int32, and a mask, bool [tokens], True on responses.

    Raises:
        DataError: the tokenizer or its chat template does not fit a content, or a
            prompt has no tokens.
    """
    spelled = SpelledTokens(tokenizer, special_tokens)
    texts: dict[int, str] = {}
    answered: dict[int, Content] = {}
    for row, (content, place) in enumerate(zip(contents, where, strict=True)):
        if isinstance(content, str):
            texts[row] = spelled.guard(content, place)
        else:
            answered[row] = _guarded(content, place, spelled)

    tokens, mask = _tokenize_single(
        list(texts.values()), [where[row] for row in texts], tokenizer, spelled
    )
    if answered:
        guarded = list(answered.values())
        places = [where[row] for row in answered]
        if apply_chat_template:
            require_chat_template(tokenizer)
            others = _tokenize_chat(guarded, places, tokenizer, spelled, responses)
        else:
            others = _tokenize_text(guarded, places, tokenizer, spelled)
        # Rows go back to the places of their contents.
        order = np.argsort([*texts, *answered])
        tokens, mask = _concat((tokens, mask), others, order)

    # A model predicts a token from those before it: the first response token needs one.
    starts_with_response = mask[tokens.offsets[:-1]]
    if starts_with_response.any():
        first = where[int(np.argmax(starts_with_response))]
        raise DataError(
            f"{first}: no token before the response; expected a prompt that is not"
            " empty"
        )
    return tokens, mask


def alternate(first: Ragged, second: Ragged) -> Ragged:
    """Rows of two columns in turn: first 0, second 0, first 1, second 1, ..."""
    count = len(first)
    order = np.arange(2 * count, dtype=np.int64).reshape(2, count).T.ravel()
    return Ragged.concat([first, second]).select(order)


def _guarded(content: Content, place: str, spelled: SpelledTokens) -> Content:
    if isinstance(content, list):
        return spelled.guard(content, place)
    prompt, response = content
    return (
        spelled.guard(prompt, f"{place}, prompt"),
        spelled.guard(response, f"{place}, response"),
    )


def _concat(
    first: tuple[Ragged, Bool], second: tuple[Ragged, Bool], order: Int64
) -> tuple[Ragged, Bool]:
    """Join rows of tokens with their masks, and put the rows in an order."""
    tokens = Ragged.concat([first[0], second[0]])
    mask = Ragged(np.concatenate([first[1], second[1]]), tokens.offsets)
    return tokens.select(order), mask.select(order).values


# -------------------------------------------------------------------------- plain texts


def _tokenize_single(
    texts: Sequence[str],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> tuple[Ragged, Bool]:
    end = tokenizer.eos_token
    ended = [text if text.endswith(end) else text + end for text in texts]
    tokens = spelled.encode(ended, special=True, where=where.__getitem__)
    # Each row has its end at least, so that it has a first token.
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    return tokens, mask


def _tokenize_text(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> tuple[Ragged, Bool]:
    prompts = []
    responses = []
    for content, place in zip(contents, where, strict=True):
        prompt, response = _pair(content, place)
        prompts.append(prompt)
        responses.append(response + tokenizer.eos_token)

    name = where.__getitem__
    prompt_tokens = spelled.encode(prompts, special=True, where=name)
    response_tokens = spelled.encode(responses, special=False, where=name)
    one_turn_each = np.ones(len(contents), dtype=np.int64)
    return _join(prompt_tokens, response_tokens, one_turn_each)


def _pair(content: Content, where: str) -> tuple[str, str]:
    if isinstance(content, tuple):
        return content
    raise DataError(
        f"{where}: found chat messages, but no chat template is applied"
        " (data.apply_chat_template = false, or the tokenizer has none); expected"
        " plain texts as prompt and response"
    )


# ------------------------------------------------------------------------ conversations


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the assistant that is a response."""

    row: int
    """Number of its conversation."""
    index: int
    """Number of its message in the conversation."""
    before: list[Message]
    """Messages before it."""
    up_to: list[Message]
    """Messages up to it, itself included."""


def _tokenize_chat(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
    responses: Literal["all", "last"],
) -> tuple[Ragged, Bool]:
    turns = _turns(contents, responses)

    def turn_where(number: int) -> str:
        turn = turns[number]
        return f"{where[turn.row]}, message {turn.index + 1}"

    # Each turn is written twice, without the response and with it: the difference is
    # what the model has to generate.
    befores = [turn.before for turn in turns]
    up_to = [turn.up_to for turn in turns]
    openings = render(tokenizer, befores, add_generation_prompt=True, where=turn_where)
    closings = render(tokenizer, up_to, add_generation_prompt=False, where=turn_where)

    context_texts = []
    response_texts = []
    current_row = -1
    text_so_far = ""  # text of the current row's segments so far
    for number, turn in enumerate(turns):
        if turn.row != current_row:
            current_row = turn.row
            text_so_far = ""

        opening = openings[number]
        closing = closings[number]
        # The text behind the end of turn, such as a line break, is not generated.
        end = closing.find(tokenizer.eos_token, len(opening))
        extends = opening.startswith(text_so_far) and closing.startswith(opening)
        if not extends or end < 0:
            raise DataError(_unusable_template(turn_where(number), tokenizer))

        response = closing[len(opening) : end + len(tokenizer.eos_token)]
        context_texts.append(opening[len(text_so_far) :])
        response_texts.append(response)
        text_so_far = opening + response

    turns_per_row = np.bincount([turn.row for turn in turns], minlength=len(contents))
    return _join(
        spelled.encode(context_texts, special=False, where=turn_where),
        spelled.encode(response_texts, special=False, where=turn_where),
        turns_per_row.astype(np.int64),
    )


def _turns(
    contents: Sequence[Content], responses: Literal["all", "last"]
) -> list[_Turn]:
    """Responses of all conversations, row by row and in the order of their messages."""
    turns = []
    for row, content in enumerate(contents):
        messages = _conversation(content)
        # A prompt may hold earlier turns of the assistant, which are not learned.
        first = 0 if responses == "all" else len(messages) - 1
        for index in range(first, len(messages)):
            if messages[index]["role"] == "assistant":
                up_to = messages[: index + 1]
                turns.append(_Turn(row, index, messages[:index], up_to))
    return turns


def _conversation(content: Content) -> list[Message]:
    if isinstance(content, list):
        return content
    prompt, response = content
    return [*as_messages(prompt), {"role": "assistant", "content": response}]


def _unusable_template(where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return (
        f"{where}: the chat template does not write this assistant turn as the earlier"
        f" text, the response and the end of turn {tokenizer.eos_token!r}, so that no"
        " rollout would look like it; use a template that keeps earlier turns as they"
        " were, or split the conversation into single turns"
    )


def _join(contexts: Ragged, responses: Ragged, turns: Int64) -> tuple[Ragged, Bool]:
    """Join segments into rows of context, response, context, response, ...

    Args:
        turns: The number of responses of each row, int64 [rows].

    Returns:
        The tokens of each row, and a mask that is True on responses.
    """
    segments = alternate(contexts, responses)
    is_response = np.tile([False, True], len(contexts))
    mask = np.repeat(is_response, segments.lengths)
    # Each turn has two segments: a row's first segment is behind two per earlier turn.
    row_offsets = segments.offsets[2 * offsets_of(turns)]
    return Ragged(segments.values, row_offsets), mask
