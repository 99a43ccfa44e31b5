"""Agents that solve an arithmetic problem with a calculator, over real clients.

Nothing in them is about training, but that they share a client, as servers do.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import anthropic
import openai

from verl_ray.agents.contract import EpisodeTask
from verl_ray.agents.environments.calculator import CALCULATE, calculate
from verl_ray.rewards.functions import gsm8k


@functools.cache
def _openai() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="-", base_url="http://127.0.0.1", timeout=600.0)


@functools.cache
def _anthropic() -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        api_key="-", base_url="http://127.0.0.1", timeout=600.0
    )


def _result(name: str, arguments: object) -> str:
    if name != "calculate" or not isinstance(arguments, dict):
        return "error: the only tool is calculate"
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        return "error: calculate takes an expression, which is a text"
    return calculate(expression)


def _messages(task: EpisodeTask) -> list[Any]:
    return [dict(message) for message in task.messages]


async def by_chat(task: EpisodeTask, base_url: str, api_key: str) -> float:
    """Solve a problem over chat completions."""
    client = _openai().with_options(base_url=base_url, api_key=api_key)
    messages = _messages(task)
    # Ends with an answer, or by an error once the episode is over.
    while True:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATE]  # type: ignore[list-item]
        )  # fmt: skip
        said: Any = reply.choices[0].message
        if not said.tool_calls:
            return gsm8k(said.content or "", str(task.answer))
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = _result(call.function.name, arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )


async def by_messages(task: EpisodeTask, base_url: str, api_key: str) -> float:
    """Solve a problem over Anthropic's messages."""
    client = _anthropic().with_options(base_url=base_url, api_key=api_key)
    function: Any = CALCULATE["function"]
    tool: Any = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    messages = _messages(task)
    # Ends with an answer, or by an error once the episode is over.
    while True:
        reply = await client.messages.create(
            model="policy", max_tokens=100, messages=messages, tools=[tool]
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            text = "".join(b.text for b in reply.content if b.type == "text")
            return gsm8k(text, str(task.answer))
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": _result(call.name, call.input),
            }
            for call in calls
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]
