"""Texts as tokens: many texts at a time, with the places where the tokens begin.

Invariant: a token that the tokenizer puts around a text stands there once, whether or
not the text has it already. Deliberately not here: special tokens that a text may not
spell out (`special_tokens.py`), and tokenizers themselves (`tokenizers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.data.batch import Array, Int64, Ragged, offsets_of
from verl_ray.errors import DataError
from verl_ray.profiling.phases import PHASES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bounds the memory of intermediate encodings; the throughput is flat from 4,096 on.
_TEXTS_AT_ONCE = 16_384
_SHOWN = 80  # characters of a text that an error shows


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    special: bool,
    where: Callable[[int], str],
) -> Ragged:
    """Return the token ids of each text, int32.

    Args:
        special: Whether to add the special tokens that the tokenizer puts around a
            plain text.
        where: Returns the name of a text by its number, for errors.

    Raises:
        DataError: the tokenizer has no tokens for a text.
    """
    (tokens,) = _encode(tokenizer, texts, where, partial(_chunk, special=special))
    return tokens


def encode_located(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    special: bool,
    where: Callable[[int], str],
) -> tuple[Ragged, Ragged]:
    """Return the token ids of each text as `encode` does, and where each token begins.

    Returns:
        The token ids, int32, and the number of the character of its text with which
        each token begins, int64. Tokens that the tokenizer puts in front have -1.

    Raises:
        DataError: the tokenizer has no tokens for a text, or does not know where they
            begin.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer in {tokenizer.name_or_path} does not say which characters"
            " a token stands for, by which responses are found",
            fix="expected a tokenizer.json in that directory; save the tokenizer as a"
            " fast one",
        )
    chunk = partial(_chunk, special=special, located=True)
    tokens, starts = _encode(tokenizer, texts, where, chunk)
    return tokens, starts


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    where: Callable[[int], str],
    encode_chunk: Callable[[PreTrainedTokenizerBase, list[str]], list[Ragged]],
) -> list[Ragged]:
    """Return the columns that `encode_chunk` makes of all texts."""
    # One chunk at a time bounds the memory of the encodings; no text is a chunk, too.
    parts = []
    for start in range(0, max(1, len(texts)), _TEXTS_AT_ONCE):
        PHASES.tick()
        chunk = list(texts[start : start + _TEXTS_AT_ONCE])
        try:
            parts.append(encode_chunk(tokenizer, chunk))
        # The Rust library raises bare Exception, which does not name the text.
        except Exception:
            for index, text in enumerate(chunk):
                try:
                    encode_chunk(tokenizer, [text])
                except Exception as error:
                    raise DataError(
                        f"the tokenizer in {tokenizer.name_or_path} cannot encode"
                        f" {text[:_SHOWN]!r} ({error})",
                        place=where(start + index),
                    ) from None
            raise
    return [Ragged.concat(column) for column in zip(*parts, strict=True)]


def _chunk(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    special: bool,
    located: bool = False,
) -> list[Ragged]:
    """Return the token ids of some texts; and where they begin, if `located`."""
    # Lists of lists are not empty for the library.
    if not texts:
        kinds = (np.int32, np.int64)[: 1 + located]
        return [Ragged.of_rows([], kind) for kind in kinds]

    encoded = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=located,
        return_special_tokens_mask=special,
        verbose=False,
    )
    rows: list[list[int]] = encoded["input_ids"]
    offsets = offsets_of([len(row) for row in rows])
    total = int(offsets[-1])
    # np.fromiter allocates once; an array of nested lists would need many objects
    tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)
    columns: list[Array] = [tokens]
    if located:
        bounds = chain.from_iterable(chain.from_iterable(encoded["offset_mapping"]))
        columns.append(np.fromiter(bounds, dtype=np.int64, count=2 * total)[::2])

    if special:
        masks = encoded["special_tokens_mask"]
        front, back = next(
            ((mask.index(0), mask[::-1].index(0)) for mask in masks if not all(mask)),
            (0, 0),
        )
        if located:
            columns[1][_positions(offsets[:-1], front)] = -1
        return _without_repeats(columns, offsets, front, back)
    return [Ragged(column, offsets) for column in columns]


def _without_repeats(
    columns: list[Array], offsets: Int64, front: int, back: int
) -> list[Ragged]:
    """Return rows of tokens in which what a tokenizer puts around a text stands once.

    Texts that a chat template has written already begin, and may end, with it.

    Args:
        columns: Values of each token; the first ones are token ids.
        offsets: Offsets of the rows, int64 [rows + 1].
        front: Number of tokens that the tokenizer has put in front of each text.
        back: Number of tokens that it has put behind each text.
    """
    tokens = columns[0]
    remains = np.ones(len(tokens), np.bool_)
    own = np.diff(offsets) - front - back
    for places, width, step in ((offsets[:-1], front, 1), (offsets[1:], back, -1)):
        rows = np.flatnonzero(own >= width)
        first = places[rows] - (width if step < 0 else 0)
        added = _positions(first, width)
        is_repeat = (tokens[added] == tokens[added + step * width]).all(axis=1)
        remains[added[is_repeat]] = False
        own[rows] -= is_repeat * width

    rest = offsets_of(remains)[offsets]
    return [Ragged(column[remains], rest) for column in columns]


def _positions(first: Int64, width: int) -> Int64:
    """Return positions of neighbours, int64 [places, width]: first, first + 1, ..."""
    return first[:, np.newaxis] + np.arange(width, dtype=np.int64)
