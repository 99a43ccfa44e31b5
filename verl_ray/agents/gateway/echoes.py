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
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ray.agents.contract import Message

Digest = bytes


class Echoes:
    """The turns of an episode, by the conversations that end with them."""

    def __init__(self) -> None:
        """Begin without any turn."""
        self._own: dict[Digest, Message] = {}

    def recalled(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation in which the policy's turns are as they were sampled.

        Other messages are as chat templates take them: without ids, which may differ
        each time.
        """
        digest = b""
        recalled: list[Message] = []
        for message in messages:
            digest = _digest(digest, message)
            own = self._own.get(digest) if message["role"] == "assistant" else None
            recalled.append(_bare(message) if own is None else own)
        return recalled

    def record(
        self, messages: Sequence[Message], answer: Message, own: Message
    ) -> None:
        """Remember a turn behind the conversation that it answers.

        Args:
            messages: The conversation, as the agent has sent it.
            answer: The turn as the agent is told it.
            own: The turn as it was sampled.
        """
        digest = b""
        for message in [*messages, answer]:
            digest = _digest(digest, message)
        self._own[digest] = own


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
    """Return a message without ids and nulls."""
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
