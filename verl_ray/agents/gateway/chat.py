"""Chat completions of OpenAI's API, as agents send and read them.

Invariant: what `read` returns holds all that a body asks for. A field that changes no
token is accepted, and any other is refused by its name.

Thoughts are the field `reasoning` of a message, as vLLM names it; `reasoning_content`
is read as well. How much the policy thinks or says is its own: `reasoning_effort`,
`verbosity`, and a tool's `strict`, which agents send by default, are accepted and noted
as `unheeded`. The `name` of an assistant or of a tool, which its call has, and a
`prediction`, which only saves time, change no token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ray.agents.contract import Message, ToolSchema
from verl_ray.agents.gateway.calls import (
    AnswerStream,
    CallChoice,
    CallReply,
    Event,
    ModelCall,
    Protocol,
)
from verl_ray.agents.gateway.conversation import (
    MOST_STOP_TEXTS,
    AssistantTurn,
    arguments_in,
    as_json,
    constrained,
    heard,
    in_order,
    joined,
    result,
    sampling,
    served,
    tool,
)
from verl_ray.agents.gateway.fields import Fields
from verl_ray.agents.gateway.streams import Kind, TurnStream
from verl_ray.errors import CallRefused

MOST_CHOICES = 16

LEAST_LOG_PROB = -9999.0
"""Stands for the log-prob of a token that has no chance, which JSON cannot spell."""

OPENAI_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's API that change no token."""

WITHOUT_EFFECT = OPENAI_WITHOUT_EFFECT | {"prediction"}

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
}

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class ChatProtocol(Protocol):
    """Requests and answers of /v1/chat/completions."""

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call of a request's body; see `Protocol.read`."""
        fields = Fields.in_body(body)
        messages = [_message(each) for each in fields.parts("messages")]
        if not messages:
            raise fields.refusal("messages", "expected at least one message")
        tools = [_tool(each) for each in fields.parts("tools")]
        tools, constraint = constrained(fields, tools, fields.within("response_format"))

        older = fields.count("max_tokens")
        options = fields.within("stream_options")
        fields.pass_over("reasoning_effort")
        fields.pass_over("verbosity", ["medium"])
        call = ModelCall(
            messages=in_order(messages),
            tools=tools,
            stop=fields.texts("stop", MOST_STOP_TEXTS),
            max_tokens=fields.count("max_completion_tokens") or older,
            num_choices=fields.count("n", MOST_CHOICES) or 1,
            is_stream=fields.take("stream", bool) or False,
            has_log_probs=fields.take("logprobs", bool) or False,
            has_usage_event=options.take("include_usage", bool) or False,
            sampling=sampling(fields),
            unheeded=fields.unheeded,
            constraint=constraint,
        )
        options.close({"include_obfuscation"})
        fields.close(WITHOUT_EFFECT, NEUTRAL)
        return call

    def whole(self, call: ModelCall, reply: CallReply) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""
        choices = []
        for number, choice in enumerate(reply.choices):
            message = served(choice, call.stop)
            choices.append(
                {
                    "index": number,
                    "message": _written(message),
                    "finish_reason": _finish_reason(choice),
                    "logprobs": _log_probs(call, choice),
                }
            )
        head = self._head(reply, "chat.completion")
        return {**head, "choices": choices, "usage": _usage(reply)}

    def stream(self, call: ModelCall, begun: CallReply) -> AnswerStream:
        """Return the events of an answer that is streamed."""
        return _ChatStream(call, self._head(begun, "chat.completion.chunk"))

    def response_id(self, reply: CallReply) -> str:
        """Return the id of an answer."""
        return f"chatcmpl-{reply.number}"

    def error(self, refusal: CallRefused) -> dict[str, Any]:
        """Return the body of an answer that refuses a call."""
        return openai_error(refusal)

    def _head(self, reply: CallReply, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id(reply),
            "object": kind,
            "created": reply.created,
            "model": reply.model,
        }


def openai_error(refusal: CallRefused) -> dict[str, Any]:
    """Return the body of an answer that refuses a call, in OpenAI's form."""
    usual = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": refusal.message,
            "type": ERROR_TYPES.get(refusal.status, usual),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


