"""Agents over real clients: what they sample is what is trained, whatever they do."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.agents.templates import PRESERVING, STRIPPING, tokenizer_with
from verl_ray.agents.contract import (
    Action,
    End,
    Episode,
    EpisodeTask,
    Listener,
    Sampled,
    Terms,
    ToolCall,
    ToolSchema,
)
from verl_ray.agents.episode import run_episode
from verl_ray.agents.gateway import connections
from verl_ray.agents.gateway.launch import Agent, AgentFailed, Door, Payer
from verl_ray.agents.gateway.server import gateway_here, run_of
from verl_ray.agents.policy import Limits
from verl_ray.agents.template import Renderer

TOKENIZER = tokenizer_with(PRESERVING)
WIDE = Limits(max_turns=50, context_tokens=4000, close_s=2.0)
TASK = EpisodeTask([{"role": "user", "content": "58*31+25"}], answer="1823")
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def read(tokens: Sequence[int], text: str, finish: str) -> Action:
    """Take calls as Hermes writes them, and thoughts between their marks."""
    content = text
    reasoning = ""
    if "</think>" in text:
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    calls = [
        ToolCall(each["name"], each["arguments"])
        for each in map(json.loads, _CALL.findall(text))
    ]
    said = _CALL.sub("", text).strip()
    return Action(
        tokens,
        said,
        calls,
        finish,
        reasoning=reasoning,
        content=None if content == said else _CALL.sub("", content).rstrip(),
    )


@dataclass
class Answers:
    """A sampler whose turns follow from the prompt, after a time that does as well."""

    text: Callable[[str, int], str]
    delay_s: Callable[[str], float] = lambda _: 0.0
    num_together: int = 0
    """The first turns wait until so many are begun."""
    told: Callable[[Listener], Awaitable[None]] | None = None
    """Tells parts of a turn that is heard; None tells every letter at once."""

    def __post_init__(self) -> None:
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        listener: Listener | None = None,
    ) -> Sampled:
        prompt = str(TOKENIZER.decode(list(tokens)))
        self.prompts.append(prompt)
        self.seeds.append(seed)
        while len(self.prompts) < self.num_together:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.delay_s(prompt))
        text = self.text(prompt, seed)
        encoded = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        sampled = [*encoded, TOKENIZER.eos_token_id][:max_tokens]
        finish = "stop" if len(sampled) > len(encoded) else "length"
        if finish == "length":
            text = str(TOKENIZER.decode(sampled))
        log_probs = [-n / 100 for n in range(1, len(sampled) + 1)]
        action = read(sampled, text, finish)
        if listener is not None and self.told is not None:
            await self.told(listener)
        elif listener is not None:
            for letter in action.reasoning:
                listener(letter, "")
            for letter in action.text:
                listener("", letter)
        return Sampled(sampled, log_probs, [(0, 3)], action)


@dataclass
class Started:
    """An agent that is a coroutine function of a test."""

    agent: Callable[[Door], Awaitable[float | None]]
    reward: Payer = "grader"

    async def __call__(self, task: EpisodeTask, door: Door) -> float | None:
        try:
            return await self.agent(door)
        finally:
            for client in _clients.pop(door.api_key, []):
                await client.close()


def play(
    agent: Callable[[Door], Awaitable[float | None]],
    text: Callable[[str, int], str] = lambda prompt, _: "Yes.",
    bounds: Limits = WIDE,
    *,
    reward: Payer = "grader",
    delay_s: Callable[[str], float] = lambda _: 0.0,
    num_together: int = 0,
    told: Callable[[Listener], Awaitable[None]] | None = None,
    template: str = PRESERVING,
    terms: Terms | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Episode, Answers]:
    sampler = Answers(text, delay_s, num_together, told)
    episode = asyncio.run(
        run_episode(
            run_of(Agent(Started(agent, reward))),
            TASK,
            7,
            sampler,
            Renderer(tokenizer_with(template)),
            bounds,
            terms=terms,
            tell=tell,
        )
    )
    return episode, sampler


def words(episode: Episode) -> list[tuple[str, str]]:
    """Return the text of each row, and of what is learned from in it."""
    return [
        (
            TOKENIZER.decode(row.tokens),
            TOKENIZER.decode(
                [t for t, own in zip(row.tokens, row.mask, strict=True) if own]
            ),
        )
        for row in episode.rows
    ]


_clients: defaultdict[str, list[Any]] = defaultdict(list)
"""Those of each agent, which are closed with it."""


def chat(door: Door, **options: Any) -> openai.AsyncOpenAI:
    client = openai.AsyncOpenAI(
        base_url=door.openai_url, api_key=door.api_key, **options
    )
    _clients[door.api_key].append(client)
    return client


def sums(prompt: str, _: int) -> str:
    """Think and call twice; then say the last result."""
    results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", prompt)
    if results:
        return f"It is {results[-1]}. é"
    return (
        "<think>I add.</think>Both:\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4.0}}\n</tool_call>'
    )


ROW = (
    "<|im_start|>system\nTools:\n{tools}<|im_end|>\n<|im_start|>user\n1+2, 3+4?<|im_end|>\n"
    "<|im_start|>assistant\n<think>I add.</think>Both:\n"
)


def test_an_echo_stands_for_what_was_sampled() -> None:
    """With other ids, white space and JSON, and without the thoughts."""

    async def agent(door: Door) -> None:
        client = chat(door)
        messages: list[Any] = [{"role": "user", "content": "1+2, 3+4?"}]
        first = await client.chat.completions.create(
            model="any", messages=messages, tools=[ADD]
        )
        said = first.choices[0].message
        assert said.content == "Both:" and said.tool_calls is not None
        assert first.choices[0].finish_reason == "tool_calls"
        calls = [
            {
                "id": f"mine {number}",
                "type": "function",
                "function": {
                    "name": each.function.name,  # type: ignore[union-attr]
                    "arguments": text,
                },
            }
            for number, (each, text) in enumerate(
                zip(said.tool_calls, ('{"b":2,  "a":1}', '{"a":3,"b":4}'), strict=True)
            )
        ]
        messages += [
            {"role": "assistant", "content": " Both :\n", "tool_calls": calls},
            # The results come in another order than the calls.
            {"role": "tool", "tool_call_id": "mine 1", "content": "7"},
            {"role": "tool", "tool_call_id": "mine 0", "content": "3"},
        ]
        second = await client.chat.completions.create(
            model="any", messages=messages, tools=[ADD]
        )
        assert second.choices[0].message.content == "It is 7. é"
        # One that the policy has not said begins a row, and nothing is learned from it.
        messages[1]["content"] = "Neither:"
        await client.chat.completions.create(
            model="any", messages=messages, tools=[ADD]
        )

    episode, sampler = play(agent, sums)
    assert (episode.end, episode.num_turns, episode.score) == (End.COMPLETED, 3, 0.0)
    (row, learned), (forged, learned_there) = words(episode)
    assert learned == sums("", 0) + "<|im_end|>It is 7. é<|im_end|>"
    assert row == sampler.prompts[1] + "It is 7. é<|im_end|>"
    assert sampler.prompts[1].startswith(sampler.prompts[0] + sums("", 0))
    assert "tool\n3<|im_end|>\n<|im_start|>tool\n7<" in row
    assert learned_there == "It is 7. é<|im_end|>" and "Neither:" in forged
    assert (
        episode.rows[0].log_probs[-1]
        == -(len(TOKENIZER("It is 7. é")["input_ids"]) + 1) / 100
    )
    # The grader sees the whole of it.
    assert [each["role"] for each in episode.conversations[0]] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip


async def _by_chat(door: Door) -> None:
    client = chat(door)
    messages: list[Any] = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2, 3+4?"},
    ]
    reply = await client.chat.completions.create(
        model="m", messages=messages, tools=[ADD]
    )
    said = reply.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    for call, result in zip(said.tool_calls or (), "37", strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    stream = await client.chat.completions.create(
        model="m", messages=messages, tools=[ADD], stream=True
    )
    parts = [part.choices[0].delta.content or "" async for part in stream]
    assert "".join(parts) == "It is 7. é"


async def _by_responses(door: Door) -> None:
    client = chat(door)
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}
    options: Any = {"model": "m", "instructions": "Add.", "tools": [tool]}
    first = await client.responses.create(input="1+2, 3+4?", **options)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, "37", strict=True)
    ]
    async with client.responses.stream(
        input=results, previous_response_id=first.id, **options
    ) as stream:
        second = await stream.get_final_response()
    assert second.output_text == "It is 7. é"


async def _by_messages(door: Door) -> None:
    client = anthropic.AsyncAnthropic(base_url=door.anthropic_url, api_key=door.api_key)
    _clients[door.api_key].append(client)
    messages: list[Any] = [{"role": "user", "content": "1+2, 3+4?"}]
    tool: Any = {
        "name": "add",
        "description": "Add.",
        "input_schema": ADD["function"]["parameters"],
    }
    options: Any = {"model": "m", "max_tokens": 500, "system": "Add.", "tools": [tool]}
    counted = await client.messages.count_tokens(
        messages=messages, model="m", system="Add.", tools=[tool]
    )
    first = await client.messages.create(messages=messages, **options)
    assert first.usage.input_tokens == counted.input_tokens > 50
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result}
        for call, result in zip(calls, "37", strict=True)
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    async with client.messages.stream(messages=messages, **options) as stream:
        second = await stream.get_final_message()
    assert second.content[-1].text == "It is 7. é"  # type: ignore[union-attr]


def test_the_same_conversation_has_the_same_tokens_in_each_protocol() -> None:
    episodes = [play(each, sums) for each in (_by_chat, _by_responses, _by_messages)]
    (row,) = episodes[0][0].rows
    for episode, sampler in episodes:
        assert episode.rows == [row]
        assert sampler.seeds == episodes[0][1].seeds


class Telling:
    """Tells parts of a turn, the second once a client has seen the first."""

    def __init__(self, *parts: tuple[str, str]) -> None:
        self.parts = parts
        self.was_seen = asyncio.Event()
        self.times = 0

    async def __call__(self, listener: Listener) -> None:
        self.times += 1
        for number, part in enumerate(self.parts):
            listener(*part)
            if number == 0:
                await self.was_seen.wait()


STREAMED: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": "1+2, 3+4?"}],
    "tools": [ADD],
    "stream": True,
}


async def _chat_words(door: Door) -> AsyncIterator[str]:
    stream = await chat(door).chat.completions.create(**STREAMED)
    async for chunk in stream:
        yield chunk.choices[0].delta.content or ""


async def _response_words(door: Door) -> AsyncIterator[str]:
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}
    stream = await chat(door).responses.create(
        model="m", input="1+2, 3+4?", tools=[tool], stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            yield event.delta


async def _message_words(door: Door) -> AsyncIterator[str]:
    client = anthropic.AsyncAnthropic(base_url=door.anthropic_url, api_key=door.api_key)
    _clients[door.api_key].append(client)
    tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    async with client.messages.stream(
        model="m", max_tokens=500, messages=STREAMED["messages"], tools=[tool]
    ) as stream:
        async for text in stream.text_stream:
            yield text
        assert len((await stream.get_final_message()).content) == 4


@pytest.mark.parametrize("read", [_chat_words, _response_words, _message_words])
def test_a_stream_is_read_while_its_turn_is_sampled(
    read: Callable[[Door], AsyncIterator[str]],
) -> None:
    telling = Telling(("I add.", "Bo"), ("", "t"))

    async def agent(door: Door) -> None:
        words = []
        async for text in read(door):
            words += [text] if text else []
            if words == ["Bo"]:
                telling.was_seen.set()
        assert words == ["Bo", "t", "h:"]

    episode, _ = play(agent, sums, told=telling)
    assert (episode.end, episode.detail) == (End.COMPLETED, "")
    assert (episode.num_turns, episode.metrics) == (1, {})


def test_a_stream_that_breaks_off_begins_again_from_the_record() -> None:
    telling = Telling(("", "Bo"), ("", "t"))

    async def agent(door: Door) -> None:
        url = f"{door.openai_url}/chat/completions"
        mine = {"x-api-key": door.api_key}
        again = {**mine, "x-stainless-retry-count": "1"}

        async def words(reply: aiohttp.ClientResponse) -> list[str]:
            assert reply.status == 200
            lines = [line async for line in reply.content if b'"content": "' in line]
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
            return [each["content"] for each in deltas]

        async with aiohttp.ClientSession(headers=mine) as session:
            async with session.post(url, json=STREAMED) as reply:
                async for line in reply.content:
                    if b'"Bo"' in line:
                        break
            # Two ask again at the same time.
            async with (
                session.post(url, json=STREAMED) as first,
                session.post(url, json=STREAMED, headers=again) as second,
            ):
                telling.was_seen.set()
                assert await words(first) == await words(second) == ["Bo", "t", "h:"]
            async with session.post(url, json=STREAMED, headers=again) as reply:
                assert await words(reply) == ["Both:"]

    episode, _ = play(agent, sums, told=telling)
    assert (episode.end, episode.detail) == (End.COMPLETED, "")
    assert (episode.num_turns, telling.times, episode.metrics) == (1, 1, {})


async def _echoes_chat(door: Door) -> None:
    client = chat(door)
    options: Any = {"model": "m", "tools": [ADD]}
    messages = [*STREAMED["messages"]]
    async with client.chat.completions.stream(messages=messages, **options) as events:
        said = (await events.get_final_completion()).choices[0].message
    assert said.content == "Neither"
    messages.append(said.model_dump(exclude_none=True))
    for call in said.tool_calls or ():
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        messages.append(result)
    await client.chat.completions.create(messages=messages, **options)


async def _echoes_items(door: Door) -> None:
    """As agents do that leave out the ids of what they keep."""
    client = chat(door)
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}
    options: Any = {"model": "m", "tools": [tool]}
    items: list[Any] = [*STREAMED["messages"]]
    async with client.responses.stream(input=items, **options) as events:
        said = await events.get_final_response()
    assert said.output_text == "Neither"
    items += [
        item.model_dump(exclude_none=True, exclude={"id"}) for item in said.output
    ]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in said.output
        if item.type == "function_call"
    ]
    await client.responses.create(input=items, **options)


@pytest.mark.parametrize("agent", [_echoes_chat, _echoes_items])
def test_words_that_a_turn_does_not_begin_with_are_told_and_counted(
    agent: Callable[[Door], Awaitable[None]],
) -> None:
    """And who repeats them still has the tokens that were sampled."""

    async def told(listener: Listener) -> None:
        listener("", "Nei")
        # Its client has this before the turn is whole, and before its thoughts.
        await asyncio.sleep(0.2)
        listener("I ", "ther")

    texts: list[str] = []
    episode, _ = play(agent, sums, told=told, tell=texts.append)
    assert episode.detail == ""
    ((_, learned),) = words(episode)
    assert learned == sums("", 0) + "<|im_end|>It is 3. é<|im_end|>"
    assert episode.metrics == {"broken_streams": 1.0}
    assert len(texts) == 1 and "agent.tool_parser" in texts[0]


def test_a_turn_whose_stream_was_left_is_a_row_whenever_it_ends() -> None:
    """It is cut, and ends before the agent's next turn is requested, or long after."""

    def text(prompt: str, _: int) -> str:
        return "ok" if "result" in prompt else "<a>1</a>" + "x" * 5000

    def left(*, ends_early: bool) -> Episode:
        telling = Telling(("", "<a>"), ("", "1"))

        async def agent(door: Door) -> float:
            client = chat(door)
            messages: list[Any] = [{"role": "user", "content": "Q"}]
            options: Any = {"model": "m", "messages": messages}
            stream = await client.chat.completions.create(stream=True, **options)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            if ends_early:
                telling.was_seen.set()
                await asyncio.sleep(0.2)
            messages += [
                {"role": "assistant", "content": "<a>1</a>"},
                {"role": "user", "content": "result"},
            ]
            await client.chat.completions.create(**options)
            asyncio.get_running_loop().call_later(0.3, telling.was_seen.set)
            return 1.0

        return play(agent, text, told=telling)[0]

    episode = left(ends_early=True)
    assert (episode.end, episode.num_turns) == (End.COMPLETED, 2)
    assert episode.metrics == {"unread_turns": 1.0} and episode.response == "ok"
    assert [sum(pay for _, pay in row.rewards) for row in episode.rows] == [0.0, 1.0]
    assert left(ends_early=False) == episode


