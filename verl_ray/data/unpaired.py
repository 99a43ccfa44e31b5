"""Preferences without pairs: responses with labels as rows of tokens.

Invariant: a row is a prompt and its last response, which the mask is True on and which
ends with the token that ends a generation. Every response of a batch weighs the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import Bool, TrainingBatch
from verl_ray.config.data import DataSet, PreferenceDataConfig
from verl_ray.data.conversations import alternate
from verl_ray.data.fields import Fields
from verl_ray.data.preferences import is_empty, tokenize_responses
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import Reading, UnpairedRecord, unpaired_reading
from verl_ray.data.row_source import DataSets, Encoded, RowSource
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class UnpairedSource(RowSource[UnpairedRecord, TrainingBatch]):
    """Data sets of responses with labels; a pair is a response of either label.

    `skipped` has the reasons `empty` (the response has no text) and `too_long` (the row
    is longer than preference.max_tokens).
    """

    unit = "response"

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: PreferenceDataConfig,
        *,
        max_tokens: int,
        seed: int,
        most_records: int | None = None,
        may_stream: bool = False,
    ) -> None:
        """Read and tokenize the responses, or open the sets that stay on disk.

        Args:
            max_tokens: Limit of prompt and response together (preference.max_tokens).
            most_records: Number of rows to read of each set at most; None reads all of
                them.
            may_stream: Whether large sets may stay on disk.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                response of one of the labels remains.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        # The beginning of a set may well have one label alone.
        self._needs_both_labels = most_records is None
        super().__init__(
            data_sets, config, seed, most_records=most_records, may_stream=may_stream
        )
        self._labels: set[bool] = set()
        self._first_epoch = self.epoch

    def next_batch(self, count: int) -> TrainingBatch:
        """Return the next `count` responses.

        `loss_weight` makes the loss the mean over the responses of the batch.

        Raises:
            DataError: A whole epoch of streamed responses had one label alone.
        """
        rows, _ = self._draw(count)
        assert rows.desirable is not None, "the responses have labels"
        self._labels |= set(rows.desirable.tolist())
        # A resumed run begins within an epoch.
        if len(self._labels) < 2 and self.epoch > self._first_epoch + 1:
            _require_both_labels(rows)
        return _with_mean_weights(rows)

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state` was taken."""
        super().load_state(state)
        self._first_epoch = self.epoch

    def all(self, limit: int | None = None) -> TrainingBatch:
        """Return the first `limit` responses in the order of the files.

        The cursor does not move.

        Raises:
            DataError: They have one label alone.
        """
        rows = self._first_rows(limit)
        if limit is not None:
            _require_both_labels(rows)
        return _with_mean_weights(rows)

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[UnpairedRecord]:
        return unpaired_reading(data_set, first, where)

    def _encode(
        self, records: Sequence[UnpairedRecord], *, is_all: bool
    ) -> Encoded[TrainingBatch]:
        config = self._config
        has_text = np.array([not is_empty(record.content) for record in records])
        if config.unusable == "refuse" or (is_all and not has_text.any()):
            _refuse_empty(records, has_text)

        numbers = np.flatnonzero(has_text)
        usable = [records[number] for number in numbers]
        where = [record.where for record in usable]
        tokens, mask = tokenize_responses(
            [record.content for record in usable],
            where,
            [record.template_arguments for record in usable],
            self._tokenizer,
            config,
        )
        fitting = fitting_rows(
            tokens.lengths,
            where,
            limit=self._max_tokens,
            limit_key="preference.max_tokens",
            overlong=config.overlong,
            may_be_empty=not is_all,
        )
        rows = TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=mask.values,
            # A weight depends on the batch: `_with_mean_weights` sets it.
            loss_weight=np.zeros(len(usable), np.float32),
            desirable=np.array([record.is_desirable for record in usable], np.bool_),
        ).select(fitting)
        if is_all and self._needs_both_labels:
            _require_both_labels(rows)
        skipped = {
            "empty": len(records) - len(usable),
            "too_long": len(usable) - len(fitting),
        }
        return Encoded(rows, numbers[fitting], skipped)


def with_next_responses(rows: TrainingBatch, max_tokens: int) -> TrainingBatch:
    """Return each prompt with the response of the next row; the last with the first.

    Responses are cut where a row would be longer than `max_tokens`; prompts are whole.

    Args:
        rows: Rows that end with their responses, and are not longer either.
        max_tokens: Limit of prompt and response together.

    Returns:
        As many rows, without labels.
    """
    mask = rows.response_mask
    num_response = np.bincount(rows.row_of_token[mask], minlength=rows.num_rows)
    num_prompt = rows.lengths - num_response
    prompts = Ragged(rows.tokens[~mask], offsets_of(num_prompt))
    own = Ragged(rows.tokens[mask], offsets_of(num_response))
    responses = own.select(np.roll(np.arange(rows.num_rows), -1))

    lengths = np.minimum(responses.lengths, max_tokens - num_prompt)
    starts = np.repeat(responses.offsets[:-1], responses.lengths)
    place = np.arange(len(responses.values)) - starts
    is_kept = place < np.repeat(lengths, responses.lengths)
    cut = Ragged(responses.values[is_kept], offsets_of(lengths))

    parts = alternate(prompts, cut)
    in_response = np.tile([False, True], rows.num_rows)
    return TrainingBatch(
        offsets=parts.offsets[::2],
        tokens=parts.values,
        response_mask=np.repeat(in_response, parts.lengths),
        loss_weight=rows.loss_weight,
    )


def _with_mean_weights(rows: TrainingBatch) -> TrainingBatch:
    weight = np.float32(1 / max(1, rows.num_rows))
    return rows.replace(loss_weight=np.full(rows.num_rows, weight))


def _require_both_labels(rows: TrainingBatch) -> None:
    """Raise DataError if all responses, or none of them, are desirable."""
    assert rows.desirable is not None, "the responses have labels"
    num_desirable = int(np.count_nonzero(rows.desirable))
    if 0 < num_desirable < rows.num_rows:
        return
    label = "desirable" if num_desirable else "undesirable"
    raise DataError(
        f"all {rows.num_rows} responses are {label}",
        fix="expected some of either label, also among the first"
        " evaluation.num_pairs held-out ones",
    )


def _refuse_empty(records: Sequence[UnpairedRecord], has_text: Bool) -> None:
    """Raise DataError if a response has no text.

    Args:
        has_text: Records whose response has some, bool [records].
    """
    num_empty = int(np.count_nonzero(~has_text))
    if not num_empty:
        return
    first = records[int(np.argmin(has_text))]
    # Without a single response there is nothing to learn from, whatever the setting.
    skip = ", or set data.unusable=skip to leave them out" if has_text.any() else ""
    raise DataError(
        f"{num_empty} of {len(records)} responses are empty; the first is"
        f" {first.where}",
        fix=f"Expected some text; correct the records{skip}",
    )
