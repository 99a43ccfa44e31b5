"""The prompts of a run: tokenized once, drawn batch by batch, resumable to the same batch.

Invariant: prompt number g of the run (its `group_id`) is the same whatever the batch sizes and resumes before it.
Deliberately not here: file formats (`files.py`) and the order (`cursor.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.config.data import DataConfig
from verl_ray.config.section import resolved
from verl_ray.data.batch import Int64, Ragged
from verl_ray.data.cursor import Cursor, CursorState
from verl_ray.data.files import Message, PromptRecord, read_prompts
from verl_ray.data.stages import Prompts
from verl_ray.data.tokenizers import encode, render, require_chat_template
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSource:
    """A data set of prompts, as token columns in memory.

    Raises:
        DataError: the records, the chat template or the lengths do not fit; nothing is left to draw.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig, seed: int) -> None:
        records = read_prompts(path)
        if not records:
            raise DataError(f"{path} holds no records; expected at least one prompt")
        tokens = _tokenize(records, tokenizer, apply_chat_template=resolved(config.apply_chat_template))
        rows = fitting_rows(
            tokens.lengths,
            [record.where for record in records],
            limit=config.max_prompt_tokens,
            limit_key="data.max_prompt_tokens",
            overlong=config.overlong,
        )
        self.skipped = len(records) - len(rows)
        """Prompts left out because they are longer than data.max_prompt_tokens."""
        self._prompts = Prompts(
            offsets=tokens.offsets,
            group_id=np.arange(len(records), dtype=np.int64),
            tokens=tokens.values,
            messages=Ragged.of_texts(json.dumps(record.prompt, ensure_ascii=False) for record in records),
            data_source=Ragged.of_texts(record.data_source for record in records),
            answer=Ragged.of_texts(record.answer for record in records),
            extra=Ragged.of_texts(record.extra for record in records),
        ).select(rows)
        self._cursor = Cursor(self._prompts, seed=seed, shuffle=config.shuffle)

    def __len__(self) -> int:
        return self._prompts.num_rows

    @property
    def epoch(self) -> int:
        """Full passes over the prompts done."""
        return self._cursor.epoch

    def next_batch(self, count: int) -> Prompts:
        """The next `count` prompts; `group_id` is their running number in the run."""
        first = self._cursor.drawn
        rows = self._cursor.draw(count)
        return self._prompts.select(rows).replace(group_id=np.arange(first, first + count, dtype=np.int64))

    def all(self, limit: int | None = None) -> Prompts:
        """The first `limit` prompts in the file's order, for evaluation; the cursor stays. `group_id` = line."""
        return self._prompts.select(np.arange(len(self))[:limit])

    def state(self) -> CursorState:
        """The place of the cursor and a fingerprint of the data, as plain JSON values."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`; a DataError if the data have changed."""
        self._cursor.load_state(state)


def fitting_rows(
    lengths: Int64, where: Sequence[str], *, limit: int, limit_key: str, overlong: Literal["refuse", "skip"]
) -> Int64:
    """Row numbers of at most `limit` tokens, int64; longer rows are refused or left out, as `data.overlong` says.

    `lengths` int64 [rows], in tokens.

    Raises:
        DataError: a row without tokens; rows too long that may not be skipped; no row left.
    """
    if not lengths.all():
        raise DataError(f"{where[int(np.argmin(lengths))]}: no tokens; expected a text that is not empty")
    rows = np.flatnonzero(lengths <= limit)
    too_long = len(lengths) - len(rows)
    if too_long and (overlong == "refuse" or not len(rows)):
        longest = int(np.argmax(lengths))
        skip = "" if overlong == "skip" else ", or set data.overlong=skip to leave them out"
        raise DataError(
            f"{too_long} of {len(lengths)} rows are longer than {limit_key} = {limit}; the longest has "
            f"{lengths[longest]} tokens ({where[longest]}). Set {limit_key}={lengths[longest]}{skip}"
        )
    return rows


def _tokenize(
    records: Sequence[PromptRecord], tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool
) -> Ragged:
    def where(index: int) -> str:
        return records[index].where

    if apply_chat_template:
        require_chat_template(tokenizer)
        conversations = [as_messages(record.prompt) for record in records]
        texts = render(tokenizer, conversations, add_generation_prompt=True, where=where)
        return encode(tokenizer, texts, special=False, where=where)  # the template wrote the specials
    return encode(tokenizer, [plain_text(record.prompt, record.where) for record in records], special=True, where=where)


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A plain text as the message of a user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_text(messages: str) -> str:
    """A prompt (the JSON in a `messages` column) as one text: as it is, or the contents of its messages."""
    prompt = json.loads(messages)
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)


def plain_text(prompt: str | list[Message], where: str) -> str:
    """A prompt that no chat template is applied to; a DataError if it needs one."""
    if isinstance(prompt, str):
        return prompt
    raise DataError(
        f"{where}: found chat messages, but no chat template is applied (data.apply_chat_template = false, or the "
        "tokenizer has none); expected plain text, or a chat model with data.apply_chat_template=auto"
    )