def test_a_stream_ends_with_its_episode() -> None:
    telling = Telling(("", "Bo"))

    async def agent(door: Door) -> float:
        with pytest.raises(openai.APIError, match="model_timeout"):
            _ = [text async for text in _chat_words(door)]
        return 1.0

    bounds = Limits(max_turns=9, context_tokens=4000, model_s=0.3, close_s=2.0)
    episode, _ = play(agent, sums, bounds, told=telling)
    assert (episode.end, episode.num_turns) == (End.MODEL_TIMEOUT, 0)


def test_a_request_that_comes_again_is_answered_from_the_record() -> None:
    async def agent(door: Door) -> None:
        messages: Any = [{"role": "user", "content": "slow"}]
        # Its client asks again after a tenth of the time that the turn takes.
        client = chat(door, timeout=0.2, max_retries=8)
        first = await client.chat.completions.create(model="m", messages=messages)

        # Another asks again without saying so, and has lost the answer.
        body = {"model": "m", "messages": [{"role": "user", "content": "slower"}]}
        url = f"{door.openai_url}/chat/completions"
        headers = {"Authorization": f"Bearer {door.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await session.post(url, json=body)
            texts = []
            # Whoever has the answer and asks the same asks for another turn.
            for _ in range(2):
                async with session.post(url, json=body) as reply:
                    whole = await reply.json()
                    texts.append(whole["choices"][0]["message"]["content"])
        assert first.choices[0].message.content and texts[0] != texts[1]

    episode, sampler = play(
        agent,
        lambda prompt, seed: f"{seed % 1000}",
        delay_s=lambda prompt: 0.5 if "slow" in prompt else 0.0,
    )
    assert (episode.num_turns, len(sampler.prompts), len(episode.rows)) == (3, 3, 3)
    assert len(set(sampler.seeds)) == 3


@pytest.mark.parametrize("slow", ["A", "B"])
def test_parallel_calls_are_branches_in_any_order(slow: str) -> None:
    """Their rows, seeds and numbers do not depend on which is done first."""

    async def agent(door: Door) -> None:
        client = chat(door)
        plan: Any = {"role": "user", "content": "Plan."}

        async def helped(name: str) -> str | None:
            messages: list[Any] = [plan, {"role": "user", "content": name}]
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model="m", messages=messages
                )
                said = reply.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "Go on."},
                ]
            return said

        said = await asyncio.gather(*map(helped, "AB"))
        several = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": str(said)}], n=2
        )
        assert len({each.message.content for each in several.choices}) == 2

    def delay_s(prompt: str) -> float:
        return 0.1 if f"\n{slow}<" in prompt else 0.02

    episode, _ = play(
        agent, lambda prompt, seed: f"{seed % 10**6}", delay_s=delay_s, num_together=2
    )
    assert episode.num_turns == 6
    other, _ = play(agent, lambda prompt, seed: f"{seed % 10**6}", num_together=2)
    assert episode.rows == other.rows and len(episode.rows) == 4
    assert episode.conversations == other.conversations
    assert episode.response == other.response
    turns = sorted(number for row in episode.rows for number in row.turns)
    assert turns == list(range(6))


