"""Responses of OpenAI's API, as agents send and read them.

Invariant: what `read` returns holds all that a body asks for. A field that changes no
token is accepted, and any other is refused by its name.

Thoughts are items of the type reasoning, with their text in `content`; usage does not
count their tokens apart. How much the policy thinks or says is its own: `reasoning`,
`text.verbosity`, and a tool's `strict`, which agents send by default, are accepted and
noted as `unheeded`. `store` has no effect: an episode knows the ids of its own answers
in any case. A stream leaves out thoughts that follow words: agents repeat its items
without their ids, and then such thoughts would begin another turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from verl_ray.agents.contract import Message
from verl_ray.agents.gateway.calls import (
    AnswerStream,
    CallChoice,
    CallReply,
    Event,
    ModelCall,
    Protocol,
)
from verl_ray.agents.gateway.chat import OPENAI_WITHOUT_EFFECT, openai_error
from verl_ray.agents.gateway.conversation import (
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
    text_of,
    tool,
)
from verl_ray.agents.gateway.fields import Fields
from verl_ray.agents.gateway.streams import BlockStream, Kind
from verl_ray.errors import CallRefused

# A policy writes the items of a turn in this order.
_ITEMS = ("reasoning", "message", "function_call")
_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}

_TEXTS = ("input_text", "output_text", "text")

WITHOUT_EFFECT = OPENAI_WITHOUT_EFFECT | {
    "access_programs",
    "image",
    # They count and limit tools of OpenAI's own, which are not served.
    "max_tool_calls",
}

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "context_management": ([],),
    # Thoughts are not encrypted, so whoever asks for them so gets them as texts.
    "include": ([], ["reasoning.encrypted_content"]),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

_REASONING = {"effort": (), "mode": ("standard",), "context": ("auto",)}
"""Fields of `reasoning` that are noted, but for these values."""

_ITEM_WITHOUT_EFFECT = frozenset({"id", "name", "status", "phase"})
_ITEM_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "parsed_arguments": (None,),
}


class ResponsesProtocol(Protocol):
    """Requests and answers of /v1/responses."""

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call of a request's body; see `Protocol.read`."""
        fields = Fields.in_body(body)
        previous = fields.word("previous_response_id")
        messages = _messages(fields.content("input", "input_text"))
        if not messages and previous is None:
            raise fields.refusal("input", "expected a text or at least one item")
        instructions = fields.take("instructions", str)
        if instructions is not None:
            messages.insert(0, {"role": "system", "content": instructions})

        text = fields.within("text")
        tools = [tool(each, "function", "parameters") for each in fields.parts("tools")]
        tools, constraint = constrained(fields, tools, text.within("format"))
        text.pass_over("verbosity", ["medium"])
        text.close()
        reasoning = fields.within("reasoning")
        for name, neutral in _REASONING.items():
            reasoning.pass_over(name, neutral)
        # Thoughts are returned as they are.
        reasoning.close({"summary", "generate_summary"})
        options = fields.within("stream_options")
        options.close({"include_obfuscation"})
        call = ModelCall(
            messages=in_order(messages),
            tools=tools,
            max_tokens=fields.count("max_output_tokens"),
            is_stream=fields.take("stream", bool) or False,
            sampling=sampling(fields),
            unheeded=fields.unheeded,
            constraint=constraint,
            previous=previous,
            num_instructions=int(instructions is not None),
        )
        fields.close(WITHOUT_EFFECT, NEUTRAL)
        return call

    def whole(self, call: ModelCall, reply: CallReply) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""
        (choice,) = reply.choices
        is_cut = choice.sampled.action.finish == "length"
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return {
            **self._head(call, reply),
            "status": _status(choice),
            "incomplete_details": reason,
            "output": _items(reply, served(choice)),
            "usage": _usage(reply),
        }

    def stream(self, call: ModelCall, begun: CallReply) -> AnswerStream:
        """Return the events of an answer that is streamed."""
        started = {
            **self._head(call, begun),
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return _ResponseStream(call, begun.number, started, partial(self.whole, call))

    def response_id(self, reply: CallReply) -> str:
        """Return the id of an answer, which `previous_response_id` may name."""
        return f"resp_{reply.number}"

    def error(self, refusal: CallRefused) -> dict[str, Any]:
        """Return the body of an answer that refuses a call."""
        return openai_error(refusal)

    def _head(self, call: ModelCall, reply: CallReply) -> dict[str, Any]:
        is_required = "tools" in (call.constraint or {})
        return {
            "id": self.response_id(reply),
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "error": None,
            "max_output_tokens": call.max_tokens,
            "parallel_tool_calls": True,
            "previous_response_id": call.previous,
            "tool_choice": "required" if is_required else "auto",
            "tools": [
                {"type": "function", "strict": False, **each["function"]}
                for each in call.tools
            ],
            "truncation": "disabled",
        }


# ----------------------------------------------------------------------------- requests


def _messages(items: Sequence[Fields]) -> list[Message]:
    """Return the messages of input items; those of a turn make one message."""
    messages: list[Message] = []
    turn: AssistantTurn | None = None
    last = 0

    for item in items:
        kind = item.word("type") or "message"
        role = item.require_word("role") if kind == "message" else "assistant"
        if kind in _ITEMS and role == "assistant":
            place = _ITEMS.index(kind)
            begins = place < last or (place == last and kind != "function_call")
            if turn is None or begins:
                turn = AssistantTurn()
                messages.append({})
            _add_item(turn, item, kind)
            messages[-1] = turn.message()
            last = place
            continue

        turn = None
        messages.append(_heard(item, kind, role))
    return messages


def _add_item(turn: AssistantTurn, item: Fields, kind: str) -> None:
    """Add an item that the policy wrote to its turn."""
    if kind == "function_call":
        name = item.require("name", str)
        arguments = arguments_in(item.require("arguments", str))
        turn.add_call(item.require_word("call_id"), name, arguments)
    elif kind == "message":
        turn.texts.append(joined(item, "content", _TEXTS))
    else:
        summary = joined(item, "summary", ["summary_text"])
        content = joined(item, "content", ["reasoning_text"])
        turn.thoughts.append(content or summary)
    item.close(_ITEM_WITHOUT_EFFECT, _ITEM_NEUTRAL)


def _heard(item: Fields, kind: str, role: str) -> Message:
    """Return the message of an item that the policy did not write."""
    if kind == "function_call_output":
        call_id = item.require_word("call_id")
        message = result(call_id, joined(item, "output", _TEXTS))
    elif kind in _TEXTS:
        message = {"role": "user", "content": text_of(item, kind, _TEXTS)}
    elif kind != "message":
        why = "expected message, reasoning, function_call or function_call_output"
        raise item.refusal("type", f"{why}, found {kind!r}")
    else:
        message = heard(item, role, _TEXTS)
    item.close(_ITEM_WITHOUT_EFFECT, _ITEM_NEUTRAL)
    return message


# ------------------------------------------------------------------------------ answers


def _status(choice: CallChoice) -> str:
    return "incomplete" if choice.sampled.action.finish == "length" else "completed"


def _items(reply: CallReply, message: Message) -> list[dict[str, Any]]:
    """Return the items of an answer."""
    status = _status(reply.choices[0])
    items: list[dict[str, Any]] = []
    if "reasoning" in message:
        items.append(_item("reasoning", message["reasoning"], status))
    # An answer without any item could not be repeated.
    if message["content"] or not (items or "tool_calls" in message):
        items.append(_item("content", message["content"], status))
    items += [_call_item(call, status) for call in message.get("tool_calls", ())]
    return [_with_id(item, reply.number, at) for at, item in enumerate(items)]


def _item(kind: Kind, text: str, status: str) -> dict[str, Any]:
    if kind == "reasoning":
        thought = {"type": "reasoning_text", "text": text}
        return {"type": "reasoning", "summary": [], "content": [thought]}
    words = {"type": "output_text", "text": text, "annotations": []}
    role = {"role": "assistant", "status": status}
    return {"type": "message", **role, "content": [words]}


def _call_item(call: Mapping[str, Any], status: str) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": as_json(function["arguments"]),
        "status": status,
    }


