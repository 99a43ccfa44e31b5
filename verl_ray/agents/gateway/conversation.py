"""Conversations and tools in the form that all protocols are read into.

Invariant: what is the same in two protocols is equal here, key by key. What `served`
returns is what an agent repeats, whichever protocol it came by.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ray.agents.contract import Message, ToolSchema
from verl_ray.agents.gateway.calls import CallChoice
from verl_ray.agents.gateway.fields import Fields, is_sound

MOST_STOP_TEXTS = 16

# As in the APIs. The policy itself may call a tool by any name.
_MOST_USER_NAME = 64
_MOST_TOOL_NAME = 128

SAMPLING = ("temperature", "top_p", "top_k", "seed")

PART_WITHOUT_EFFECT = frozenset(
    {
        "annotations",
        "cache_control",
        "citations",
        "logprobs",
        "prompt_cache_breakpoint",
    }
)
"""Fields of a part of a content that change none of its text."""

TOOL_WITHOUT_EFFECT = frozenset({"cache_control", "eager_input_streaming"})
TOOL_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "allowed_callers": (["direct"], []),
    "async": (False,),
    "defer_loading": (False,),
    "input_examples": ([],),
}

_SCHEMA_WITHOUT_EFFECT = frozenset({"name", "description", "strict"})
_CHOICE_NEUTRAL: Mapping[str, Sequence[Any]] = {"disable_parallel_tool_use": (False,)}

# ----------------------------------------------------------------------------- messages


@dataclass
class AssistantTurn:
    """Thoughts, words and tool calls of an assistant in one turn, in this order."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        """Add a tool call, with arguments that are a value, or a text that is none."""
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def message(self) -> Message:
        """Return the message of the whole turn."""
        message: Message = {"role": "assistant", "content": "\n".join(self.texts)}
        if any(self.thoughts):
            message["reasoning"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def stop_text(choice: CallChoice, stop: Sequence[str]) -> str | None:
    """Return which of the texts of `stop` ended a turn, or None."""
    action = choice.sampled.action
    if action.finish != "stop":
        return None
    # A special token has a text among the tokens alone.
    written = action.content or action.text
    spelled = "".join(choice.token_texts)
    return next((text for text in stop if text in written or text in spelled), None)


def served(choice: CallChoice, stop: Sequence[str] = ()) -> Message:
    """Return a turn as the message that answers a call, and that an agent repeats.

    A text of `stop` that ended it, and what follows, is no part of the message.

    Args:
        choice: The turn.
        stop: The texts that the call named.
    """
    action = choice.sampled.action
    end = stop_text(choice, stop)
    text, thought = action.text, action.reasoning
    if end is not None and end in text:
        text = text.partition(end)[0]
    elif end is not None:
        thought = thought.partition(end)[0]

    turn = AssistantTurn([thought], [text])
    for call_id, call in zip(choice.call_ids, action.tool_calls, strict=True):
        turn.add_call(call_id, call.name, dict(call.arguments))
    return turn.message()


def result(call_id: str, content: str) -> Message:
    """Return the message that holds the result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def arguments_in(text: str) -> object:
    """Return the arguments of a call: an object, or the text if it spells none."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if isinstance(arguments, dict) and is_sound(arguments):
        return arguments
    return text


def as_json(arguments: object) -> str:
    """Return the arguments of a call as text."""
    return json.dumps(arguments, ensure_ascii=False)


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of each turn in the order of its calls.

    Templates read results by their order, and some by the names of their tools. Results
    of which an id is unknown stay as they are.
    """
    ordered: list[Message] = []
    results: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}

    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += _in_order_of(calls, results)
        results = []
        calls = {
            call["id"]: (number, call["function"]["name"])
            for number, call in enumerate(message.get("tool_calls", ()))
        }
        ordered.append(message)
    return ordered + _in_order_of(calls, results)


def _in_order_of(
    calls: Mapping[str, tuple[int, str]], results: list[Message]
) -> list[Message]:
    if not all(each["tool_call_id"] in calls for each in results):
        return results
    by_place = sorted(results, key=lambda each: calls[each["tool_call_id"]][0])
    return [{"name": calls[each["tool_call_id"]][1], **each} for each in by_place]