def test_calls_in_the_same_words_at_the_same_time_are_turns_of_their_own() -> None:
    """And an echo stands for the very turn that it says, by its ids and its words."""

    async def agent(door: Door) -> None:
        client = chat(door)
        ask = client.chat.completions.create
        options: Any = {"model": "m", "messages": [{"role": "user", "content": "n"}]}
        replies = await asyncio.gather(*(ask(**options) for _ in range(3)))
        said = [reply.choices[0].message for reply in replies]
        assert len({reply.id for reply in replies}) == 3
        options["messages"] += [
            said[1].model_dump(exclude_none=True), {"role": "user", "content": "on"}
        ]  # fmt: skip
        await ask(**options)
        chosen.append(said[1].content)

        tools: Any = [ADD]
        calling = await ask(**options | {"n": 2, "tools": tools})
        second = calling.choices[1].message
        options["messages"] += [
            second.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": second.tool_calls[0].id, "content": "5"},
        ]  # fmt: skip
        await ask(**options, tools=tools)

        first = await client.responses.create(model="m", input="n", instructions="I")
        other = await client.responses.create(model="m", input="n", instructions="I")
        assert first.output_text != other.output_text
        for each in (first, other):
            await client.responses.create(
                model="m", input="on", previous_response_id=each.id
            )
            chosen.append(each.output_text)

    def text(prompt: str, seed: int) -> str:
        if "Tools:" in prompt and "\n5<" not in prompt:
            # Which of them it is does not show in the words.
            thought = f"<think>{seed % 1000}</think>"
            return (
                thought + '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
            )
        return f"{seed % 10} {seed % 1000}"

    chosen: list[str | None] = []
    episode, sampler = play(agent, text)
    assert episode.num_turns == 11
    on, *_, after_first, after_other = [
        prompt for prompt in sampler.prompts if "\non<" in prompt and "Tools:" not in prompt
    ]  # fmt: skip
    pairs = zip((on, after_first, after_other), chosen, strict=True)
    assert all(f"assistant\n{words}<" in prompt for prompt, words in pairs)
    # Instructions hold for their own request.
    assert "system" not in after_first
    (after_call,) = [prompt for prompt in sampler.prompts if "\n5<" in prompt]
    thoughts = [
        re.findall("<think>(.*?)</think>", text)
        for text, _ in words(episode)
        if "Tools:" in text
    ]
    assert re.findall("<think>(.*?)</think>", after_call) in thoughts
    assert len({str(each) for each in thoughts}) == 2


