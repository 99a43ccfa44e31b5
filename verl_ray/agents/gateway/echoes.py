"""Turns of the policy in the conversations that an agent sends back.

An agent owns its conversation. It returns a turn of the policy with other white space,
with arguments in another form of JSON, with other ids, or without its thoughts. Such a
message stands for the turn, and so for the tokens that were sampled.

Invariant: a message that is not the policy's own turn, after the very messages that it
answered, stays what the agent has written, and nothing is learned from it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ray.agents.contract import Message

Digest = bytes

_MOST_SEEN = 4
"""Conversations that are remembered, so that one which goes on costs what it adds."""


@dataclass(frozen=True, eq=False)
class Recalled:
    """A conversation that an agent has sent.

    Attributes:
        messages: The messages as they came.
        own: The same as chat templates take them, with the policy's turns as they were
            sampled.
        digests: Digests of no message, one message, two messages, ...
    """

    messages: Sequence[Message]
    own: Sequence[Message]
    digests: Sequence[Digest]

    @property
    def digest(self) -> Digest:
        """The digest of the whole."""
        return self.digests[-1]


@dataclass(frozen=True, eq=False)
class _Turn:
    """A turn as the agent was told it, and as it was sampled."""

    answer: Message
    own: Message


class Echoes:
    """The turns of an episode, by the conversations that end with them."""

    def __init__(self) -> None:
        """Begin without any turn."""
        self._turns: dict[Digest, list[_Turn]] = {}
        # Each message that came, with the conversation before it.
        self._parents: dict[Digest, tuple[Digest, Message]] = {}
        self._seen: deque[Recalled] = deque(maxlen=_MOST_SEEN)

    def recall(self, messages: Sequence[Message]) -> Recalled:
        """Find the policy's turns in a conversation."""
        seen, num_known = self._longest(messages)
        digests = [*seen.digests[: num_known + 1]] if seen else [b""]
        own = [*seen.own[:num_known]] if seen else []
        for message in messages[num_known:]:
            digest = _digest(digests[-1], message)
            self._parents.setdefault(digest, (digests[-1], message))
            turns = self._turns.get(digest, ())
            turn = max(
                turns, key=lambda each: _closeness(message, each.answer), default=None
            )
            digests.append(digest)
            own.append(_bare(message) if turn is None else turn.own)

        recalled = Recalled(messages, own, digests)
        if seen is not None and num_known == len(seen.messages):
            self._seen.remove(seen)
        self._seen.append(recalled)
        return recalled

    def record(self, recalled: Recalled, answer: Message, own: Message) -> None:
        """Remember a turn behind the conversation that it answers.

        Args:
            recalled: The conversation.
            answer: The turn as the agent is told it.
            own: The turn as it was sampled.
        """
        digest = _digest(recalled.digest, answer)
        self._turns.setdefault(digest, []).append(_Turn(answer, own))

    def conversation(self, digest: Digest) -> list[Message]:
        """Return the messages of a conversation that came before."""
        messages: list[Message] = []
        # Ends at the beginning of the conversation.
        while digest:
            digest, message = self._parents[digest]
            messages.append(message)
        return messages[::-1]

    def _longest(self, messages: Sequence[Message]) -> tuple[Recalled | None, int]:
        """Return the conversation with which this one has most in common, and how much
        that is.
        """
        longest: tuple[Recalled | None, int] = None, 0
        for seen in self._seen:
            pairs = zip(messages, seen.messages, strict=False)
            shared = next(
                (at for at, (new, old) in enumerate(pairs) if new != old),
                min(len(messages), len(seen.messages)),
            )
            if shared > longest[1]:
                longest = seen, shared
        return longest


def _closeness(message: Message, answer: Message) -> tuple[bool, bool, bool]:
    """Return how surely a message is this one of several answers that say the same."""
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    own_ids = [call.get("id") for call in answer.get("tool_calls") or ()]
    is_same_text = (message.get("content") or "") == (answer.get("content") or "")
    thought = message.get("reasoning") or ""
    is_same_thought = thought == (answer.get("reasoning") or "")
    return bool(ids) and ids == own_ids, is_same_text and is_same_thought, is_same_text


def _digest(before: Digest, message: Message) -> Digest:
    """Return the digest of a conversation that is longer by a message."""
    text = json.dumps(_essence(message), sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _essence(message: Message) -> object:
    """Return what has to be the same in an echo."""
    if message["role"] != "assistant":
        return _bare(message)
    words = "".join((message.get("content") or "").split())
    calls = [
        (call["function"]["name"], _same(_value(call["function"].get("arguments"))))
        for call in message.get("tool_calls") or ()
    ]
    return ["assistant", words, calls]


def _bare(message: Message) -> Message:
    """Return a message without ids and nulls, which may differ each time."""
    bare = {
        name: part
        for name, part in message.items()
        if part is not None and name not in ("tool_call_id", "tool_calls", "reasoning")
    }
    if message.get("reasoning"):
        # Templates that write the thoughts of earlier turns know them by this name.
        bare["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        bare["tool_calls"] = [_bare_call(call) for call in message["tool_calls"]]
    if message["role"] == "assistant":
        bare.setdefault("content", "")
    return bare


def _bare_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _value(function.get("arguments"))
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _value(arguments: object) -> object:
    """Return arguments as a value, also if they are a text in JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value


def _same(value: object) -> object:
    """Return a value of JSON in the form that is the same in every language."""
    if isinstance(value, Mapping):
        return {name: _same(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_same(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