def _with_id(item: Mapping[str, Any], number: str, index: int) -> dict[str, Any]:
    return {"id": f"{_ID_PREFIXES[item['type']]}_{number}_{index}", **item}


class _ResponseStream(BlockStream):
    """Events of a response, which ends with the items that were sent."""

    def __init__(
        self,
        call: ModelCall,
        number: str,
        started: Mapping[str, Any],
        whole: Callable[[CallReply], dict[str, Any]],
    ) -> None:
        super().__init__(call)
        self._number = number
        self._started = started
        self._whole = whole
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._status = "completed"

    def begin(self) -> Iterator[Event]:
        """Yield the events in front of the turn."""
        yield self._event("created", response=self._started)
        yield self._event("in_progress", response=self._started)

    def _part(self, number: int, kind: Kind, text: str) -> Iterator[Event]:
        if (self._kind, kind) != ("content", "reasoning"):
            yield from super()._part(number, kind, text)

    def _open(self, kind: Kind) -> Iterator[Event]:
        item = self._made(_item(kind, "", "in_progress"))
        begun = {**item, "status": "in_progress", "content": []}
        yield self._at("output_item.added", item=begun)
        part = item["content"][0]
        yield self._in(item, "content_part.added", content_index=0, part=part)

    def _delta(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._text_event(kind, "delta", delta=text)

    def _close(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._text_event(kind, "done", text=text)
        item = self._made(_item(kind, text, self._status))
        part = item["content"][0]
        yield self._in(item, "content_part.done", content_index=0, part=part)
        yield self._done(item)

    def _whole_call(self, call: dict[str, Any]) -> Iterator[Event]:
        item = self._made(_call_item(call, self._status))
        name, arguments = item["name"], item["arguments"]
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._at("output_item.added", item=begun)
        kind = "function_call_arguments"
        yield self._in(item, f"{kind}.delta", delta=arguments)
        yield self._in(item, f"{kind}.done", name=name, arguments=arguments)
        yield self._done(item)

    def _end_turn(
        self, number: int, choice: CallChoice, message: Message
    ) -> Iterator[Event]:
        self._status = _status(choice)
        # An answer without any item could not be repeated.
        if not (self.index or self._kind or "tool_calls" in message):
            yield from self._part(number, "content", "")
        yield from super()._end_turn(number, choice, message)

    def _end(self, reply: CallReply) -> Iterator[Event]:
        whole = {**self._whole(reply), "output": self._items}
        yield self._event(self._status, response=whole)

    def _made(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return _with_id(item, self._number, self.index)

    def _done(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        return self._at("output_item.done", item=item)

    def _text_event(self, kind: Kind, name: str, **fields: Any) -> Event:
        item = self._made(_item(kind, "", ""))
        text = item["content"][0]["type"]
        odds: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        return self._in(item, f"{text}.{name}", content_index=0, **odds, **fields)

    def _in(self, item: Mapping[str, Any], name: str, /, **fields: Any) -> Event:
        return self._at(name, item_id=item["id"], **fields)

    def _at(self, name: str, /, **fields: Any) -> Event:
        return self._event(name, output_index=self.index, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        kind = f"response.{name}"
        number = self._num_events
        self._num_events += 1
        return kind, {"type": kind, "sequence_number": number, **fields}


def _usage(reply: CallReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
    }