def test_what_nobody_received_is_not_paid() -> None:
    async def agent(door: Door) -> float:
        client = chat(door, max_retries=0)
        ask = client.chat.completions.create
        await ask(model="m", messages=[{"role": "user", "content": "a"}], n=2)
        with pytest.raises(openai.APITimeoutError):
            await ask(
                model="m", messages=[{"role": "user", "content": "slow"}], timeout=0.1
            )
        with pytest.raises(openai.BadRequestError, match=r"agent\.max_turns"):
            await ask(model="m", messages=[{"role": "user", "content": "a"}], n=16)
        await asyncio.sleep(0.5)
        return 1.0

    episode, _ = play(
        agent,
        lambda prompt, seed: f"{seed % 1000}",
        Limits(max_turns=10, context_tokens=4000, close_s=2.0),
        delay_s=lambda prompt: 0.3 if "slow" in prompt else 0.0,
    )
    assert episode.detail == ""
    assert episode.metrics == {"unread_turns": 1.0} and episode.num_turns == 3
    rewards = {
        text.rpartition("user\n")[2][:1]: sum(reward for _, reward in row.rewards)
        for (text, _), row in zip(words(episode), episode.rows, strict=True)
    }
    assert rewards["s"] == 0 and episode.score == sum(rewards.values()) == 1
    assert "slow" not in str(episode.conversations[-1])


