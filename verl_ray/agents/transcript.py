"""The token paths of an episode, as a tree of sampled turns.

A turn continues another one if its conversation is that one's with further messages.
Otherwise it begins a path of its own. Each turn that nothing continues is the end of a
row, which holds everything from the beginning of its path.

Invariant: a token that was sampled is under the mask of exactly one row, the first of
those that hold it. A row is what the model saw, token by token.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import marshal
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verl_ray.agents.contract import (
    EpisodeRow,
    Message,
    Sampled,
    ToolSchema,
    message_of,
)
from verl_ray.agents.outline import Outline
from verl_ray.agents.template import Renderer


@dataclass(eq=False)
class SampledTurn:
    """A turn of the policy, and its place in the tree.

    Attributes:
        parent: The turn that it continues; None where it begins a path.
        context: Token ids between the parent's turn and this one, or the prompt.
        sampled: The turn itself.
        reward: Its reward.
        is_continued: Whether another turn continues it.
    """

    parent: SampledTurn | None
    context: list[int]
    sampled: Sampled
    reward: float = 0.0
    is_continued: bool = False

    def path(self) -> list[SampledTurn]:
        """Return the turns from the beginning of the path up to this one."""
        turns = []
        turn: SampledTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True, eq=False)
class TurnPrompt:
    """The beginning of a turn that is about to be sampled.

    Attributes:
        parent: The turn that it continues; None where it begins a path.
        context: Token ids that follow the parent's turn, or the whole prompt.
        tokens: Token ids of the whole prompt, int32.
        digest: Digest of the conversation.
    """

    parent: SampledTurn | None
    context: list[int]
    tokens: array[int]
    digest: bytes

    @property
    def first(self) -> Sequence[int]:
        """Token ids of the first prompt of its path."""
        return self.context if self.parent is None else self.parent.path()[0].context

    @property
    def depth(self) -> int:
        """Turns of its path."""
        return 0 if self.parent is None else len(self.parent.path())


_MOST_SEEN = 4
"""Conversations that are remembered, and so branches that go on in turn."""


@dataclass
class _Seen:
    """A late conversation, so that one which begins with it costs what it adds.

    Attributes:
        tools: Its tools, as bytes that others have only if they are the same.
        messages: The same of its messages, one behind another.
        digests: Digests of no message, one message, two messages, ...
        outline: Their kinds.
    """

    tools: bytes
    messages: bytes
    digests: list[bytes]
    outline: Outline = field(default_factory=Outline)


class Transcript:
    """Everything that was sampled in an episode."""

    def __init__(self, renderer: Renderer) -> None:
        """Begin without any turn."""
        self.turns: list[SampledTurn] = []
        self._renderer = renderer
        # Of turns with the same conversation the last one counts: whoever repeats a
        # call goes on with the second answer.
        self._by_digest: dict[bytes, SampledTurn] = {}
        self._seen: list[_Seen] = []
        # The last turns, and the tokens of their paths.
        self._paths: deque[tuple[SampledTurn, array[int]]] = deque(maxlen=_MOST_SEEN)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        most_tokens: int | None = None,
    ) -> TurnPrompt:
        """Return the prompt of the next turn in a conversation.

        Args:
            most_tokens: Tokens that the prompt may have; None is no limit. A text that
                has more, whatever its tokens are, is not encoded.

        Raises:
            TextTooLong: The prompt has more tokens.
            DataError: The chat template refuses the messages.
        """
        seen, num_known = self._known(messages, tools)
        digests = seen.digests
        for message in messages[num_known:]:
            digests.append(_digest(digests[-1], message))

        prompt = self._continued(messages, tools, seen, num_known, most_tokens)
        if prompt is None:
            context = self._renderer.begin(messages, tools, most_tokens)
            prompt = TurnPrompt(None, context, _ids(context), digests[-1])
        seen.outline.extend(messages[num_known:])
        # One that this one begins with is not needed any more.
        others = [
            each
            for each in self._seen
            if each.tools != seen.tools or not seen.messages.startswith(each.messages)
        ]
        self._seen = [*others, seen][-_MOST_SEEN:]
        return prompt

    def _known(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[_Seen, int]:
        """Return what is known of a conversation, and of how many messages."""
        tools_bytes, messages_bytes = _exact(tools), _exact(messages)
        begun = [
            seen
            for seen in self._seen
            if messages_bytes
            and seen.tools == tools_bytes
            and messages_bytes.startswith(seen.messages)
        ]
        if not begun:
            return _Seen(tools_bytes, messages_bytes, [_digest(b"", list(tools))]), 0
        longest = max(begun, key=lambda seen: len(seen.messages))
        # What is known stays as it is: the conversation may be refused, or go on in two
        # ways.
        digests, outline = [*longest.digests], longest.outline.copy()
        known = _Seen(tools_bytes, messages_bytes, digests, outline)
        return known, len(longest.digests) - 1

    def record(
        self,
        prompt: TurnPrompt,
        sampled: Sampled,
        max_tokens: int,
        *,
        is_alternative: bool = False,
    ) -> SampledTurn:
        """Add a turn that was sampled behind a prompt, and return it.

        Args:
            is_alternative: Whether an earlier turn that says the same goes before it.

        Raises:
            ValueError: The engine returned no tokens, more than `max_tokens`, or
                another number of log-probs.
        """
        count = len(sampled.tokens)
        if not 1 <= count <= max_tokens:
            raise ValueError(
                f"the engine returned a turn of {count} tokens, expected 1 to"
                f" {max_tokens}"
            )
        if len(sampled.log_probs) != count:
            raise ValueError(
                f"the engine returned {count} tokens and {len(sampled.log_probs)}"
                " log-probs"
            )

        turn = SampledTurn(prompt.parent, prompt.context, sampled)
        if prompt.parent is not None:
            prompt.parent.is_continued = True
        self.turns.append(turn)
        self._paths.append((turn, prompt.tokens + _ids(sampled.tokens)))
        own = message_of(sampled.action)
        digest = _digest(prompt.digest, own)
        if not is_alternative or digest not in self._by_digest:
            self._by_digest[digest] = turn
        return turn

    def rows(self) -> list[EpisodeRow]:
        """Return the rows, in the order in which their last turns were sampled."""
        rows = []
        earlier: set[SampledTurn] = set()
        numbers = {turn: number for number, turn in enumerate(self.turns)}

        for turn in self.turns:
            if not turn.is_continued:
                rows.append(_row(turn.path(), earlier, numbers))
                earlier.update(turn.path())
        return rows

    def _continued(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        seen: _Seen,
        num_known: int,
        most_tokens: int | None,
    ) -> TurnPrompt | None:
        """Return the prompt of a conversation behind the turn that it continues.

        Args:
            seen: The digests of the conversation, and the outline of what is known.
            num_known: Messages of that outline.

        Returns:
            The prompt; None if there is no such turn.
        """
        for length in range(len(messages), 0, -1):
            turn = self._by_digest.get(seen.digests[length])
            if turn is None:
                continue

            tokens = self._tokens_until(turn)
            context = self._renderer.continuation(
                messages[:length],
                messages[length:],
                tools,
                turn.sampled.tokens,
                finish=turn.sampled.action.finish,
                outline=seen.outline if length == num_known + 1 else None,
                most_tokens=None if most_tokens is None else most_tokens - len(tokens),
            )
            if context is None:
                return None
            tokens = tokens + _ids(context)
            return TurnPrompt(turn, context, tokens, seen.digests[-1])
        return None

    def _tokens_until(self, turn: SampledTurn) -> array[int]:
        """Return the tokens of the path that ends with a turn."""
        for last, tokens in self._paths:
            if turn is last:
                return tokens
        parts = [
            part for each in turn.path() for part in (each.context, each.sampled.tokens)
        ]
        return _ids(itertools.chain.from_iterable(parts))


def _ids(tokens: Iterable[int] = ()) -> array[int]:
    return array("i", tokens)


def _row(
    path: Sequence[SampledTurn],
    earlier: set[SampledTurn],
    numbers: Mapping[SampledTurn, int],
) -> EpisodeRow:
    """Return a path as a row; the turns of earlier rows are context there."""
    row = EpisodeRow([], [], [], [], [])

    for turn in path:
        _append(row, turn.context, [0.0] * len(turn.context), is_sampled=False)
        start = len(row.tokens)
        sampled = turn.sampled
        if turn in earlier:
            _append(row, sampled.tokens, [0.0] * len(sampled.tokens), is_sampled=False)
            continue

        _append(row, sampled.tokens, sampled.log_probs, is_sampled=True)
        row.versions += [(start + at, version) for at, version in sampled.versions]
        row.rewards.append((len(row.tokens) - 1, turn.reward))
        row.turns.append(numbers[turn])
    return row


def _append(
    row: EpisodeRow,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    *,
    is_sampled: bool,
) -> None:
    row.tokens += map(int, tokens)
    row.mask += [is_sampled] * len(tokens)
    row.log_probs += map(float, log_probs)


# ------------------------------------------------------------- conversations as digests


_HEAD_BYTES = 5
"""Bytes of a list before its first value, which are its type and its length."""


def _exact(values: Sequence[Message] | Sequence[ToolSchema]) -> bytes:
    """Return bytes that other values do not have, and that longer ones begin with.

    They are empty if there are none, or if a value has a type that is no plain one.
    """
    try:
        # Later versions write what two values share by its place, and how many share it
        # is not part of a value.
        return marshal.dumps(list(values), 2)[_HEAD_BYTES:]
    except ValueError:
        return b""


def _digest(before: bytes, value: object) -> bytes:
    """Return the digest of a conversation that is longer by a message."""
    if isinstance(value, dict):
        value = _compared(value)
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _compared(message: Message) -> Message:
    """Return what tells a message from others.

    An assistant's comes back from an outside agent with the arguments of its calls as
    texts, with numbers for the calls, and with nulls.
    """
    present = {name: part for name, part in message.items() if part is not None}
    if message.get("role") != "assistant":
        return present

    calls = [
        (function.get("name"), _arguments(function.get("arguments")))
        for call in message.get("tool_calls") or []
        if isinstance(function := call.get("function"), dict)
    ]
    words = message.get("content") or ""
    return {**present, "content": words, "tool_calls": calls}


def _arguments(value: object) -> object:
    """Return arguments of a call as values, also if they are a text in JSON."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except ValueError:
        return value
    return parsed
