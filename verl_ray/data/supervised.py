"""Demonstrations of a supervised run: tokenized once, with a mask over the responses.

Invariant: the loss of a batch is the mean over all its response tokens, whichever rows
they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.data import DataFilesConfig, DataSet
from verl_ray.config.section import resolved
from verl_ray.data.chat_templates import template_arguments
from verl_ray.data.conversations import tokenize
from verl_ray.data.fields import Fields
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import Reading, SupervisedRecord, supervised_reading
from verl_ray.data.row_source import DataSets, Encoded, RowSource
from verl_ray.data.stages import TrainingBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SupervisedSource(RowSource[SupervisedRecord, TrainingBatch]):
    """Data sets of demonstrations."""

    unit = "demonstration"

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: DataFilesConfig,
        *,
        max_tokens: int,
        seed: int,
        most_records: int | None = None,
        may_stream: bool = False,
    ) -> None:
        """Read and tokenize the demonstrations, or open the sets that stay on disk.

        Args:
            max_tokens: Limit of prompt and response together (sft.max_tokens).
            most_records: Number of records to read of each set at most; None reads all
                of them.
            may_stream: Whether large sets may stay on disk.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                demonstration remains.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        super().__init__(
            data_sets, config, seed, most_records=most_records, may_stream=may_stream
        )

    def next_batch(self, count: int) -> TrainingBatch:
        """Return the next `count` rows.

        `loss_weight` makes the loss the mean over all response tokens of the batch.
        """
        rows, _ = self._draw(count)
        return _with_mean_weights(rows)

    def all(self, limit: int | None = None) -> TrainingBatch:
        """Return the first `limit` rows in the order of the files, equally weighted.

        The cursor does not move.
        """
        return _with_mean_weights(self._first_rows(limit))

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[SupervisedRecord]:
        return supervised_reading(data_set, first, where)

    def _encode(
        self, records: Sequence[SupervisedRecord], *, is_all: bool
    ) -> Encoded[TrainingBatch]:
        where = [record.where for record in records]
        tokens, mask = tokenize(
            [record.content for record in records],
            where,
            self._tokenizer,
            apply_chat_template=resolved(self._config.apply_chat_template),
            special_tokens=self._config.special_tokens,
            responses="all",
            arguments=template_arguments(
                self._config, [record.template_arguments for record in records]
            ),
        )
        # Every turn of the assistant is a response, so a row is one conversation.
        fitting = fitting_rows(
            tokens.lengths,
            where,
            limit=self._max_tokens,
            limit_key="sft.max_tokens",
            overlong=self._config.overlong,
            may_be_empty=not is_all,
        )

        demonstrations = TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=mask,
            # A weight depends on the batch: `_with_mean_weights` sets it.
            loss_weight=np.zeros(len(records), dtype=np.float32),
        )
        skipped = {"too_long": len(records) - len(fitting)}
        return Encoded(demonstrations.select(fitting), fitting, skipped)


def _with_mean_weights(rows: TrainingBatch) -> TrainingBatch:
    """Return the rows with the weight of a mean over all their response tokens."""
    # A batch without response tokens has a loss of 0, and no division by 0.
    num_response_tokens = int(np.count_nonzero(rows.response_mask))
    weight = 1.0 / max(1, num_response_tokens)
    return rows.replace(loss_weight=np.full(rows.num_rows, weight, dtype=np.float32))