def test_a_limit_ends_an_episode_and_a_long_prompt_does_not() -> None:
    late: dict[str, Any] = {}

    async def agent(door: Door) -> float:
        client = chat(door)
        ask = client.chat.completions.create
        long: Any = [{"role": "user", "content": "x" * 5000}]
        with pytest.raises(openai.BadRequestError) as error:
            await ask(model="m", messages=long)
        assert error.value.code == "context_length_exceeded"
        short: Any = [{"role": "user", "content": "x"}]
        for _ in range(2):
            await ask(model="m", messages=short)
        with pytest.raises(openai.PermissionDeniedError, match="max_turns"):
            await ask(model="m", messages=short)
        late.update(url=door.openai_url, key=door.api_key)
        return 0.5

    async def course() -> Episode:
        bounds = Limits(max_turns=2, context_tokens=4000, close_s=2.0)
        episode = await run_episode(
            run_of(Agent(Started(agent))),
            TASK, 7, Answers(lambda *_: "Yes."), Renderer(TOKENIZER), bounds,
        )  # fmt: skip
        # What an agent has started may go on to ask.
        key = {"base_url": late["url"], "api_key": late["key"]}
        async with openai.AsyncOpenAI(**key) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        return episode

    episode = asyncio.run(course())
    assert (episode.end, episode.score, episode.num_turns) == (End.MAX_TURNS, 0.5, 2)


