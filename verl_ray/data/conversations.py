"""Prompts with their responses as rows of tokens, and a mask over the responses.

Invariant: the tokens before a response are those that a rollout of the same prompt would start from, and a response
ends with the token that ends a generation. Deliberately not here: file formats (`files.py`), and what is learned from
the rows (`supervised.py`, `preferences.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.data.batch import Int64, Ragged, offsets_of
from verl_ray.data.files import Content, Message
from verl_ray.data.prompts import as_messages
from verl_ray.data.stages import Bool
from verl_ray.data.tokenizers import encode, render, require_chat_template
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool,
    responses: Literal["all", "last"],
) -> tuple[Ragged, Bool]:
    """Rows of prompt and response: their tokens int32, and a mask bool [tokens], True on responses.

    `responses` says which turns of the assistant are responses: all of them, or only the last message, to which all
    others are then the prompt. A row ends behind its last response. `where[i]` names content i in errors.

    Raises:
        DataError: the tokenizer or its chat template does not fit a content; a prompt without tokens.
    """
    if apply_chat_template:
        require_chat_template(tokenizer)
        tokens, mask = _tokenize_chat(contents, where, tokenizer, responses)
    else:
        tokens, mask = _tokenize_text(contents, where, tokenizer)
    if (unprompted := mask[tokens.offsets[:-1]]).any():
        first = where[int(np.argmax(unprompted))]
        raise DataError(f"{first}: no token before the response; expected a prompt that is not empty")
    return tokens, mask


def alternate(first: Ragged, second: Ragged) -> Ragged:
    """The rows of two columns in turn: first 0, second 0, first 1, second 1, ..."""
    count = len(first)
    order = np.arange(2 * count, dtype=np.int64).reshape(2, count).T.ravel()
    return Ragged.concat([first, second]).select(order)


def _tokenize_text(
    contents: Sequence[Content], where: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Ragged, Bool]:
    pairs = [_pair(content, place) for content, place in zip(contents, where, strict=True)]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs], special=True, where=where.__getitem__)
    ends = [response + tokenizer.eos_token for _, response in pairs]
    responses = encode(tokenizer, ends, special=False, where=where.__getitem__)
    return _join(prompts, responses, np.ones(len(pairs), dtype=np.int64))


def _pair(content: Content, where: str) -> tuple[str, str]:
    if isinstance(content, tuple):
        return content
    raise DataError(
        f"{where}: found chat messages, but no chat template is applied (data.apply_chat_template = false, or the "
        "tokenizer has none); expected plain texts as prompt and response"
    )


def _tokenize_chat(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    responses: Literal["all", "last"],
) -> tuple[Ragged, Bool]:
    befores, afters, turn_of, row_of = [], [], [], []
    for row, content in enumerate(contents):
        messages = _conversation(content)
        for turn in range(0 if responses == "all" else len(messages) - 1, len(messages)):
            if messages[turn]["role"] == "assistant":
                befores.append(messages[:turn])
                afters.append(messages[: turn + 1])
                turn_of.append(turn)
                row_of.append(row)

    def turn_where(index: int) -> str:
        return f"{where[row_of[index]]}, message {turn_of[index] + 1}"

    openings = render(tokenizer, befores, add_generation_prompt=True, where=turn_where)
    closings = render(tokenizer, afters, add_generation_prompt=False, where=turn_where)
    contexts, answers = [], []
    done = ""  # of the current row: what the segments so far spell
    for index, (opening, closing) in enumerate(zip(openings, closings, strict=True)):
        if index == 0 or row_of[index] != row_of[index - 1]:
            done = ""
        end = closing.find(tokenizer.eos_token, len(opening))
        if not opening.startswith(done) or not closing.startswith(opening) or end < 0:
            raise DataError(
                f"{turn_where(index)}: the chat template does not write this assistant turn as the earlier text, the "
                f"response and the end of turn {tokenizer.eos_token!r}, so that no rollout would look like it; use a "
                "template that keeps earlier turns as they were, or split the conversation into single turns"
            )
        answer = closing[len(opening) : end + len(tokenizer.eos_token)]
        contexts.append(opening[len(done) :])
        answers.append(answer)
        done = opening + answer
    turns = np.bincount(row_of, minlength=len(contents)).astype(np.int64)
    return _join(
        encode(tokenizer, contexts, special=False, where=turn_where),
        encode(tokenizer, answers, special=False, where=turn_where),
        turns,
    )


def _conversation(content: Content) -> list[Message]:
    if isinstance(content, list):
        return content
    prompt, response = content
    return [*as_messages(prompt), {"role": "assistant", "content": response}]


def _join(contexts: Ragged, responses: Ragged, turns: Int64) -> tuple[Ragged, Bool]:
    """Rows of context, response, context, response ...: their tokens, and a mask that is True on responses."""
    segments = alternate(contexts, responses)
    mask = np.repeat(np.tile([False, True], len(contexts)), segments.lengths)
    return Ragged(segments.values, segments.offsets[2 * offsets_of(turns)]), mask
