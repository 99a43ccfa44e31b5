"""A conversation in few messages, behind which a chat template writes the same.

What a template writes behind a turn depends on which kinds of messages are before it,
and hardly ever on how many. So a long conversation has a short stand-in: its beginning,
the last unit of each kind, and its end. A unit is a turn of the assistant with the
messages that answer it. Its kind is what templates ask of messages: roles, fields,
whether there are words, white space around them, marks of thoughts and of results, and
how many calls.

Invariant: what stands behind a turn is taken from the stand-in only where the whole
conversation had the same there when it was at least half as long and had the same kinds
in the same order. Each conversation tries that for itself, and one whose template ever
answered otherwise is written as a whole from then on. So no episode depends on another,
and a turn costs what it adds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Mapping, Sequence

from verl_ray.agents.contract import Message

EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\n*")
"""A thought of which the policy has written nothing."""

_MARKS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
"""Texts in a content that templates look for."""

_Kinds = tuple[Hashable, ...]


class Outline:
    """The kinds of the messages of a conversation that grows."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        """Begin with these messages."""
        self._length = 0
        # Messages before the first turn of the assistant.
        self._num_first = 0
        # Kinds of a unit -> number of its first message, in the last such unit.
        self._units: dict[_Kinds, int] = {}
        # The unit to which the next message may belong.
        self._start = 0
        self._kinds: list[Hashable] = []
        # Kinds of all messages that matter -> length of a conversation that was tried.
        self._tried: dict[_Kinds, int] = {}
        self._is_faithful = True
        self.extend(messages)

    def copy(self) -> Outline:
        """Return another one of the same messages."""
        other = copy.copy(self)
        other._units, other._kinds = {**self._units}, [*self._kinds]
        other._tried = {**self._tried}
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        """Add messages behind all others."""
        for message in messages:
            if message["role"] == "assistant":
                self._begin_unit()
            self._kinds.append(_kind(message))
            self._length += 1

    def rest(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        write: Callable[[Sequence[Message]], str | None],
    ) -> str | None:
        """Return what a template writes behind the last turn of a conversation.

        Args:
            history: The messages of this outline, and the turn.
            new_messages: What came after the turn.
            write: Returns the same for `history`, or for a shorter one with the same
                end; None if the template changes what it has written.
        """
        numbers = self._numbers()
        if len(numbers) == self._length or not self._is_faithful:
            return write(history)

        behind = tuple(map(_kind, [history[-1], *new_messages]))
        kinds = (*self._units, tuple(self._kinds), behind)
        short = write([*(history[number] for number in numbers), history[-1]])
        # A conversation that is not continued is written as a whole anyway.
        if short is not None and len(history) <= 2 * self._tried.get(kinds, 0):
            return short

        whole = write(history)
        self._is_faithful = short == whole
        self._tried[kinds] = len(history)
        return whole

    def _begin_unit(self) -> None:
        """End the unit of the last message; nothing is kept of older ones like it."""
        if not self._num_first and not self._units:
            self._num_first = self._length
        if self._start >= self._num_first and self._kinds:
            kinds = tuple(self._kinds)
            self._units.pop(kinds, None)
            self._units[kinds] = self._start
        self._start = self._length
        self._kinds = []

    def _numbers(self) -> list[int]:
        """Return the numbers of the messages that stand for all."""
        numbers = list(range(self._num_first))
        last = tuple(self._kinds)
        for kinds, start in self._units.items():
            if kinds != last:
                numbers += range(start, start + len(kinds))
        return numbers + list(range(max(self._start, self._num_first), self._length))


def _kind(message: Message) -> Hashable:
    """Return what templates ask of a message."""
    if not isinstance(message, Mapping):
        return None
    words = message.get("content")
    if not isinstance(words, str):
        words = ""
    calls = message.get("tool_calls")
    return (
        str(message.get("role")),
        frozenset(name for name, part in message.items() if part is not None),
        bool(words),
        words == words.strip(),
        tuple(mark in words for mark in _MARKS),
        EMPTY_THOUGHT.search(words) is not None,
        min(len(calls), 2) if isinstance(calls, Sequence) else 0,
    )