async def _fails(door: Door) -> float:
    long: Any = [{"role": "user", "content": "x" * 5000}]
    await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
    await chat(door).chat.completions.create(model="m", messages=long)
    raise AssertionError


async def _wants_more(door: Door) -> float:
    reply = await chat(door).chat.completions.create(
        model="m",
        messages=TASK.messages,  # type: ignore[arg-type]
        max_tokens=2,
    )
    assert reply.choices[0].finish_reason != "length"
    raise AssertionError


async def _insists(door: Door) -> float:
    client = chat(door)
    for _ in range(10**6):
        try:
            await client.chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        except openai.PermissionDeniedError:
            await asyncio.sleep(0)
    raise AssertionError


async def _breaks(door: Door) -> float:
    await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
    raise AgentFailed("exited with status 3")


@pytest.mark.parametrize(
    ("agent", "end", "detail"),
    [
        (_fails, End.CONTEXT_OVERFLOW, ""),
        (_wants_more, End.MAX_TOKENS, ""),
        (_insists, End.MAX_TURNS, ""),
        (_breaks, End.ENVIRONMENT_FAILED, "exited with status 3"),
    ],
)
def test_an_agent_that_gives_up_ends_as_what_it_was_told(
    agent: Callable[[Door], Awaitable[float]], end: End, detail: str
) -> None:
    bounds = Limits(max_turns=2, context_tokens=4000, close_s=2.0)
    episode, _ = play(agent, bounds=bounds)
    assert (episode.end, episode.score) == (end, 0.0)
    assert detail in episode.detail


def test_an_agent_that_says_nothing_is_stopped() -> None:
    async def agent(door: Door) -> None:
        await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        await asyncio.Event().wait()

    async def reads_nothing(door: Door) -> None:
        _, writer = await asyncio.open_connection(*place_of(door))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({"model": "m", "stream": True, "messages": TASK.messages})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {door.api_key}"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await asyncio.Event().wait()

    async def told(listener: Listener) -> None:
        # More than sockets hold.
        listener("", "x" * 2**24)

    bounds = Limits(
        max_turns=9, context_tokens=4000, turn_s=0.3, episode_s=20.0, close_s=2.0
    )
    for each in (agent, reads_nothing):
        episode, _ = play(each, bounds=bounds, delay_s=lambda _: 0.5, told=told)
        assert (episode.end, episode.num_turns) == (End.TURN_TIMEOUT, 1)
    assert episode.metrics == {"broken_streams": 1.0, "unread_turns": 1.0}


def test_a_reward_is_posted_once() -> None:
    async def agent(door: Door) -> None:
        await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        headers = {"x-api-key": door.api_key}
        async with aiohttp.ClientSession(headers=headers) as session:
            for value, status in ((None, 400), (0.25, 200), (0.25, 200), (1, 409)):
                url = f"{door.openai_url}/reward"
                async with session.post(url, json={"reward": value}) as reply:
                    assert reply.status == status

    episode, _ = play(agent, reward="post")
    assert (episode.end, episode.score) == (End.COMPLETED, 0.25)
    assert episode.rows[0].rewards == [(len(episode.rows[0].tokens) - 1, 0.25)]

    async def silent(door: Door) -> None:
        await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]

    async def returns(door: Door) -> None:
        await silent(door)
        with pytest.raises(openai.BadRequestError, match="returned by its function"):
            await chat(door).post("/reward", body={"reward": 1}, cast_to=object)

    episode, _ = play(returns, reward="function")
    assert (episode.end, episode.score) == (End.COMPLETED, 0.0)
    episode, _ = play(silent, reward="post")
    assert episode.end is End.ENVIRONMENT_FAILED
    assert "without a reward" in episode.detail


