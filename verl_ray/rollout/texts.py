"""The text of a response while its tokens are being sampled.

Invariant: text that was returned never changes, and its pieces add up to what the
tokenizer decodes from all tokens together, cut where the first stop string begins. A
character or a stop string that may be incomplete is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The first bytes of an incomplete character are decoded to this.
_INCOMPLETE = "\ufffd"

# A character has at most four bytes, and a token at least one.
_MAX_INCOMPLETE_TOKENS = 3


class GrowingText:
    """Text of a response that grows with its tokens.

    Attributes:
        stopped: Whether a stop string has ended the text. Further tokens do not belong
            to it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        spells_special_tokens: bool = False,
    ) -> None:
        """Begin an empty text, which ends before the first of the `stop` strings.

        Args:
            spells_special_tokens: Whether special tokens are part of the text.
        """
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skips_special = not spells_special_tokens
        self._tokens: list[int] = []
        self._text = ""

        # The end of the text that could be the beginning of a stop string.
        self._held_back = max((len(text) for text in stop), default=1) - 1
        # Tokens before `_num_decoded` are in the text already; those from `_context` on
        # are decoded once more with the next tokens, which they may influence.
        self._context = 0
        self._num_decoded = 0
        # Number of characters that were returned.
        self._num_returned = 0

    def add(self, tokens: Sequence[int], *, last: bool) -> tuple[int, str]:
        """Add tokens to the text.

        Args:
            tokens: The next token ids.
            last: Whether no more tokens follow.

        Returns:
            How many of the tokens belong to the response, and the text that is certain
            now and was not returned before.
        """
        num_used = 0
        if self._stop:
            # Token by token, to know which of them completes a stop string.
            while num_used < len(tokens) and not self.stopped:
                self._grow(tokens[num_used : num_used + 1])
                num_used += 1
        else:
            self._grow(tokens)
            num_used = len(tokens)

        if last and not self.stopped:
            # A character that is still incomplete will not be completed any more.
            self._text += self._new_text()

        if last or self.stopped:
            end = len(self._text)
        else:
            end = max(self._num_returned, len(self._text) - self._held_back)
        piece = self._text[self._num_returned : end]
        self._num_returned = end
        return num_used, piece

    def _grow(self, tokens: Sequence[int]) -> None:
        """Decode tokens, and cut the text at a stop string."""
        self._tokens += tokens
        end, new_text = self._certain_text()
        if not new_text:
            return

        # A stop string may begin in the text that was held back.
        search_from = max(0, len(self._text) - self._held_back)
        self._text += new_text
        self._context = self._num_decoded
        self._num_decoded = end

        matches = [self._text.find(text, search_from) for text in self._stop]
        starts = [start for start in matches if start >= 0]
        if starts:
            self._text = self._text[: min(starts)]
            self.stopped = True

    def _certain_text(self) -> tuple[int, str]:
        """Return the text that is new and that further tokens do not change.

        Returns:
            The number of tokens up to its end, and the text.
        """
        new_text = self._new_text()
        end = len(self._tokens)
        if not new_text.endswith(_INCOMPLETE):
            return end, new_text

        # Of bytes that are no characters, only the last may still become one, so that
        # the others need not be decoded again with every token.
        end = max(self._num_decoded, end - _MAX_INCOMPLETE_TOKENS)
        earlier_text = self._new_text(end)
        if not new_text.startswith(earlier_text):
            # A character begins before `end` and is complete behind it.
            return self._num_decoded, ""
        return end, earlier_text

    def _new_text(self, end: int | None = None) -> str:
        """Return the text that tokens after `_num_decoded` add to what is decoded.

        Args:
            end: Number of tokens up to the last of them; None = all.
        """
        known = self._decode(self._num_decoded)
        return self._decode(end)[len(known) :]

    def _decode(self, end: int | None) -> str:
        tokens = self._tokens[self._context : end]
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special)
        return str(text)


class Beginnings:
    """Texts of which the end of a growing text may be the beginning."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Take the texts, which are short."""
        self._all = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, self._all), default=0)

    def length_in(self, text: str, end: int | None = None) -> int:
        """Return how many characters at the end of a text may begin one of these.

        Args:
            end: Where the text ends; None for all of it.
        """
        end = len(text) if end is None else end
        lengths = range(min(end, self._longest), 0, -1)
        return next((n for n in lengths if text[end - n : end] in self._all), 0)
