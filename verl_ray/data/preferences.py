"""Pairs for a reward model: two responses to one prompt as rows of tokens, the better one first.

Invariant: rows 2i and 2i + 1 of a batch are the chosen and the rejected side of one pair; they start with the same
prompt, differ, and each ends with the token that ends a generation. Deliberately not here: file formats (`files.py`),
the tokens of a row (`conversations.py`), where a score is read and the loss (`verl_ray/algorithms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from verl_ray.config.data import PreferenceDataConfig
from verl_ray.config.section import resolved
from verl_ray.data.batch import Batch, Ragged, ragged, row
from verl_ray.data.conversations import alternate, tokenize
from verl_ray.data.cursor import Cursor, CursorState
from verl_ray.data.files import Content, PreferenceRecord, read_preferences
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.stages import Bool, Float32, TrainingBatch
from verl_ray.data.tokenizers import unspecial
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pairs(Batch):
    """What the cursor counts: one pair per row. No token columns: every row has length 0."""

    chosen: Ragged = ragged(np.int32)  # tokens of prompt and response
    rejected: Ragged = ragged(np.int32)
    margin: Float32 | None = row(np.float32, optional=True)  # the records' own; absent where one holds for all


class PreferenceSource:
    """A data set of preference pairs, as token columns in memory; the same cursor contract as `PromptSource`.

    `max_tokens` (preference.max_tokens) limits prompt and response together, on either side. `margin` is that of
    every pair, or "record": each record has its own.

    Raises:
        DataError: the records, the chat template or the lengths do not fit; nothing is left to draw.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        config: PreferenceDataConfig,
        *,
        max_tokens: int,
        seed: int,
        margin: float | Literal["record"],
    ) -> None:
        records = read_preferences(path)
        if not records:
            raise DataError(f"{path} holds no records; expected at least one pair of responses")
        if margin == "record":
            _require_margins(records)
        empty = np.array([_is_empty(record.chosen) or _is_empty(record.rejected) for record in records])
        said = [records[index] for index in np.flatnonzero(~empty)]
        chosen, rejected = (_tokenize(said, side, tokenizer, config) for side in ("chosen", "rejected"))
        equal = np.zeros(len(records), dtype=np.bool_)
        equal[~empty] = _equal_rows(chosen, rejected)
        self.skipped = {"equal": int(equal.sum()), "empty": int(empty.sum()), "too_long": 0}
        """Pairs left out: their responses are the same, one says nothing, one is longer than preference.max_tokens."""
        unusable = equal | empty
        if unusable.any() and (config.unusable == "refuse" or unusable.all()):
            raise DataError(_refusal(records, int(np.argmax(unusable)), self.skipped, config.unusable))
        distinct = np.flatnonzero(~equal[~empty])
        fitting = fitting_rows(
            np.maximum(chosen.lengths, rejected.lengths)[distinct],
            [said[index].where for index in distinct],
            limit=max_tokens,
            limit_key="preference.max_tokens",
            overlong=config.overlong,
        )
        self.skipped["too_long"] = len(distinct) - len(fitting)
        self._margin = margin
        self._pairs = _Pairs(
            offsets=np.zeros(len(said) + 1, dtype=np.int64),
            chosen=chosen,
            rejected=rejected,
            margin=np.array([record.margin for record in said], dtype=np.float32) if margin == "record" else None,
        ).select(distinct[fitting])
        self._cursor = Cursor(self._pairs, seed=seed, shuffle=config.shuffle)

    def __len__(self) -> int:
        """Pairs, of two rows each."""
        return self._pairs.num_rows

    @property
    def epoch(self) -> int:
        """Full passes over the pairs done."""
        return self._cursor.epoch

    def next_batch(self, pairs: int) -> TrainingBatch:
        """The next `pairs` pairs, two rows each; `loss_weight` makes the loss the mean over the pairs of the batch."""
        return self._rows(self._pairs.select(self._cursor.draw(pairs)))

    def all(self, limit_pairs: int | None = None) -> TrainingBatch:
        """The first `limit_pairs` pairs in the file's order, weighted alike; the cursor stays."""
        return self._rows(self._pairs.select(np.arange(len(self))[:limit_pairs]))

    def state(self) -> CursorState:
        """The place of the cursor and a fingerprint of the data, as plain JSON values; it counts pairs."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`; a DataError if the data have changed."""
        self._cursor.load_state(state)

    def _rows(self, pairs: _Pairs) -> TrainingBatch:
        tokens = alternate(pairs.chosen, pairs.rejected)
        margin = np.full(pairs.num_rows, self._margin, np.float32) if pairs.margin is None else pairs.margin
        return TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=np.zeros(len(tokens.values), dtype=np.bool_),
            loss_weight=np.full(len(tokens), 1.0 / max(1, len(tokens)), dtype=np.float32),
            margin=np.repeat(margin, 2),
        )


def _require_margins(records: Sequence[PreferenceRecord]) -> None:
    for record in records:
        if record.margin is None:
            raise DataError(
                f"{record.where}: no field 'margin', which preference.margin = record takes from every record; add "
                "it, or set preference.margin to a number for all pairs"
            )


def _refusal(
    records: Sequence[PreferenceRecord], first: int, skipped: Mapping[str, int], unusable: Literal["refuse", "skip"]
) -> str:
    skip = "" if unusable == "skip" else ", or set data.unusable=skip to leave them out"
    return (
        f"{skipped['equal'] + skipped['empty']} of {len(records)} pairs are unusable: {skipped['equal']} with equal "
        f"responses, {skipped['empty']} with an empty one; the first is {records[first].where}. Expected two different "
        f"responses that say something; correct the records{skip}"
    )


def _is_empty(content: Content) -> bool:
    response = content[1] if isinstance(content, tuple) else str(content[-1]["content"])
    return not response.strip()


def _tokenize(
    records: Sequence[PreferenceRecord],
    side: Literal["chosen", "rejected"],
    tokenizer: PreTrainedTokenizerBase,
    config: PreferenceDataConfig,
) -> Ragged:
    sides = (record.chosen if side == "chosen" else record.rejected for record in records)
    tokens, _ = tokenize(
        [_without_specials(content, tokenizer) for content in sides],
        [f"{record.where}, {side}" for record in records],
        tokenizer,
        apply_chat_template=resolved(config.apply_chat_template),
        responses="last",
    )
    return tokens


def _without_specials(content: Content, tokenizer: PreTrainedTokenizerBase) -> Content:
    """Names of special tokens that the response spells out would end it early; they are left out, as in grading."""
    if isinstance(content, tuple):
        return content[0], unspecial(content[1], tokenizer)
    return [*content[:-1], {**content[-1], "content": unspecial(str(content[-1]["content"]), tokenizer)}]


def _equal_rows(left: Ragged, right: Ragged) -> Bool:
    """Where both columns hold the same tokens, bool [rows]; no row is empty."""
    equal: npt.NDArray[np.bool_] = left.lengths == right.lengths
    rows = np.flatnonzero(equal)
    a, b = left.select(rows), right.select(rows)
    equal[rows] = np.logical_and.reduceat(a.values == b.values, a.offsets[:-1])
    return equal