@pytest.mark.parametrize("trains", [True, False])
def test_the_run_decides_how_turns_are_sampled(trains: bool) -> None:
    async def agent(door: Door) -> None:
        ask = chat(door).chat.completions.create
        options: Any = {"model": "m", "messages": TASK.messages}
        await ask(**options, temperature=1.0, top_p=0.5)
        await ask(**options, temperature=0.0, seed=1)
        await ask(**options, temperature=0.1, reasoning_effort="low")
        strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
        await ask(**options, tools=[strict, strict], tool_choice="none")
        with pytest.raises(openai.BadRequestError, match=r"agent\.tool_parser"):
            await ask(**options, tools=[ADD])
        if trains:
            with pytest.raises(openai.BadRequestError, match="evaluations only"):
                await ask(**options, response_format={"type": "json_object"})

    texts: list[str] = []
    terms = Terms(1.0, 0.5, -1, trains=trains, model="mine", reads_tools=False)
    episode, _ = play(agent, terms=terms, tell=texts.append)
    assert episode.metrics == {"other_sampling": 2.0, "without_effect": 2.0}
    keys = "rollout.top_p" if trains else "evaluation.top_p"
    # Each name has a text of its own, which the run says once.
    names = [
        text.removeprefix("an agent asks for ").partition(";")[0] for text in texts
    ]
    assert names == [
        "seed", "temperature", "temperature", "reasoning_effort", "tools.function.strict"
    ]  # fmt: skip
    assert keys in texts[0] and len({*texts}) == 4


async def together(
    *agents: Callable[[Door], Awaitable[float | None]], bounds: Limits
) -> list[Episode]:
    """Return the episodes of agents that run at the same time."""
    sampler = Answers(lambda *_: "Yes." * 100)
    return await asyncio.gather(
        *(
            run_episode(
                run_of(Agent(Started(agent))),
                TASK, 7, sampler, Renderer(TOKENIZER), bounds,
            )
            for agent in agents
        )
    )  # fmt: skip


def place_of(door: Door) -> tuple[str, int]:
    host, _, port = door.anthropic_url.removeprefix("http://").partition(":")
    return host, int(port)


MANY = Limits(max_turns=1000, context_tokens=4000, close_s=2.0)


