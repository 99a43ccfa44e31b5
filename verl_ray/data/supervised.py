"""Demonstrations of a supervised run: tokenized once, with a mask over what the model should learn to say.

Invariant: the tokens before a response are those that a rollout of the same prompt would start from, and a response
ends with the token that ends a generation. Deliberately not here: file formats (`files.py`) and the order
(`cursor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.schema import DataFilesConfig
from verl_ray.data.batch import Int64, Ragged, offsets_of
from verl_ray.data.cursor import Cursor, CursorState
from verl_ray.data.files import Message, SupervisedRecord, read_supervised
from verl_ray.data.prompts import as_messages, fitting_rows
from verl_ray.data.stages import Bool, TrainingBatch
from verl_ray.data.tokenizers import encode, render, wants_chat_template
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SupervisedSource:
    """A data set of demonstrations, as token columns in memory; the same cursor contract as `PromptSource`.

    `max_tokens` (sft.max_tokens) limits prompt and response together.

    Raises:
        DataError: the records, the chat template or the lengths do not fit; nothing is left to draw.
    """

    def __init__(
        self, path: str, tokenizer: PreTrainedTokenizerBase, config: DataFilesConfig, *, max_tokens: int, seed: int
    ) -> None:
        records = read_supervised(path)
        if not records:
            raise DataError(f"{path} holds no records; expected at least one demonstration")
        if wants_chat_template(tokenizer, config.apply_chat_template):
            tokens, mask = _tokenize_chat(records, tokenizer)
        else:
            tokens, mask = _tokenize_text(records, tokenizer)
        rows = fitting_rows(
            tokens,
            [record.where for record in records],
            limit=max_tokens,
            limit_key="sft.max_tokens",
            overlong=config.overlong,
        )
        if (unprompted := mask[tokens.offsets[:-1]]).any():
            where = records[int(np.argmax(unprompted))].where
            raise DataError(f"{where}: no token before the response; expected a prompt that is not empty")
        self.skipped = len(records) - len(rows)
        """Demonstrations left out because they are longer than sft.max_tokens."""
        self._rows = TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=mask,
            loss_weight=np.zeros(len(records), dtype=np.float32),
        ).select(rows)
        self._cursor = Cursor(self._rows, seed=seed, shuffle=config.shuffle)

    def __len__(self) -> int:
        return self._rows.num_rows

    @property
    def epoch(self) -> int:
        """Full passes over the demonstrations done."""
        return self._cursor.epoch

    def next_batch(self, count: int) -> TrainingBatch:
        """The next `count` rows; `loss_weight` makes the loss the mean over all response tokens of the batch."""
        return _weighted(self._rows.select(self._cursor.draw(count)))

    def all(self, limit: int | None = None) -> TrainingBatch:
        """The first `limit` rows in the file's order, weighted alike; the cursor stays."""
        return _weighted(self._rows.select(np.arange(len(self))[:limit]))

    def state(self) -> CursorState:
        """The place of the cursor and a fingerprint of the data, as plain JSON values."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`; a DataError if the data have changed."""
        self._cursor.load_state(state)


def _weighted(rows: TrainingBatch) -> TrainingBatch:
    weight = 1.0 / max(1, int(np.count_nonzero(rows.response_mask)))
    return rows.replace(loss_weight=np.full(rows.num_rows, weight, dtype=np.float32))


def _tokenize_text(records: Sequence[SupervisedRecord], tokenizer: PreTrainedTokenizerBase) -> tuple[Ragged, Bool]:
    def where(index: int) -> str:
        return records[index].where

    pairs = [_pair(record) for record in records]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs], special=True, where=where)
    ends = [response + tokenizer.eos_token for _, response in pairs]
    responses = encode(tokenizer, ends, special=False, where=where)
    return _interleave(prompts, responses, np.ones(len(records), dtype=np.int64))


def _pair(record: SupervisedRecord) -> tuple[str, str]:
    if isinstance(record.content, tuple):
        return record.content
    raise DataError(
        f"{record.where}: found chat messages, but no chat template is applied (data.apply_chat_template = false, or "
        "the tokenizer has none); expected plain texts in prompt and response"
    )


def _tokenize_chat(records: Sequence[SupervisedRecord], tokenizer: PreTrainedTokenizerBase) -> tuple[Ragged, Bool]:
    befores, afters, turn_of, row_of = [], [], [], []
    for row, record in enumerate(records):
        messages = _conversation(record)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                befores.append(messages[:turn])
                afters.append(messages[: turn + 1])
                turn_of.append(turn)
                row_of.append(row)

    def where(index: int) -> str:
        return f"{records[row_of[index]].where}, message {turn_of[index] + 1}"

    openings = render(tokenizer, befores, add_generation_prompt=True, where=where)
    closings = render(tokenizer, afters, add_generation_prompt=False, where=where)
    contexts, responses = [], []
    done = ""  # of the current row: what the segments so far spell
    for index, (opening, closing) in enumerate(zip(openings, closings, strict=True)):
        if index == 0 or row_of[index] != row_of[index - 1]:
            done = ""
        end = closing.find(tokenizer.eos_token, len(opening))
        if not opening.startswith(done) or not closing.startswith(opening) or end < 0:
            raise DataError(
                f"{where(index)}: the chat template does not write this assistant turn as the earlier text, the "
                f"response and the end of turn {tokenizer.eos_token!r}, so that no rollout would look like it; use a "
                "template that keeps earlier turns as they were, or split the conversation into single turns"
            )
        response = closing[len(opening) : end + len(tokenizer.eos_token)]
        contexts.append(opening[len(done) :])
        responses.append(response)
        done = opening + response
    turns = np.bincount(row_of, minlength=len(records)).astype(np.int64)
    return _interleave(
        encode(tokenizer, contexts, special=False, where=where),
        encode(tokenizer, responses, special=False, where=where),
        turns,
    )


def _conversation(record: SupervisedRecord) -> list[Message]:
    if isinstance(record.content, list):
        return record.content
    prompt, response = record.content
    return [*as_messages(prompt), {"role": "assistant", "content": response}]


def _interleave(contexts: Ragged, responses: Ragged, turns: Int64) -> tuple[Ragged, Bool]:
    """Rows of context, response, context, response ...: their tokens, and a mask that is True on responses."""
    count = len(contexts)
    order = np.arange(2 * count, dtype=np.int64).reshape(2, count).T.ravel()  # context 0, response 0, context 1, ...
    segments = Ragged.concat([contexts, responses]).select(order)
    mask = np.repeat(order >= count, segments.lengths)
    return Ragged(segments.values, segments.offsets[2 * offsets_of(turns)]), mask
