"""The text of each single token of a row.

Invariant: the pieces of a row, joined, are the decoded row. A token that ends within a
character has an empty piece, and the token that completes it has the character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""Character that stands for bytes which are no whole character."""


class Pieces:
    """Splits rows of tokens into the texts of their tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer that the tokens are of."""
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        """Text of each token by itself."""

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token of a row, special tokens included."""
        text = self._text(tokens)
        unknown = sorted(set(tokens) - self._alone.keys())
        self._alone |= {token: self._text([token]) for token in unknown}

        # Most rows are what their tokens are by themselves, which is cheap to see.
        pieces = [self._alone[token] for token in tokens]
        if "".join(pieces) == text:
            return pieces
        return self._in_context(tokens, text)

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
