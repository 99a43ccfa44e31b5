"""The text of each token of a row.

Invariant: the pieces of a row, joined, are the decoded row. A token that ends within
a character has an empty piece, and the token that completes it has the character.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.stages import (
    Rollouts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""Character that stands for bytes which are no whole character."""


class Pieces:
    """Splits rows of tokens into the texts of their tokens.

    A row costs one decoding of the whole, and few more: the text of a token is decoded
    once, behind another one. Only tokens that end within a character are decoded with
    those around them, and rows whose tokens are no sum of their parts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer that the tokens are of."""
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        """Text of each token at the beginning of a row."""
        self._behind: dict[int, str] = {}
        """Text of each token behind the anchor: a first word loses its space."""
        self._anchor: int | None = None
        """The first token that has a text by itself."""

    def of_rows(
        self, rows: Rollouts, go_on: Callable[[], None] | None = None
    ) -> list[str]:
        """Return the text of each token of some rows, [tokens].

        Args:
            rows: The rows.
            go_on: Called after each row, so that other work goes on.
        """
        pieces: list[str] = []
        for tokens in np.split(rows.tokens, rows.offsets[1:-1]):
            pieces += self.of(tokens.tolist())
            if go_on is not None:
                go_on()
        return pieces

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token of a row, special tokens included."""
        if not tokens:
            return []
        text = self._text(tokens)
        pieces = [self._first(tokens[0]), *map(self._further, tokens[1:])]
        if "".join(pieces) == text:
            return pieces

        for start, end in _incomplete_runs(pieces):
            # The token before is the context of the first one.
            context = tokens[max(start - 1, 0) : end]
            context_pieces = self._in_context(context, self._text(context))
            pieces[start:end] = context_pieces[-(end - start) :]
        if "".join(pieces) == text:
            return pieces
        return self._in_context(tokens, text)

    def _first(self, token: int) -> str:
        """Return the text of a token at the beginning of a row."""
        if token not in self._alone:
            self._alone[token] = self._text([token])
        return self._alone[token]

    def _further(self, token: int) -> str:
        """Return the text of a token behind others."""
        known = self._behind.get(token)
        if known is not None:
            return known
        alone = self._first(token)
        if self._anchor is None:
            if not alone.strip() or _INCOMPLETE in alone:
                return alone
            self._anchor = token

        before = self._first(self._anchor)
        both = self._text([self._anchor, token])
        text = both[len(before) :] if both.startswith(before) else alone
        self._behind[token] = text
        return text

    def _in_context(self, tokens: Sequence[int], text: str) -> list[str]:
        """Return what each token adds to the text of those before it."""
        pieces: list[str] = []
        # Tokens from `start` to `end` are the context of the next piece.
        start = end = 0
        for next_end in range(1, len(tokens) + 1):
            before = self._text(tokens[start:end])
            now = self._text(tokens[start:next_end])
            if now.endswith(_INCOMPLETE):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            start, end = end, next_end

        # Bytes at the end that are no whole character belong to the last token.
        written = "".join(pieces)
        if pieces and text.startswith(written):
            pieces[-1] += text[len(written) :]
        return pieces

    def _text(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )


def _incomplete_runs(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of adjacent pieces that end within a character."""
    is_incomplete = [_INCOMPLETE in piece for piece in pieces]
    start = 0
    for value, run in itertools.groupby(is_incomplete):
        end = start + len(list(run))
        if value:
            yield start, end
        start = end