# ----------------------------------------------------------------------------- requests


def _message(fields: Fields) -> Message:
    role = fields.require_word("role")
    if role == "assistant":
        return _assistant(fields)
    if role == "tool":
        call_id = fields.require_word("tool_call_id")
        message = result(call_id, joined(fields, "content"))
    else:
        message = heard(fields, role)
    fields.close({"cache_control", "name"})
    return message


def _assistant(fields: Fields) -> Message:
    """Return an assistant's message, as an agent repeats it."""
    newer = fields.take("reasoning", str)
    older = fields.take("reasoning_content", str)
    turn = AssistantTurn([newer or older or ""], [joined(fields, "content")])
    for call in fields.parts("tool_calls"):
        call.require_type("function")
        function = call.within("function")
        name = function.require("name", str)
        arguments = arguments_in(function.take("arguments", str) or "")
        turn.add_call(call.require_word("id"), name, arguments)
        # The client's own helpers add these.
        function.close({"parsed_arguments"})
        call.close({"index"})
    fields.close({"name", "cache_control", "parsed"}, {"annotations": ([],)})
    return turn.message()


def _tool(fields: Fields) -> ToolSchema:
    fields.require_type("function")
    function = fields.within("function")
    fields.close({"cache_control"})
    return tool(function, "function", "parameters")


# ------------------------------------------------------------------------------ answers


def _finish_reason(choice: CallChoice) -> str:
    action = choice.sampled.action
    if action.finish == "stop" and action.tool_calls:
        return "tool_calls"
    return action.finish


def _written(message: Message) -> dict[str, Any]:
    """Return an assistant's message as it is sent."""
    calls = [
        {**call, "function": {**call["function"], "arguments": as_json(arguments)}}
        for call in message.get("tool_calls", ())
        for arguments in [call["function"]["arguments"]]
    ]
    written = dict(message)
    if calls:
        written["tool_calls"] = calls
        written["content"] = message["content"] or None
    return written


class _ChatStream(TurnStream):
    """Chunks of a chat completion. Log-probs are in the last chunk of their choice."""

    def __init__(self, call: ModelCall, head: Mapping[str, Any]) -> None:
        super().__init__(call)
        self._head = head

    def begin(self) -> Iterator[Event]:
        """Yield the chunks in front of all turns."""
        for number in range(self._call.num_choices):
            yield self._chunk(number, {"role": "assistant"})

    def _part(self, number: int, kind: Kind, text: str) -> Iterator[Event]:
        yield self._chunk(number, {kind: text})

    def _end_turn(
        self, number: int, choice: CallChoice, message: Message
    ) -> Iterator[Event]:
        written = _written(message)
        # An empty text is one, too.
        if written["content"] == "":
            yield self._chunk(number, {"content": ""})
        for place, call in enumerate(written.get("tool_calls", ())):
            yield self._chunk(number, {"tool_calls": [{"index": place, **call}]})
        yield self._chunk(
            number,
            {},
            finish_reason=_finish_reason(choice),
            logprobs=_log_probs(self._call, choice),
        )

    def _end(self, reply: CallReply) -> Iterator[Event]:
        if self._call.has_usage_event:
            yield None, {**self._head, "choices": [], "usage": _usage(reply)}
        yield None, "[DONE]"

    def _chunk(self, number: int, delta: dict[str, Any], **end: Any) -> Event:
        part = {"index": number, "delta": delta, "finish_reason": None, **end}
        return None, {**self._head, "choices": [part]}


def _log_probs(call: ModelCall, choice: CallChoice) -> dict[str, Any] | None:
    if not call.has_log_probs:
        return None
    pairs = zip(choice.token_texts, choice.sampled.log_probs, strict=True)
    content = [
        {
            "token": text,
            "logprob": max(log_prob, LEAST_LOG_PROB),
            # A token that is part of a character has bytes that no text shows.
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, log_prob in pairs
    ]
    return {"content": content, "refusal": None}


def _usage(reply: CallReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
    }
