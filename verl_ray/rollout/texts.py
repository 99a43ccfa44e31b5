"""One response as text, while it is drawn.

Invariant: what was told never changes, and the pieces add up to what the tokenizer says of all tokens together, cut
where the first stop string begins; a character, or a stop string, that may not be whole yet is held back. Deliberately
not here: which tokens end a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what the first bytes of a character are decoded to


class GrowingText:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._held_back = max((len(text) for text in stop), default=1) - 1
        self._tokens: list[int] = []
        self._known, self._seen = 0, 0  # tokens before `_known` give context, those before `_seen` are in the text
        self._text, self._told = "", 0
        self.stopped = False
        """Whether a stop string has ended the text; further tokens are not part of it."""

    def add(self, tokens: Sequence[int], *, last: bool) -> tuple[int, str]:
        """How many of the tokens belong to the response, and what is new of its text.

        last: no more will come.
        """
        taken = 0
        if self._stop:
            while taken < len(tokens) and not self.stopped:
                self._grow(tokens[taken : taken + 1])
                taken += 1
        else:
            self._grow(tokens)
            taken = len(tokens)
        whole = last or self.stopped
        if last and not self.stopped:
            self._text += self._unseen()  # a character that will not be whole any more
        end = len(self._text) if whole else max(self._told, len(self._text) - self._held_back)
        piece, self._told = self._text[self._told : end], end
        return taken, piece

    def _grow(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        new = self._unseen()
        if not new or new.endswith(_INCOMPLETE):
            return
        searched = max(0, len(self._text) - self._held_back)
        self._text += new
        self._known, self._seen = self._seen, len(self._tokens)
        found = [at for text in self._stop if (at := self._text.find(text, searched)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _unseen(self) -> str:
        """What the tokens that are not in the text yet add to it."""
        return self._decode(len(self._tokens))[len(self._decode(self._seen)) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._tokens[self._known : end], skip_special_tokens=True))
