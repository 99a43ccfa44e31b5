"""Answers that are sent as events while their turns are sampled.

Invariant: the parts of a stream add up to the answer that is sent at once, unless a
part was shown with which the turn does not begin in the end: nothing further of such
thoughts or words is sent, for it cannot be taken back. Calls of tools are sent whole.
What an agent repeats of a stream makes one message.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from verl_ray.agents.contract import Listener, Message
from verl_ray.agents.gateway.calls import (
    AnswerStream,
    CallChoice,
    CallReply,
    Event,
    ModelCall,
)
from verl_ray.agents.gateway.conversation import served

Kind = Literal["reasoning", "content"]
"""The field of a message that a part belongs to."""

_KINDS: tuple[Kind, Kind] = ("reasoning", "content")


class Growth:
    """Parts of an answer that are known while its turns are sampled.

    Attributes:
        begun: The answer without its turns.
        parts: Parts of them in the order of time: the number of the turn, and further
            thoughts or further words. A turn bounds what they hold, and they are
            forgotten once it is whole and no stream goes on.
    """

    def __init__(self, begun: CallReply) -> None:
        """Know nothing yet."""
        self.begun = begun
        self.parts: list[tuple[int, str, str]] = []
        self._news: asyncio.Future[None] | None = None

    def listener(self, number: int, num_prompt_tokens: int) -> Listener:
        """Return what listens to a turn behind so many tokens."""
        self.begun = replace(self.begun, num_prompt_tokens=num_prompt_tokens)

        def listen(thoughts: str, words: str) -> None:
            if thoughts:
                self.parts.append((number, thoughts, ""))
            if words:
                self.parts.append((number, "", words))
            if self._news is not None:
                self._news.set_result(None)
                self._news = None

        return listen

    def after(self, count: int) -> list[tuple[int, str, str]]:
        """Return what follows the first parts, with adjacent ones of a kind as one.

        So whoever reads slowly gets few and long ones.
        """
        groups = itertools.groupby(
            self.parts[count:], lambda part: (part[0], part[1] > "")
        )
        parts = []
        for (number, _), group in groups:
            _, thoughts, words = zip(*group, strict=True)
            parts.append((number, "".join(thoughts), "".join(words)))
        return parts

    @property
    def news(self) -> asyncio.Future[None]:
        """A future that the next part completes."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def as_shown(self, number: int, message: Message) -> Message:
        """Return the message of a turn as whoever has listened to it is told it."""
        parts = [part[1:] for part in self.parts if part[0] == number]
        shown = dict(message)
        for kind, texts in zip(_KINDS, zip(*parts, strict=True), strict=False):
            text = "".join(texts)
            shown[kind] = text + _rest(text, message.get(kind, ""))
        return {kind: part for kind, part in shown.items() if part or kind in message}


def _rest(shown: str, whole: str) -> str:
    """Return what may follow a text that was shown; none if it is another text."""
    return whole[len(shown) :] if whole.startswith(shown) else ""


class TurnStream(AnswerStream):
    """The events of an answer, made of the parts of its turns."""

    def __init__(self, call: ModelCall) -> None:
        """Begin without any part."""
        self._call = call
        self._shown: defaultdict[tuple[int, Kind], list[str]] = defaultdict(list)

    def grow(self, number: int, thoughts: str, words: str) -> Iterator[Event]:
        """Yield the events of further thoughts and words of a turn."""
        for kind, text in zip(_KINDS, (thoughts, words), strict=True):
            if text:
                self._shown[number, kind].append(text)
                yield from self._part(number, kind, text)

    def end(self, reply: CallReply) -> Iterator[Event]:
        """Yield the events of all that was not sent before, the last one included."""
        for number, choice in enumerate(reply.choices):
            message = served(choice, self._call.stop)
            thoughts, words = (
                _rest("".join(self._shown[number, kind]), message.get(kind, ""))
                for kind in _KINDS
            )
            yield from self.grow(number, thoughts, words)
            yield from self._end_turn(number, choice, message)
        yield from self._end(reply)

    @abstractmethod
    def _part(self, number: int, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events of a part of a turn."""

    @abstractmethod
    def _end_turn(
        self, number: int, choice: CallChoice, message: Message
    ) -> Iterator[Event]:
        """Yield the events of the calls and the end of a turn."""

    @abstractmethod
    def _end(self, reply: CallReply) -> Iterator[Event]:
        """Yield the events of the end of an answer."""


class BlockStream(TurnStream):
    """The events of a turn in blocks, each of thoughts, of words or of a call.

    Attributes:
        index: The number of the block.
    """

    def __init__(self, call: ModelCall) -> None:
        """Begin without any block."""
        super().__init__(call)
        self.index = 0
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def _part(self, number: int, kind: Kind, text: str) -> Iterator[Event]:
        if kind != self._kind:
            yield from self._shut()
            self._kind = kind
            yield from self._open(kind)
        self._texts.append(text)
        yield from self._delta(kind, text)

    def _shut(self) -> Iterator[Event]:
        """Yield the events that close a block of thoughts or words that is open."""
        if self._kind is not None:
            yield from self._close(self._kind, "".join(self._texts))
            self.index += 1
        self._kind = None
        self._texts.clear()

    def _end_turn(
        self, number: int, choice: CallChoice, message: Message
    ) -> Iterator[Event]:
        yield from self._shut()
        for call in message.get("tool_calls", ()):
            yield from self._whole_call(call)
            self.index += 1

    @abstractmethod
    def _open(self, kind: Kind) -> Iterator[Event]:
        """Yield the events that open a block."""

    @abstractmethod
    def _delta(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events of a part of the open block."""

    @abstractmethod
    def _close(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events that close a block with this text."""

    @abstractmethod
    def _whole_call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a block that is a call."""