def test_a_hostile_agent_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It guesses, floods, sends too much and reads nothing; another agent goes on."""
    monkeypatch.setattr(connections, "_FIRST_KEY_S", 1.0)
    seen: dict[str, int] = {}

    async def hostile(door: Door) -> None:
        url = f"{door.openai_url}/chat/completions"
        body = {"model": "m", "stream": True, "messages": TASK.messages}
        mine = {"Authorization": f"Bearer {door.api_key}"}
        async with aiohttp.ClientSession() as session:
            for secret in ("", "sk-", door.api_key[:-1], "é"):
                headers = {"Authorization": f"Bearer {secret}"}
                async with session.post(url, json=body, headers=headers) as reply:
                    assert reply.status == 401
                    assert door.api_key not in await reply.text()
            for data in (b"[" * 9_000, b"{", b"[]", b'{"messages": 3}'):
                headers = {**mine, "Content-Type": "application/json"}
                async with session.post(url, data=data, headers=headers) as reply:
                    assert reply.status == 400
            # Refused by its head, or while it comes.
            try:
                async with session.post(url, data=b" " * 10**8, headers=mine) as reply:
                    assert reply.status == 413
            except aiohttp.ClientConnectionError:
                pass

        text = json.dumps(body)
        request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {door.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}"
        )
        # They ask and never read, or say nothing at all.
        silent, _ = await asyncio.open_connection(*place_of(door))
        held = []
        for number in range(400):
            _, writer = await asyncio.open_connection(*place_of(door))
            held.append(writer)
            if number % 4:
                writer.write(request.encode())
                await writer.drain()
            seen["connections"] = number + 1
        assert await silent.read() == b""
        # Its client does not ask again, as if it had lost an answer.
        with pytest.raises(openai.RateLimitError):
            await chat(door, max_retries=5).models.list()
        for writer in held:
            writer.close()

    async def other(door: Door) -> float:
        client = chat(door, timeout=5.0, max_retries=0)
        for _ in range(20):
            await client.chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        return 1.0

    first, second = asyncio.run(together(hostile, other, bounds=MANY))
    assert first.end is End.COMPLETED and seen["connections"] == 400
    assert second.detail == ""
    assert (second.end, second.score, second.num_turns) == (End.COMPLETED, 1.0, 20)


def large_bodies() -> list[tuple[bytes, int]]:
    """Return bodies that cost most among those for 4,000 tokens, and their statuses."""
    asks = b'{"messages":[{"role":"user","content":"q"}'
    message, tool = b'{"role":"user","content":""}', b'{"function":{"name":"a"}}'
    deep = b",".join([b"[]"] * 6000)
    call = b',{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"a",'
    return [
        (b'{"messages":[' + b",".join([message] * 3990) + b"]}", 400),
        (b'{"messages":[' + b",".join([message] * 4001) + b"]}", 413),
        (asks + b'],"tools":[' + b",".join([tool] * 3990) + b"]}", 400),
        (asks + call + b'"arguments":"{\\"a\\":[' + deep + b']}"}}]}]}', 400),
        (asks + b'],"metadata":[' + deep + b"]}", 200),
        (asks + b'],"metadata":[' + deep + b",[],[],[],[],[]" * 50 + b"]}", 413),
        (asks + b',{"role":"user","content":"' + b"x" * 321_000 + b'"}]}', 400),
        (asks + b"]" + b" " * 321_600 + b"}", 413),
    ]


def test_a_flood_of_large_bodies_delays_nobody() -> None:
    is_over = asyncio.Event()

    async def hostile(door: Door) -> None:
        url = f"{door.openai_url}/chat/completions"
        mine = {"x-api-key": door.api_key, "Content-Type": "application/json"}

        async def post(body: bytes, status: int, size: bool) -> None:
            # Without its size, a body is bounded as it comes.
            async def pieces() -> AsyncIterator[bytes]:
                yield body

            data = body if size else pieces()
            try:
                async with session.post(url, data=data, headers=mine) as reply:
                    assert reply.status == status, await reply.text()
            except aiohttp.ClientConnectionError:
                assert status == 413

        async with aiohttp.ClientSession() as session:
            bodies = [
                (*each, size) for each in large_bodies() for size in (True, False)
            ]
            await asyncio.gather(*(post(*each) for each in bodies * 2))
        is_over.set()

    async def other(door: Door) -> float:
        client = chat(door, timeout=5.0, max_retries=0)
        # The loop's own time, which other processes do not lengthen.
        first_s = time.thread_time()
        longest_s = 0.0
        while not is_over.is_set():
            begin_s = time.thread_time()
            await client.chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
            longest_s = max(longest_s, time.thread_time() - begin_s)
        return longest_s / (time.thread_time() - first_s)

    first, second = asyncio.run(together(hostile, other, bounds=MANY))
    assert (first.end, first.detail, second.end) == (End.COMPLETED, "", End.COMPLETED)
    assert 0 < second.score < 1 / 2


def test_a_long_conversation_is_read() -> None:
    """Of 500 messages and 2 MB; the test tokenizer has a token for each character."""

    async def agent(door: Door) -> None:
        said = {"role": "user", "content": "\x01" * 680}
        body = json.dumps({"model": "m", "messages": [said] * 500})
        assert len(body) > 2_000_000
        headers = {"x-api-key": door.api_key, "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            url = f"{door.openai_url}/chat/completions"
            async with session.post(url, data=body) as reply:
                assert reply.status == 200, await reply.text()

    episode, _ = play(agent, bounds=Limits(max_turns=2, context_tokens=400_000))
    assert (episode.end, episode.detail) == (End.COMPLETED, "")


_CONNECTS = """
import socket, sys
held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(250)]
print("connected", flush=True)
sys.stdin.read()
"""


def with_few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    is_full = asyncio.Event()

    async def hostile(door: Door) -> None:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-S", "-c", _CONNECTS, *map(str, place_of(door)))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"connected\n"
            is_full.set()
            await chat(door).chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        finally:
            process.kill()
            await process.wait()

    async def other(door: Door) -> float:
        await is_full.wait()
        for _ in range(5):
            client = chat(door, timeout=5.0, max_retries=0)
            await client.chat.completions.create(model="m", messages=TASK.messages)  # type: ignore[arg-type]
        return 1.0

    first, second = asyncio.run(together(hostile, other, bounds=MANY))
    assert first.end is End.COMPLETED, first.detail
    assert second.score == 1.0, second.detail


@pytest.mark.processes
def test_connections_leave_files_for_others() -> None:
    # Nobody can raise the limit of this process again.
    program = f"from {__name__} import with_few_files; with_few_files()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_gateway_that_could_not_start_starts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def course() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("verl_ray.agents.gateway.server.HOST", "192.0.2.1")
            with pytest.raises(OSError):
                await gateway_here()
        gateway = await gateway_here()
        assert await gateway_here() is gateway
        await gateway.close()

    asyncio.run(course())


def test_thoughts_that_a_template_drops_begin_a_row() -> None:
    """As in deployment, and each sampled token is learned from once."""

    async def agent(door: Door) -> None:
        client = chat(door)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="m", messages=messages)
            said = reply.choices[0].message
            messages += [
                said.model_dump(exclude_none=True),
                {"role": "user", "content": "b"},
            ]

    episode, _ = play(agent, lambda *_: "<think>hm</think>\n\nYes.", template=STRIPPING)
    learned = [text for _, text in words(episode)]
    assert learned == ["<think>hm</think>\n\nYes.<|im_end|>"] * 2
