"""Demonstrations of a supervised run: tokenized once, with a mask over the responses.

Invariant: the loss of a batch is the mean over all its response tokens, whichever rows
they are in. Deliberately not here: record fields (`records.py`), the tokens of a row
(`conversations.py`) and the order (`cursor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.data import DataFilesConfig
from verl_ray.config.section import resolved
from verl_ray.data.conversations import tokenize
from verl_ray.data.cursor import Cursor, CursorState
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import read_supervised
from verl_ray.data.stages import TrainingBatch
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SupervisedSource:
    """A data set of demonstrations, as token columns in memory.

    It has the same cursor contract as `PromptSource`.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        config: DataFilesConfig,
        *,
        max_tokens: int,
        seed: int,
        most_records: int | None = None,
    ) -> None:
        """Read and tokenize the demonstrations.

        Args:
            max_tokens: Limit of prompt and response together (sft.max_tokens).
            most_records: Number of records to read at most; None reads all of them.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                demonstration remains.
        """
        records = read_supervised(path, most_records)
        if not records:
            raise DataError(
                f"{path} holds no records; expected at least one demonstration"
            )

        where = [record.where for record in records]
        tokens, mask = tokenize(
            [record.content for record in records],
            where,
            tokenizer,
            apply_chat_template=resolved(config.apply_chat_template),
            special_tokens=config.special_tokens,
            responses="all",
        )
        # Every turn of the assistant is a response, so a row is one conversation.
        rows = fitting_rows(
            tokens.lengths,
            where,
            limit=max_tokens,
            limit_key="sft.max_tokens",
            overlong=config.overlong,
        )
        self.skipped = len(records) - len(rows)
        """Demonstrations left out because they are longer than sft.max_tokens."""

        demonstrations = TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=mask,
            # A weight depends on the batch: `_with_mean_weights` sets it.
            loss_weight=np.zeros(len(records), dtype=np.float32),
        )
        self._rows = demonstrations.select(rows)
        self._cursor = Cursor(self._rows, seed=seed, shuffle=config.shuffle)

    def __len__(self) -> int:
        return self._rows.num_rows

    @property
    def epoch(self) -> int:
        """Completed passes over the demonstrations."""
        return self._cursor.epoch

    def next_batch(self, count: int) -> TrainingBatch:
        """Return the next `count` rows.

        `loss_weight` makes the loss the mean over all response tokens of the batch.
        """
        return _with_mean_weights(self._rows.select(self._cursor.draw(count)))

    def all(self, limit: int | None = None) -> TrainingBatch:
        """Return the first `limit` rows in the file's order, equally weighted.

        The cursor does not move.
        """
        return _with_mean_weights(self._rows.select(np.arange(len(self))[:limit]))

    def state(self) -> CursorState:
        """State of the cursor and a fingerprint of the data, as plain JSON values."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`.

        Raises:
            DataError: the data have changed.
        """
        self._cursor.load_state(state)


def _with_mean_weights(rows: TrainingBatch) -> TrainingBatch:
    """Return the rows with the weight of a mean over all their response tokens."""
    # A batch without response tokens has a loss of 0, and no division by 0.
    num_response_tokens = int(np.count_nonzero(rows.response_mask))
    weight = 1.0 / max(1, num_response_tokens)
    return rows.replace(loss_weight=np.full(rows.num_rows, weight, dtype=np.float32))
