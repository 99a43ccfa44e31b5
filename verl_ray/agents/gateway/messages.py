"""Messages of Anthropic's API, as agents send and read them.

Invariant: what `read` returns holds all that a body asks for. A field that changes no
token is accepted, and any other is refused by its name.

Thoughts are blocks of the type thinking, without a signature. How much the policy
thinks is its own: `thinking`, `output_config.effort`, and a tool's `strict`, which
agents send by default, are accepted and noted as `unheeded`. A block of a system prompt
that begins with x-anthropic-billing-header is no text: Claude Code writes another into
each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ray.agents.contract import Message
from verl_ray.agents.gateway.calls import (
    AnswerStream,
    CallReply,
    Event,
    ModelCall,
    Protocol,
)
from verl_ray.agents.gateway.conversation import (
    MOST_STOP_TEXTS,
    AssistantTurn,
    as_json,
    constrained,
    heard,
    in_order,
    joined,
    result,
    sampling,
    served,
    stop_text,
    text_of,
    tool,
)
from verl_ray.agents.gateway.fields import Fields
from verl_ray.agents.gateway.streams import BlockStream, Kind
from verl_ray.errors import CallRefused

WITHOUT_EFFECT = frozenset(
    {
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "model",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "mcp_servers": ([],),
}

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

BILLING_HEADER = "x-anthropic-billing-header"


class MessagesProtocol(Protocol):
    """Requests and answers of /v1/messages and /v1/messages/count_tokens."""

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call of a request's body; see `Protocol.read`."""
        call = self.read_count(body)
        if call.max_tokens is None:
            why = "max_tokens: expected a number of tokens, but it is missing"
            raise CallRefused(why, "max_tokens")
        return call

    def read_count(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call of a body that need not say `max_tokens`.

        Raises:
            CallRefused: As in `read`.
        """
        fields = Fields.in_body(body)
        messages = _system(fields)
        for each in fields.parts("messages"):
            messages += _messages(each)
        if not messages:
            raise fields.refusal("messages", "expected at least one message")
        if messages[-1]["role"] == "assistant":
            why = "the last is the assistant's, and the policy begins its turns itself"
            raise fields.refusal("messages", f"{why}; end with another message")

        output = fields.within("output_config")
        tools = [tool(each, "custom", "input_schema") for each in fields.parts("tools")]
        tools, constraint = constrained(fields, tools, output.within("format"))
        output.pass_over("effort")
        output.close()
        fields.pass_over("thinking", [{"type": "disabled"}])
        call = ModelCall(
            messages=in_order(messages),
            tools=tools,
            stop=fields.texts("stop_sequences", MOST_STOP_TEXTS),
            max_tokens=fields.count("max_tokens"),
            is_stream=fields.take("stream", bool) or False,
            sampling=sampling(fields),
            unheeded=fields.unheeded,
            constraint=constraint,
        )
        fields.close(WITHOUT_EFFECT, NEUTRAL)
        return call

    def count(self, num: int) -> dict[str, Any]:
        """Return the body of an answer that says how many tokens a prompt has."""
        return {"input_tokens": num}

    def whole(self, call: ModelCall, reply: CallReply) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""
        (choice,) = reply.choices
        blocks = _blocks(served(choice, call.stop))
        return {**self._head(reply), "content": blocks, **_ending(call, reply)}

    def stream(self, call: ModelCall, begun: CallReply) -> AnswerStream:
        """Return the events of an answer that is streamed."""
        return _MessageStream(call, self._head(begun))

    def response_id(self, reply: CallReply) -> str:
        """Return the id of an answer."""
        return f"msg_{reply.number}"

    def error(self, refusal: CallRefused) -> dict[str, Any]:
        """Return the body of an answer that refuses a call."""
        usual = "api_error" if refusal.status >= 500 else "invalid_request_error"
        message = refusal.message
        if refusal.code == "context_length_exceeded":
            # Its clients shorten their conversation at these words.
            message = f"prompt is too long: {message}"
        kind = ERROR_TYPES.get(refusal.status, usual)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def _head(self, reply: CallReply) -> dict[str, Any]:
        return {
            "id": self.response_id(reply),
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "usage": _usage(reply),
        }


# ----------------------------------------------------------------------------- requests


def _system(fields: Fields) -> list[Message]:
    """Return the system prompt as a message in front, where there is any."""
    texts = []
    for part in fields.content("system"):
        text = text_of(part, part.require_word("type"))
        if not text.startswith(BILLING_HEADER):
            texts.append(text)
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _messages(fields: Fields) -> list[Message]:
    """Return the messages of a message; each result of a tool is one."""
    role = fields.require_word("role")
    if role == "assistant":
        messages = [_assistant(fields)]
    elif role == "user":
        messages = _user(fields)
    else:
        messages = [heard(fields, role)]
        output = fields.within("output_config")
        output.pass_over("effort")
        output.close()
    fields.close(neutral={"clear_at": ("never",)})
    return messages


def _user(fields: Fields) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for block in fields.content("content"):
        kind = block.require_word("type")
        if kind != "tool_result":
            texts.append(text_of(block, kind))
            continue
        content = joined(block, "content")
        if block.take("is_error", bool) and not content.startswith("Error: "):
            content = f"Error: {content}"
        results.append(result(block.require_word("tool_use_id"), content))
        block.close({"cache_control"})
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(fields: Fields) -> Message:
    """Return an assistant's message, as an agent repeats it."""
    turn = AssistantTurn()
    for block in fields.content("content"):
        kind = block.require_word("type")
        if kind == "thinking":
            turn.thoughts.append(block.require("thinking", str))
            block.close({"signature"})
        elif kind == "tool_use":
            call_id = block.require_word("id")
            name = block.require("name", str)
            turn.add_call(call_id, name, block.require("input", dict))
            block.close({"cache_control"}, {"caller": ({"type": "direct"},)})
        else:
            turn.texts.append(text_of(block, kind))
    return turn.message()


# ------------------------------------------------------------------------------ answers


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if "reasoning" in message:
        blocks.append(_block("reasoning", message["reasoning"]))
    if message["content"]:
        blocks.append(_block("content", message["content"]))
    return blocks + [_tool_use(call) for call in message.get("tool_calls", ())]


def _block(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
    return {**block, "input": function["arguments"]}


def _usage(reply: CallReply) -> dict[str, int]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "output_tokens": reply.num_sampled_tokens,
    }


class _MessageStream(BlockStream):
    """Events of a message."""

    def __init__(self, call: ModelCall, head: Mapping[str, Any]) -> None:
        super().__init__(call)
        self._head = head

    def begin(self) -> Iterator[Event]:
        """Yield the event in front of the turn."""
        end = {"stop_reason": None, "stop_sequence": None}
        yield self._event("message_start", message={**self._head, "content": [], **end})

    def _open(self, kind: Kind) -> Iterator[Event]:
        yield self._at("content_block_start", content_block=_block(kind, ""))

    def _delta(self, kind: Kind, text: str) -> Iterator[Event]:
        name = _block(kind, "")["type"]
        delta = {"type": f"{name}_delta", name: text}
        yield self._at("content_block_delta", delta=delta)

    def _close(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._at("content_block_stop")

    def _whole_call(self, call: dict[str, Any]) -> Iterator[Event]:
        block = _tool_use(call)
        delta = {"type": "input_json_delta", "partial_json": as_json(block["input"])}
        yield self._at("content_block_start", content_block={**block, "input": {}})
        yield self._at("content_block_delta", delta=delta)
        yield self._at("content_block_stop")

    def _end(self, reply: CallReply) -> Iterator[Event]:
        delta = _ending(self._call, reply)
        yield self._event("message_delta", delta=delta, usage=_usage(reply))
        yield self._event("message_stop")

    def _at(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, index=self.index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, **fields}


def _ending(call: ModelCall, reply: CallReply) -> dict[str, Any]:
    """Return why a message ends."""
    (choice,) = reply.choices
    action = choice.sampled.action
    end = stop_text(choice, call.stop)
    reason = "end_turn"
    if action.finish == "length":
        reason = "max_tokens"
    elif action.tool_calls:
        reason, end = "tool_use", None
    elif end is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end}
