"""A request for turns of the policy, and its answer, whatever protocol they travel in.

Invariant: plain values, without HTTP. What a request asks for and this cannot hold is
refused by its protocol with a sentence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ray.agents.contract import Message, Sampled, ToolSchema
from verl_ray.errors import CallRefused


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A request for turns that follow a conversation.

    Attributes:
        messages: The conversation, as chat templates take it, with contents that are
            texts. An assistant's `tool_calls` have `id` and `function`, whose arguments
            are values where they are JSON; a tool's message has `tool_call_id`. What
            an assistant has thought is its `reasoning`.
        tools: Schemas of the tools that the policy may call.
        stop: Texts that end a turn.
        max_tokens: Most tokens of a turn; None for the limits' own.
        num_instructions: Messages at the beginning that hold for this call alone, and
            not for one that continues its answer.
        num_choices: Turns that are asked for, each an alternative of the others.
        is_stream: Whether the answer is sent as events.
        has_log_probs: Whether the answer holds the log-prob of each token.
        has_usage_event: Whether a stream of chat completions ends with its usage.
        sampling: How it asks to be sampled, by name (temperature, top_p, top_k, seed).
            The run's own settings hold in any case.
        unheeded: Places of its fields that would change what is sampled elsewhere, and
            have no effect here, such as reasoning_effort.
        constraint: What constrains the tokens, as `{"json": SCHEMA}`, `{"json_object":
            True}` or `{"tools": NAMES}`, of which one has to be called; None if nothing
            does.
        previous: Id of the answer whose conversation these messages continue; None if
            they are the whole of it.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    num_instructions: int = 0
    num_choices: int = 1
    is_stream: bool = False
    has_log_probs: bool = False
    has_usage_event: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    unheeded: Collection[str] = frozenset()
    constraint: Mapping[str, Any] | None = None
    previous: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallChoice:
    """A turn that answers a call.

    Attributes:
        sampled: The turn. Its `action` has the words, thoughts and tool calls. Where
            the calls could not be parsed, its text holds what was written.
        call_ids: An id for each of its tool calls.
        token_texts: The text of each of its tokens.
    """

    sampled: Sampled
    call_ids: Sequence[str]
    token_texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class CallReply:
    """The answer to a call.

    Attributes:
        number: Letters and digits that no other answer of the run has. Ids of the
            protocol are made of them.
        model: The policy's name for clients.
        created: When the answer was made, in seconds since 1970.
        num_prompt_tokens: Tokens of the prompt.
        choices: The turns, `num_choices` of them; none while they are sampled.
    """

    number: str
    model: str
    created: int
    num_prompt_tokens: int
    choices: Sequence[CallChoice]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all turns."""
        return sum(len(choice.sampled.tokens) for choice in self.choices)


Event = tuple[str | None, Mapping[str, Any] | str]
"""A server-sent event: its name, if it has one, and its data."""


class AnswerStream(ABC):
    """The events of an answer that is streamed to one client."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events in front of all turns."""

    @abstractmethod
    def grow(self, number: int, thoughts: str, words: str) -> Iterator[Event]:
        """Yield the events of further thoughts and words of a turn.

        Args:
            number: The number of the turn among those of the answer.
        """

    @abstractmethod
    def end(self, reply: CallReply) -> Iterator[Event]:
        """Yield the events of all that was not sent before, the last one included."""


class Protocol(ABC):
    """The form of requests and answers of one address of the API."""

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call of a request's body, a JSON object.

        Raises:
            CallRefused: A field is missing, is of another type, or asks for something
                that cannot be honoured; `param` names it.
        """

    @abstractmethod
    def whole(self, call: ModelCall, reply: CallReply) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""

    @abstractmethod
    def stream(self, call: ModelCall, begun: CallReply) -> AnswerStream:
        """Return the events of an answer that is streamed.

        Args:
            begun: The answer without its turns.
        """

    @abstractmethod
    def response_id(self, reply: CallReply) -> str:
        """Return the id of an answer, by which a later request may name it."""

    @abstractmethod
    def error(self, refusal: CallRefused) -> dict[str, Any]:
        """Return the body of an answer that refuses a call.

        The status of a prompt that has no place is 400, and its `code` is
        `context_length_exceeded`.
        """
