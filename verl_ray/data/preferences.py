"""Pairs of preferences: two responses to one prompt as rows of tokens.

Invariant: rows 2i and 2i + 1 of a batch are the chosen and the rejected side of one
pair; they start with the same prompt, differ, and each ends with the token that ends a
generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.columns.batch import Batch, Ragged, ragged, row
from verl_ray.columns.stages import Bool, Float32, TrainingBatch
from verl_ray.config.data import DataSet, PreferenceDataConfig
from verl_ray.data.conversations import alternate, equal_rows, tokenize
from verl_ray.data.fields import Fields
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import Content, PreferenceRecord, Reading, preference_reading
from verl_ray.data.row_source import DataSets, Encoded, RowSource
from verl_ray.data.tokenizers import (
    TemplateArguments,
    strip_special_tokens,
    template_arguments,
)
from verl_ray.errors import DataError
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pairs(Batch):
    """One preference pair per row. No token columns: every row has length 0."""

    # Tokens of prompt and response.
    chosen: Ragged = ragged(np.int32)
    rejected: Ragged = ragged(np.int32)
    # Which of them are of the response.
    chosen_mask: Ragged = ragged(np.bool_)
    rejected_mask: Ragged = ragged(np.bool_)
    # Margin of each record; absent where one margin holds for all pairs.
    margin: Float32 | None = row(np.float32, optional=True)


class PreferenceSource(RowSource[PreferenceRecord, _Pairs]):
    """Data sets of preference pairs.

    `skipped` has the reasons `equal` (the two responses are the same), `empty` (a
    response has no text) and `too_long` (a response is longer than
    preference.max_tokens).
    """

    unit = "pair of responses"

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: PreferenceDataConfig,
        *,
        max_tokens: int,
        seed: int,
        margin: float | Literal["record"] | None,
        most_records: int | None = None,
        may_stream: bool = False,
    ) -> None:
        """Read and tokenize the pairs, or open the sets that stay on disk.

        Args:
            max_tokens: Limit of prompt and response together, on either side
                (preference.max_tokens).
            margin: Margin of every pair, or "record": each record has its own; None:
                rows have none.
            most_records: Number of records to read of each set at most; None reads all
                of them.
            may_stream: Whether large sets may stay on disk.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                pair remains.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        self._margin = margin
        super().__init__(
            data_sets, config, seed, most_records=most_records, may_stream=may_stream
        )

    def next_batch(self, pairs: int) -> TrainingBatch:
        """Return the next `pairs` pairs, two rows each.

        `loss_weight` makes the loss the mean over the pairs of the batch.
        """
        rows, _ = self._draw(pairs)
        return self._rows(rows)

    def all(self, limit_pairs: int | None = None) -> TrainingBatch:
        """Return the first `limit_pairs` pairs, equally weighted.

        They are in the order of the files. The cursor does not move.
        """
        return self._rows(self._first_rows(limit_pairs))

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[PreferenceRecord]:
        return preference_reading(data_set, first, where)

    def _encode(
        self, records: Sequence[PreferenceRecord], *, is_all: bool
    ) -> Encoded[_Pairs]:
        config = self._config
        if self._margin == "record":
            _require_margins(records)
        # Empty responses are found as texts, equal ones as tokens: different texts may
        # have the same tokens.
        is_empty = _has_empty_response(records)
        nonempty = np.flatnonzero(~is_empty)
        with_texts = [records[index] for index in nonempty]
        chosen, chosen_mask = _tokenize(with_texts, "chosen", self._tokenizer, config)
        rejected, rejected_mask = _tokenize(
            with_texts, "rejected", self._tokenizer, config
        )
        is_equal = equal_rows(chosen, rejected)
        _refuse_unusable(
            records, is_empty, is_equal, config.unusable, may_be_empty=not is_all
        )

        # A pair fits if its longer side does.
        distinct = np.flatnonzero(~is_equal)
        fitting = fitting_rows(
            np.maximum(chosen.lengths, rejected.lengths)[distinct],
            [with_texts[index].where for index in distinct],
            limit=self._max_tokens,
            limit_key="preference.max_tokens",
            overlong=config.overlong,
            may_be_empty=not is_all,
        )

        has_margins = self._margin == "record"
        pairs = _Pairs(
            offsets=np.zeros(len(with_texts) + 1, dtype=np.int64),
            chosen=chosen,
            rejected=rejected,
            chosen_mask=chosen_mask,
            rejected_mask=rejected_mask,
            margin=_margins(with_texts) if has_margins else None,
        )
        usable = distinct[fitting]
        skipped = {
            "equal": int(is_equal.sum()),
            "empty": int(is_empty.sum()),
            "too_long": len(distinct) - len(fitting),
        }
        return Encoded(pairs.select(usable), nonempty[usable], skipped)

    def _rows(self, pairs: _Pairs) -> TrainingBatch:
        tokens = alternate(pairs.chosen, pairs.rejected)
        masks = alternate(pairs.chosen_mask, pairs.rejected_mask)
        num_pairs = pairs.num_rows

        margin = pairs.margin
        if margin is None and self._margin is not None:
            margin = np.full(num_pairs, self._margin, np.float32)
        weight = np.float32(1 / max(1, num_pairs))
        return TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=masks.values,
            loss_weight=np.full(len(tokens), weight),
            unit=np.repeat(np.arange(num_pairs), 2),
            margin=None if margin is None else np.repeat(margin, 2),
        )


