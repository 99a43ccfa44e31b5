"""Responses with what a teacher says of each of their tokens, as `generate` wrote them.

Invariant: tokens are those that were sampled, and are never encoded again. A student
of another vocabulary is refused.

A record has `prompt_tokens` and `response_tokens`, lists of ids; and for each response
token, in its place, a list of the teacher's most probable tokens in `top_tokens`, the
first one first, and of their log-probs at temperature 1 in `top_log_probs`. Where it
has the text of the response as well, `response`, the tokens are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import Float32, Int32, TrainingBatch
from verl_ray.config.data import DataFilesConfig, DataSet
from verl_ray.data.conversations import ResponseSource
from verl_ray.data.fields import Fields, excerpt, missing_field
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import Reading
from verl_ray.data.row_source import DataSets, Encoded
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPARED = 8
"""Records of a piece whose tokens are compared with their text."""


@dataclass(frozen=True, eq=False, slots=True)
class TeacherRecord:
    """A response, and what the teacher says of it.

    Attributes:
        where: The place of the record, for errors.
        prompt: int32 [tokens].
        response: int32 [tokens].
        text: The text of the response; None where the record has none.
        top_tokens: int32 [tokens, k].
        top_log_probs: float32 [tokens, k].
    """

    where: str
    prompt: Int32
    response: Int32
    text: str | None
    top_tokens: Int32
    top_log_probs: Float32


class TeacherSource(ResponseSource[TeacherRecord]):
    """Data sets of responses with a teacher's most probable tokens."""

    unit = "response"

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: DataFilesConfig,
        *,
        top_k: int,
        **limits: Any,
    ) -> None:
        """Read the responses, or open the sets that stay on disk.

        Args:
            top_k: The teacher's most probable tokens that rows have (sft.top_k).
            **limits: Those of `ResponseSource`.

        Raises:
            DataError: A record does not fit, or no response remains.
        """
        self._top_k = top_k
        super().__init__(data_sets, tokenizer, config, **limits)

    def all(self, limit: int | None = None) -> TrainingBatch:
        """Return the first `limit` rows, to measure the likelihood of the responses.

        They are in the order of the files, without the teacher's tokens. The cursor
        does not move.
        """
        return super().all(limit).replace(candidates=None, teacher_log_probs=None)

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[TeacherRecord]:
        return Reading("responses with a teacher's log-probs", (self._record,))

    def _record(self, where: str, fields: Fields) -> TeacherRecord:
        text = fields.get("response")
        prompt = _ids(fields, "prompt_tokens", where)
        response = _ids(fields, "response_tokens", where)
        top_tokens = _table(fields, "top_tokens", np.int32, where)
        top_log_probs = _table(fields, "top_log_probs", np.float32, where)

        if not len(prompt) or not len(response):
            raise DataError(
                f"{len(prompt)} prompt_tokens and {len(response)} response_tokens",
                expected="at least one of each",
                place=where,
            )
        shape = len(response), top_tokens.shape[1]
        if not top_tokens.shape == top_log_probs.shape == shape:
            raise DataError(
                f"top_tokens are of {top_tokens.shape} and top_log_probs of"
                f" {top_log_probs.shape}, with {len(response)} response_tokens",
                expected="a list of the same length for each response token",
                place=where,
            )
        if shape[1] < self._top_k:
            raise DataError(
                f"it has {shape[1]} tokens of the teacher in each place, and sft.top_k"
                f" is {self._top_k}",
                fix=f"set sft.top_k={shape[1]}, or generate --top-logprobs"
                f" {self._top_k}",
                place=where,
            )
        _require_ordered_log_probs(top_log_probs, where)
        compared = slice(None), slice(self._top_k)
        return TeacherRecord(
            where,
            prompt,
            response,
            text if isinstance(text, str) else None,
            top_tokens[compared],
            top_log_probs[compared],
        )

    def _encode(
        self, records: Sequence[TeacherRecord], *, is_all: bool
    ) -> Encoded[TrainingBatch]:
        self._require_vocabulary(records)
        pieces = [part for each in records for part in (each.prompt, each.response)]
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        is_response = np.tile([False, True], len(records))
        mask = np.repeat(is_response, lengths)

        shape = len(mask), self._top_k
        candidates = np.zeros(shape, np.int32)
        teacher_log_probs = np.zeros(shape, np.float32)
        if records:
            candidates[mask] = np.concatenate([each.top_tokens for each in records])
            teacher_log_probs[mask] = np.concatenate(
                [each.top_log_probs for each in records]
            )
        row_lengths = lengths.reshape(-1, 2).sum(axis=1)
        fitting = fitting_rows(
            row_lengths,
            [record.where for record in records],
            limit=self._max_tokens,
            limit_key="sft.max_tokens",
            overlong=self._config.overlong,
            may_be_empty=not is_all,
        )

        rows = TrainingBatch(
            offsets=offsets_of(row_lengths),
            tokens=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
            response_mask=mask,
            candidates=candidates,
            teacher_log_probs=teacher_log_probs,
            # A weight depends on the batch, for which `ResponseSource` sets it.
            loss_weight=np.zeros(len(records), dtype=np.float32),
        )
        skipped = {"too_long": len(records) - len(fitting)}
        return Encoded(rows.select(fitting), fitting, skipped)

    def _require_vocabulary(self, records: Sequence[TeacherRecord]) -> None:
        """Raise DataError if the tokens are those of another vocabulary."""
        num_tokens = len(self._tokenizer)
        for record in records:
            for tokens in (record.prompt, record.response, record.top_tokens):
                if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= num_tokens:
                    raise _other_vocabulary(
                        f"token {tokens.max()}", f"{num_tokens} tokens", record.where
                    )

        for record in records[:_COMPARED]:
            if record.text is None:
                continue
            # `generate` writes texts without special tokens, too.
            read = self._tokenizer.decode(record.response, skip_special_tokens=True)
            if read != record.text:
                raise _other_vocabulary(
                    f"tokens {record.response[:5].tolist()} ... of"
                    f" {record.text[:40]!r}",
                    f"{str(read)[:40]!r} of the same tokens",
                    record.where,
                )


