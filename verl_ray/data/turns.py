"""Rows of tokens from turns: the text before a response, the response, and so on.

Invariant: a row is encoded as a whole, and the tokens before a response are those that
a rollout of the same prompt would start from. Deliberately not here: the texts of the
turns, which a chat template writes (`conversations.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.data.batch import Ragged, offsets_of
from verl_ray.data.special_tokens import Int32, SpelledTokens
from verl_ray.data.stages import Bool
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Turn:
    """A response, and the text of its row that stands before it."""

    row: int
    context: str
    """What stands between the response before and this one."""
    response: str


def rows_of(
    turns: Sequence[Turn],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
    *,
    special: bool,
) -> tuple[Ragged, Bool]:
    """Encode rows of context, response, context, response, ...

    Each row is encoded as a whole. What comes before a response has the tokens that a
    rollout starts from, also where a token of the whole would reach across the border:
    the text behind the last special token is encoded by itself to see that.

    Args:
        where: The name of each row, for errors.
        special: Whether a tokenizer adds its special tokens to a row.

    Returns:
        The tokens of each row, and a mask that is True on responses.
    """
    pieces, openings = _pieces(turns, spelled)
    turns_per_row = np.bincount([turn.row for turn in turns], minlength=len(where))
    turns_per_row = turns_per_row.astype(np.int64)
    parts = spelled.encode_pieces(
        pieces, 3 * turns_per_row, special=special, where=where.__getitem__
    )
    begun = spelled.encode_pieces(
        openings,
        np.full(len(turns), 2, np.int64),
        special=special,
        where=lambda number: where[turns[number].row],
    )

    numbers = 3 * np.arange(len(turns), dtype=np.int64)
    heads, rests, responses = (parts.select(numbers + part) for part in range(3))
    own_rests = begun.select(2 * np.arange(len(turns), dtype=np.int64) + 1)
    crossed = np.flatnonzero(~equal_rows(rests, own_rests))
    if len(crossed):
        continued = [
            _continuation(
                openings[2 * turn], openings[2 * turn + 1], turns[turn].response,
                responses[turn], tokenizer, spelled,
            )
            for turn in crossed.tolist()
        ]  # fmt: skip
        order = np.arange(len(turns), dtype=np.int64)
        order[crossed] = len(turns) + np.arange(len(crossed))
        responses = Ragged.concat(
            [responses, Ragged.of_rows(continued, np.int32)]
        ).select(order)

    segments = alternate(heads, own_rests, responses)
    mask = np.repeat(np.tile([False, False, True], len(turns)), segments.lengths)
    row_offsets = segments.offsets[3 * offsets_of(turns_per_row)]
    return Ragged(segments.values, row_offsets), mask


def _pieces(
    turns: Sequence[Turn], spelled: SpelledTokens
) -> tuple[list[str], list[str]]:
    """Return the pieces of all rows, and those of what is before each response.

    The first ones are three for each turn: the context up to its last special token,
    the rest of it, and the response. The others are that token and that rest. A context
    without a special token stands behind the one that ended the response before it.
    """
    pieces: list[str] = []
    openings: list[str] = []
    row, ended_by = -1, ""
    for turn in turns:
        start, end = spelled.last_special(turn.context)
        rest = turn.context[end:]
        anchor = turn.context[start:end]
        if not anchor and turn.row == row:
            anchor = ended_by
        pieces += [turn.context[:end], rest, turn.response]
        openings += [anchor, rest]

        start, end = spelled.last_special(turn.response)
        row, ended_by = turn.row, turn.response[start:end]
    return pieces, openings


def _continuation(
    name: str,
    rest: str,
    response: str,
    in_whole: Int32,
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> Int32:
    """Return tokens of a response that stand behind the tokens of its opening, int32.

    Args:
        name: The last special token before the response, or nothing.
        rest: The text between it and the response.
        in_whole: The tokens that begin in the response when all is encoded as one.
    """

    def tokens_of(*pieces: str) -> Ragged:
        count = np.array([len(pieces)], dtype=np.int64)
        return spelled.encode_pieces(
            pieces, count, special=False, where=lambda _: "a response"
        )

    begun = tokens_of(name, rest).values
    expected = tokenizer.decode(tokens_of(name, rest, response).values)
    # Some tokenizers put a space before a text, and not behind another character.
    alone = tokens_of("", response)[1]
    candidates = [in_whole, alone]
    for before in (str(tokenizer.eos_token), "\n", "."):
        # A vocabulary need not have these.
        with contextlib.suppress(DataError):
            candidates.append(tokens_of(before, response)[1])
    for candidate in candidates:
        if tokenizer.decode(np.concatenate([begun, candidate])) == expected:
            return candidate
    return alone


def equal_rows(first: Ragged, second: Ragged) -> Bool:
    """Rows in which both columns hold the same values, bool [rows]."""
    equal: Bool = first.lengths == second.lengths

    # Only rows of equal length can be compared value by value.
    rows = np.flatnonzero(equal)
    candidates = first.select(rows)
    differs = candidates.values != second.select(rows).values
    differences = offsets_of(differs)[candidates.offsets]
    equal[rows] = np.diff(differences) == 0
    return equal


def alternate(*columns: Ragged) -> Ragged:
    """Rows of columns in turn: first 0, second 0, ..., first 1, second 1, ..."""
    count = len(columns[0])
    numbers = np.arange(len(columns) * count, dtype=np.int64)
    order = numbers.reshape(len(columns), count).T.ravel()
    return Ragged.concat(columns).select(order)