def _require_margins(records: Sequence[PreferenceRecord]) -> None:
    for record in records:
        if record.margin is None:
            raise DataError(
                "no field 'margin', which preference.margin = record takes from every"
                " record",
                fix="add it, or set preference.margin to a number for all pairs",
                place=record.where,
            )


def _margins(records: Sequence[PreferenceRecord]) -> Float32:
    """Margin of each record, float32 [records]."""
    return np.array([record.margin for record in records], dtype=np.float32)


def _refuse_unusable(
    records: Sequence[PreferenceRecord],
    is_empty: Bool,
    is_equal: Bool,
    unusable: Literal["refuse", "skip"],
    *,
    may_be_empty: bool,
) -> None:
    """Raise DataError for pairs that teach nothing, unless they are to be skipped.

    Args:
        is_empty: Records with an empty response, bool [records].
        is_equal: Pairs of equal responses, bool [records that are not empty].
        unusable: The setting data.unusable. Without a usable pair there is nothing to
            learn from, whatever the setting.
        may_be_empty: Whether no pair may remain.
    """
    is_unusable = is_empty.copy()
    is_unusable[~is_empty] = is_equal
    num_unusable = int(is_unusable.sum())
    if not num_unusable:
        return
    if unusable == "skip" and (may_be_empty or num_unusable < len(records)):
        return

    num_empty = int(is_empty.sum())
    num_equal = int(is_equal.sum())
    first = records[int(np.argmax(is_unusable))]
    skip = ", or set data.unusable=skip to leave them out"
    if unusable == "skip":
        skip = ""
    raise DataError(
        f"{num_unusable} of {len(records)} pairs are unusable: {num_equal} with equal"
        f" responses, {num_empty} with an empty one; the first is {first.where}",
        fix="Expected two different responses with some text; correct the"
        f" records{skip}",
    )


def _has_empty_response(records: Sequence[PreferenceRecord]) -> Bool:
    """Records with a response of white space alone, bool [records]."""
    return np.array(
        [is_empty(record.chosen) or is_empty(record.rejected) for record in records]
    )


def is_empty(content: Content) -> bool:
    """Return whether a response is white space alone."""
    # In both forms the response comes last.
    response = content[1] if isinstance(content, tuple) else str(content[-1]["content"])
    return not response.strip()


def _tokenize(
    records: Sequence[PreferenceRecord],
    side: Literal["chosen", "rejected"],
    tokenizer: PreTrainedTokenizerBase,
    config: PreferenceDataConfig,
) -> tuple[Ragged, Ragged]:
    """Return the tokens of one side of each pair, and the masks of its responses."""
    return tokenize_responses(
        [record.chosen if side == "chosen" else record.rejected for record in records],
        [f"{record.where}, {side}" for record in records],
        [record.template_arguments for record in records],
        tokenizer,
        config,
    )


def tokenize_responses(
    contents: Sequence[Content],
    places: Sequence[str],
    arguments: Sequence[TemplateArguments],
    tokenizer: PreTrainedTokenizerBase,
    config: PreferenceDataConfig,
) -> tuple[Ragged, Ragged]:
    """Return the tokens of contents, and masks that are True on their last responses.

    Args:
        contents: Prompts with their responses.
        places: The name of each, for errors.
        arguments: What each record gives to the chat template.
        tokenizer: The tokenizer.
        config: The settings of the files.

    Raises:
        DataError: The tokenizer or its chat template does not fit a content.
    """
    # What is to be refused is not removed before it is seen.
    if config.special_tokens != "refuse":
        contents = [_without_specials(content, tokenizer) for content in contents]
    tokens, mask = tokenize(
        contents,
        places,
        tokenizer,
        apply_chat_template=resolved(config.apply_chat_template),
        special_tokens=config.special_tokens,
        responses="last",
        arguments=template_arguments(config, arguments),
    )
    return tokens, Ragged(mask, tokens.offsets)


def _without_specials(content: Content, tokenizer: PreTrainedTokenizerBase) -> Content:
    """Remove the names of special tokens that the response spells out.

    They would end the response early. Grading removes them as well.
    """
    if isinstance(content, tuple):
        prompt, response = content
        return prompt, strip_special_tokens(response, tokenizer)

    *before, last = content
    response = strip_special_tokens(str(last["content"]), tokenizer)
    return [*before, {**last, "content": response}]