def _other_vocabulary(what: str, own: str, where: str) -> DataError:
    return DataError(
        f"{what}, where the tokenizer of the run's model has {own}: the teacher has"
        " another vocabulary",
        fix="expected a student and a teacher of one vocabulary; or learn the texts"
        " alone, with sft.divergence=null",
        place=where,
    )


def _ids(fields: Fields, name: str, where: str) -> Int32:
    """Return a list of token ids, int32 [tokens]."""
    ids: Int32 = _numbers(fields, name, np.int32, 1, where)
    return ids


def _table(fields: Fields, name: str, dtype: type[np.generic], where: str) -> Any:
    """Return a list of equally long lists of numbers, [tokens, k]."""
    return _numbers(fields, name, dtype, 2, where)


def _numbers(
    fields: Fields, name: str, dtype: type[np.generic], dimensions: int, where: str
) -> Any:
    """Return numbers of a record as an array.

    Raises:
        DataError: They are missing, or something else.
    """
    value = fields.get(name)
    if value is None:
        raise missing_field(name, fields, where)
    kind = "i" if issubclass(dtype, np.integer) else "if"
    try:
        array = np.array(value)
    except ValueError:
        array = np.array(None)
    is_empty = array.size == 0 and array.ndim <= dimensions
    if is_empty:
        return np.zeros((0,) * dimensions, dtype)
    if array.ndim != dimensions or array.dtype.kind not in kind:
        form = "numbers" if dimensions == 1 else "lists of numbers, equally many each"
        raise DataError(
            f"{name} is {excerpt(value)}", expected=f"a list of {form}", place=where
        )
    if kind == "i" and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise DataError(
            f"{name} has {array.min()} to {array.max()}",
            expected="numbers of tokens, from 0",
            place=where,
        )
    return array.astype(dtype)


_ROUNDING = 1e-4
"""Tolerance of a log-prob that was rounded, or computed in half precision."""


def _require_ordered_log_probs(log_probs: Float32, where: str) -> None:
    """Raise DataError if these are no log-probs, the largest one first.

    Args:
        log_probs: float32 [tokens, k]; -inf where a teacher has said nothing.
    """
    # Not `log_probs > tolerance`, which would hide NaN.
    if not (log_probs <= _ROUNDING).all():
        raise DataError(
            f"top_log_probs has {log_probs.max()}",
            expected="natural logarithms of probabilities, at most 0",
            place=where,
        )
    if (log_probs[:, 1:] > log_probs[:, :-1] + _ROUNDING).any():
        raise DataError(
            "top_log_probs are not sorted",
            expected="those of the most probable token first, in each place",
            place=where,
        )
