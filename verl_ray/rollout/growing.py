"""The thoughts and words of a turn while its tokens are being sampled.

Invariant: what is shown once is what the whole turn will be read as, up to there, as
far as that is known. What may become a mark of thoughts, the name of a special token, a
call of a tool or a text to stop at is held back, and so is white space that may be left
out in the end; where that becomes much, the rest is shown with the whole turn. Two
things that come late can still change what was shown: the end of a
thought that nothing has begun, and words that vLLM's parser streams before it reads
them as a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from verl_ray.rollout.texts import Beginnings, GrowingText

if TYPE_CHECKING:
    from verl_ray.rollout.call_parser import GrowingReply


_MOST_HELD = 256
"""Characters held back with which a turn shows nothing more.

What is held back is looked at again with every further part, on an event loop that all
turns share: without an end, a run of `<` would cost the square of its length.
"""


class Marks(NamedTuple):
    """Marks in front of a thought and behind it."""

    start: str
    end: str


class SpecialNames:
    """Names of special tokens, which are no part of what is said."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names."""
        names = list(names)
        self.beginnings = Beginnings(names)
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")


class GrowingTurn:
    """The thoughts and words of a turn that grows with its tokens."""

    def __init__(
        self,
        text: GrowingText,
        marks: Marks | None,
        names: SpecialNames,
        reply: GrowingReply | None,
        stop: Sequence[str] = (),
        *,
        is_open: bool,
    ) -> None:
        """Begin an empty turn.

        Args:
            text: The text of its tokens, special ones included.
            marks: The marks of thoughts; None if thoughts are words.
            names: Names of special tokens.
            reply: Shows the words among calls of tools; None if nothing is a call.
            stop: Texts with which the turn ends, and which are not shown.
            is_open: Whether the prompt has begun a thought.
        """
        self._text = text
        self._division = _Division(marks, is_open=is_open)
        self._reply = reply
        self._holds_margin = marks is not None or reply is not None
        self._margin: str | None = ""
        """White space in front of the words; None once they have begun."""
        self._waits = False
        self._thoughts = _Shown(names, stop, trims_start=True, trims_end=True)
        # A parser of calls may leave white space out in front of one.
        trims_end = reply is not None
        self._words = _Shown(names, stop, trims_start=False, trims_end=trims_end)
        self._is_over = False

    def add(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        """Add tokens that are not the last ones.

        Returns:
            Further thoughts, and further words behind them, in turn.
        """
        if self._is_over:
            return []
        _, piece = self._text.add(tokens, last=False)
        further = []
        for is_thought, part in self._division.add(piece):
            if is_thought:
                further.append((self._thoughts.add(part), ""))
            else:
                # A thought is whole before the words behind it.
                words = self._words.add(self._said(part))
                further.append((self._thoughts.end(), words))
        self._is_over = self._num_held > _MOST_HELD
        return [each for each in further if any(each)]

    @property
    def _num_held(self) -> int:
        """Characters that are held back."""
        reply = 0 if self._reply is None else self._reply.num_held
        shown = self._thoughts.num_held + self._words.num_held
        return self._division.num_held + len(self._margin or "") + reply + shown

    def _said(self, part: str) -> str:
        """Return what is certainly said of a further part of the reply."""
        if self._waits:
            return ""
        if self._margin is not None:
            part = self._margin + part
            words = part.lstrip()
            if not words:
                self._margin = part
                return ""
            if self._division.num_thoughts:
                part = words
            elif part != words and self._holds_margin:
                # Whether it stays depends on what follows.
                self._waits = True
                return ""
            self._margin = None
        return part if self._reply is None else self._reply.add(part)


class _Division:
    """Divides a growing text into thoughts and words, as `_Thoughts` does a whole one.

    Attributes:
        num_thoughts: Thoughts that have begun.
    """

    def __init__(self, marks: Marks | None, *, is_open: bool) -> None:
        self._marks = marks
        self.num_thoughts = 0
        self._is_thought = False
        # A model may write the mark again that its template has written.
        self._is_unclear = is_open
        self._has_words = self._is_lost = False
        self._rest = ""
        if marks is not None:
            self._beginnings = {
                places: Beginnings(places)
                for places in ((marks.start,), (marks.end,), tuple(marks))
            }

    @property
    def num_held(self) -> int:
        """Characters that may become a mark."""
        return len(self._rest)

    def add(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Add a piece; yield further parts, and whether each is of a thought."""
        if self._marks is None:
            yield False, piece
            return
        self._rest += piece
        if self._is_unclear and not self._is_begun(self._marks.start):
            return
        # Each round passes a mark.
        while not self._is_lost:
            marks = self._awaited()
            places = [(self._rest.find(mark), mark) for mark in marks]
            known = [place for place in places if place[0] >= 0]
            if not known:
                end = len(self._rest) - self._beginnings[marks].length_in(self._rest)
                yield from self._part(end, end)
                return
            place, mark = min(known)
            yield from self._part(place, place + len(mark))
            yield from self._pass(mark)

    def _is_begun(self, start: str) -> bool:
        """Return whether it is clear who has written the first mark."""
        written = self._rest.lstrip()
        if written != start and start.startswith(written):
            return False
        self._is_unclear = False
        self._is_thought = not written.startswith(start)
        self.num_thoughts = int(self._is_thought)
        return True

    def _awaited(self) -> tuple[str, ...]:
        """Return the marks of which the next one counts."""
        assert self._marks is not None
        if self._is_thought:
            return (self._marks.end,)
        # The end of a thought that nothing has begun.
        return (self._marks.start,) if self.num_thoughts else tuple(self._marks)

    def _part(self, end: int, rest: int) -> Iterator[tuple[bool, str]]:
        part, self._rest = self._rest[:end], self._rest[rest:]
        self._has_words |= not self._is_thought and bool(part.strip())
        if part:
            yield self._is_thought, part

    def _pass(self, mark: str) -> Iterator[tuple[bool, str]]:
        assert self._marks is not None
        is_end = mark == self._marks.end
        if is_end and not self._is_thought:
            # All that was said was thought.
            self._is_lost = self._has_words
            self.num_thoughts = 1
        elif not is_end:
            self.num_thoughts += 1
            if self.num_thoughts > 1:
                yield True, "\n"
        self._is_thought = not is_end


class _Shown:
    """A growing text without names of special tokens, margins, and what ends a turn."""

    def __init__(
        self,
        names: SpecialNames,
        stop: Sequence[str],
        *,
        trims_start: bool,
        trims_end: bool,
    ) -> None:
        self._names = names
        self._stop = stop
        self._trims_start = trims_start
        self._trims_end = trims_end
        # What may become a name, white space at the end, what may become a stop text.
        self._held = self._space = self._late = ""
        self._is_over = False

    @property
    def num_held(self) -> int:
        """Characters that are not certain."""
        return len(self._held) + len(self._space) + len(self._late)

    def add(self, piece: str) -> str:
        """Add a piece; return what is certain now."""
        if not piece or self._is_over:
            return ""
        text = self._held + piece
        # The text around a removed name may spell another one.
        while self._names.pattern.search(text):
            text = self._names.pattern.sub("", text)
        end = len(text)
        while held := self._names.beginnings.length_in(text, end):
            end -= held
        self._held = text[end:]
        return self._until_stop(self._trimmed(text[:end]))

    def end(self) -> str:
        """Return what was held back as a beginning, and is none."""
        text = "" if self._is_over else self._until_stop(self._trimmed(self._held))
        text += self._late
        self._held = self._late = ""
        return text

    def _trimmed(self, text: str) -> str:
        text = self._space + text
        if self._trims_start:
            text = text.lstrip()
        trimmed = text.rstrip() if self._trims_end else text
        self._space = text[len(trimmed) :]
        self._trims_start &= not trimmed
        return trimmed

    def _until_stop(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._late + text
        places = [text.find(each) for each in self._stop]
        starts = [place for place in places if place >= 0]
        self._is_over = bool(starts)
        end = min(starts or [_place_of_beginning(text, each) for each in self._stop])
        self._late = "" if starts else text[end:]
        return text[:end]


def _place_of_beginning(text: str, stop: str) -> int:
    """Return where the end of a text begins that may be the beginning of another."""
    place = max(0, len(text) - len(stop) + 1)
    # Ends behind the last of its first characters; a text to stop at may be long.
    while (place := text.find(stop[0], place)) >= 0:
        if stop.startswith(text[place:]):
            return place
        place += 1
    return len(text)