def text_of(part: Fields, kind: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a part of a content.

    Args:
        part: The part, without its type.
        kind: Its type.
        kinds: The types that are texts.

    Raises:
        CallRefused: The part is an image, a file, a refusal or the like.
    """
    if kind not in kinds:
        why = "the policy reads texts alone; leave this part out"
        raise part.refusal("type", f"found {kind!r}; {why}")
    text = part.require("text", str)
    part.close(PART_WITHOUT_EFFECT)
    return text


def joined(fields: Fields, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a content whose parts are texts as a single text, a line or more each.

    Raises:
        CallRefused: A part is no text.
    """
    parts = fields.content(name, kinds[0])
    return "\n".join(text_of(part, part.require_word("type"), kinds) for part in parts)


def heard(fields: Fields, role: str, kinds: Sequence[str] = ("text",)) -> Message:
    """Return a message that the policy reads, and that is no result of a tool.

    Args:
        fields: The message, without its role.
        role: Its role.
        kinds: The types of parts that are texts.

    Raises:
        CallRefused: There is no such role, or a part is no text.
    """
    if role not in ("system", "developer", "user"):
        why = "expected system, developer, user or assistant, or tool in completions"
        raise fields.refusal("role", f"{why}, found {role!r}")
    role = role.replace("developer", "system")
    message: Message = {"role": role, "content": joined(fields, "content", kinds)}
    name = fields.word("name", _MOST_USER_NAME)
    if name is not None:
        message["name"] = name
    return message


# -------------------------------------------------------------------- tools, constraint


def tool(fields: Fields, kind: str, parameters: str) -> ToolSchema:
    """Return a tool as chat templates take it.

    Args:
        fields: The tool.
        kind: Its type, which it need not say.
        parameters: The field that has the JSON schema of its arguments.

    Raises:
        CallRefused: It has no name, or needs what is not served.
    """
    fields.require_type(kind)
    schema: dict[str, Any] = {"name": fields.require_word("name", _MOST_TOOL_NAME)}
    description = fields.take("description", str)
    if description is not None:
        schema["description"] = description
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    schema["parameters"] = fields.take(parameters, dict) or empty
    fields.pass_over("strict", [False])
    fields.close(TOOL_WITHOUT_EFFECT, TOOL_NEUTRAL)
    return {"type": "function", "function": schema}


def constrained(
    fields: Fields, tools: list[ToolSchema], form: Fields
) -> tuple[list[ToolSchema], Mapping[str, Any] | None]:
    """Return the tools that may be called, and what constrains the tokens.

    Args:
        fields: The body, which may have `tool_choice`.
        tools: The tools of the body.
        form: The form that the answer has to have; without fields it is free.

    Raises:
        CallRefused: A required tool is none of the tools, or both are requested.
    """
    names = [each["function"]["name"] for each in tools]
    constraint = _form(form) if form else None
    choice = fields.typed("tool_choice")
    if not choice:
        return tools, constraint

    kind = choice.require_word("type")
    if kind in ("function", "tool"):
        function = choice.within("function") or choice
        named = function.require_word("name", _MOST_TOOL_NAME)
        names = [name for name in names if name == named]
        function.close(neutral=_CHOICE_NEUTRAL)
    elif kind not in ("none", "auto", "required", "any"):
        why = "expected none, auto, required, or the name of a tool"
        raise fields.refusal("tool_choice", f"{why}, found {kind!r}")
    choice.close(neutral=_CHOICE_NEUTRAL)

    if kind == "none":
        return [], constraint
    if kind == "auto":
        return tools, constraint
    if not names:
        raise fields.refusal("tool_choice", "the required tool is none of tools")
    if constraint is not None:
        why = "a tool is required, and a form of the answer as well; leave out one"
        raise fields.refusal("tool_choice", why)
    return tools, {"tools": names}


def _form(form: Fields) -> Mapping[str, Any] | None:
    """Return the constraint of a form of the answer."""
    kind = form.require_word("type")
    constraint: Mapping[str, Any] | None = None
    if kind == "json_object":
        constraint = {"json_object": True}
    elif kind == "json_schema":
        schema = form.within("json_schema") or form
        constraint = {"json": schema.require("schema", dict)}
        schema.close(_SCHEMA_WITHOUT_EFFECT)
    elif kind != "text":
        why = "expected text, json_object or json_schema"
        raise form.refusal("type", f"{why}, found {kind!r}")
    form.close(_SCHEMA_WITHOUT_EFFECT)
    return constraint


def sampling(fields: Fields) -> dict[str, float]:
    """Return how a call asks to be sampled, by name.

    Raises:
        CallRefused: One is no number.
    """
    values = {name: fields.number(name) for name in SAMPLING}
    return {name: value for name, value in values.items() if value is not None}
