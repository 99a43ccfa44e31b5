"""The token paths of an episode, as a tree of sampled turns.

A turn continues another one if its conversation is that one's with further messages.
Otherwise it begins a path of its own. Each turn that nothing continues is the end of a
row, which holds everything from the beginning of its path.

Invariant: a token that was sampled is under the mask of exactly one row, the first of
those that hold it. A row is what the model saw, token by token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl_ray.agents.contract import (
    EpisodeRow,
    Message,
    Sampled,
    ToolSchema,
    message_of,
)
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
        tokens: Token ids of the whole prompt.
        digest: Digest of the conversation.
    """

    parent: SampledTurn | None
    context: list[int]
    tokens: list[int]
    digest: bytes


class Transcript:
    """Everything that was sampled in an episode."""

    def __init__(self, renderer: Renderer) -> None:
        """Begin without any turn."""
        self.turns: list[SampledTurn] = []
        self._renderer = renderer
        # Of turns with the same conversation the last one counts: whoever repeats a
        # call goes on with the second answer.
        self._by_digest: dict[bytes, SampledTurn] = {}

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> TurnPrompt:
        """Return the prompt of the next turn in a conversation.

        Raises:
            DataError: The chat template refuses the messages.
        """
        digests = list(_digests(messages, tools))
        parent, context = self._continued(messages, tools, digests)
        if context is None:
            context = self._renderer.begin(messages, tools)

        tokens: list[int] = []
        for turn in parent.path() if parent is not None else []:
            tokens += turn.context
            tokens += turn.sampled.tokens
        return TurnPrompt(parent, context, tokens + context, digests[-1])

    def record(self, prompt: TurnPrompt, sampled: Sampled, max_tokens: int) -> None:
        """Add a turn that was sampled behind a prompt.

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
        own = message_of(sampled.action)
        self._by_digest[_digest(prompt.digest, own)] = turn

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
        digests: Sequence[bytes],
    ) -> tuple[SampledTurn | None, list[int] | None]:
        """Return the turn that a conversation continues, and the ids that follow it.

        Both are None if there is no such turn.
        """
        for length in range(len(messages), 0, -1):
            turn = self._by_digest.get(digests[length])
            if turn is None:
                continue
            context = self._renderer.continuation(
                messages[:length],
                messages[length:],
                tools,
                turn.sampled.tokens,
                finish=turn.sampled.action.finish,
            )
            return (None, None) if context is None else (turn, context)
        return None, None


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


def _digests(
    messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> Iterator[bytes]:
    """Yield the digests of tools and no message, one message, two messages, ..."""
    digest = _digest(b"", list(tools))
    yield digest
    for message in messages:
        digest = _digest(digest, message)
        yield digest


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
