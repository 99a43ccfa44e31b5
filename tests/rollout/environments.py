"""Environments of a user's own, named as path:class by the tests."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from verl_ray.agents.contract import (
    Action,
    EpisodeTask,
    Observation,
    Policy,
    Step,
    message_of,
)
from verl_ray.agents.models import model
from verl_ray.agents.policy import EpisodePolicy
from verl_ray.errors import CallRefused


class Counting:
    """Ends after three turns, and pays for two of them."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        self.turns = 0
        self.number = int(task.extra["number"])
        return Observation(task.messages)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        rewards = {1: 0.0, 2: 1.0, 3: 0.5}
        messages = [{"role": "user", "content": "on"}]
        is_last = self.turns == 3
        return Step([] if is_last else messages, rewards[self.turns], is_last)

    async def close(self) -> None:
        pass


class Cutting(Counting):
    """Lets the first turn end at the letters that the task names, and the next early."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        begin = await super().reset(task, seed)
        return replace(begin, stop=task.extra["letters"])

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        early = 2 if self.turns == 1 else None
        return replace(step, max_tokens=early, metrics={"turns": self.turns})


async def knowing(task: EpisodeTask, policy: EpisodePolicy) -> float:
    """Says what it knows; fails where its task says so."""
    policy.output = f"{asdict(policy.terms)}"
    policy.tell("somebody asked for a temperature")
    await policy.respond(task.messages)
    for constraint in ({"json": 1}, {"tools": []}):
        try:
            sampled = await policy._sampler.sample(
                [4], seed=1, max_tokens=9, tools=[], constraint=constraint
            )
            policy.output += f" {sampled.action.text}"
        except CallRefused as refusal:
            policy.output += f" {refusal.param}: {refusal}"
    parts: list[tuple[str, str]] = []
    sampled = await policy._sampler.sample(
        [4, 4], seed=1, max_tokens=9, tools=[], listener=lambda *p: parts.append(p)
    )
    policy.output += f" {parts} {sampled.action.text} {sampled.log_probs}"
    if task.extra["number"]:
        raise LookupError("it fails")
    return 1.0


class Deadly(Counting):
    """Ends the process in one of the episodes."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal

    async def step(self, action: Action) -> Step:
        if self.number == self.fatal:
            os.kill(os.getpid(), 9)
        return await super().step(action)


HELLO = [{"role": "user", "content": "hello"}]


class Asking(Counting):
    """Shows what a simulated user says."""

    def __init__(self) -> None:
        self.user = model("user")

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        answer = {"role": "user", "content": await self.user.chat(HELLO)}
        return replace(step, messages=[answer])


class PlainlyAsking(Asking):
    """Shows it from a thread."""

    def step(self, action: Action) -> Step:  # type: ignore[override]
        said = self.user.chat_sync(HELLO)
        return Step([{"role": "user", "content": said}], done=True)


async def asking(task: EpisodeTask, policy: Policy) -> float:
    """A coroutine in which a judge speaks."""
    draft = await policy.respond(task.messages)
    said = await model("user").chat(HELLO)
    verdict = {"role": "user", "content": said}
    await policy.respond([*task.messages, message_of(draft), verdict])
    return float(len(said))


async def ask_user() -> str:
    """Ask the user."""
    return await model("user").chat(HELLO)


def ask_user_plainly() -> str:
    """Ask the user."""
    return model("user").chat_sync(HELLO)


class Stuck(Counting):
    """Stops the event loop, where its task says so."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        if task.extra.get("stuck"):
            time.sleep(3600)
        return await super().reset(task, seed)


async def blocks(task: EpisodeTask, base_url: str, api_key: str) -> None:
    """Ask as a client without async does, which holds the loop that would answer."""
    url = f"{base_url}/models"
    urllib.request.urlopen(url)


class Slow(Counting):
    """Holds the event loop in the first step of each episode."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def step(self, action: Action) -> Step:
        if not self.turns:
            self.wait()
        return await super().step(action)

    def wait(self) -> None:
        time.sleep(self.seconds)


class Hanging:
    """An environment of plain methods, whose first step never returns."""

    def reset(self, task: EpisodeTask, seed: int) -> Observation:
        return Observation(task.messages)

    def step(self, action: Action) -> Step:
        threading.Event().wait()
        raise AssertionError

    def close(self) -> None:
        pass


class Flaky(Counting):
    """Fails in the first run of each episode, and in one of them always."""

    def __init__(self, folder: str, hopeless: int) -> None:
        self.folder = Path(folder)
        self.hopeless = hopeless

    async def step(self, action: Action) -> Step:
        file = self.folder / f"run-{self.number}"
        if self.number == self.hopeless or not file.exists():
            file.touch()
            raise ConnectionError("nobody answers")
        return await super().step(action)


class Panic(BaseException):
    """As those of extension modules in Rust."""


class Panicking(Counting):
    """Panics where its task says so; in `finish` where nobody awaits it."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        self.where = task.extra["where"]
        self.last = {"role": "user", "content": "end"}
        return await super().reset(task, seed)

    async def step(self, action: Action) -> Step:
        if self.where == "step":
            raise Panic("in step")
        if self.where == "task":
            await asyncio.gather(self.exit())
        if self.where == "loop":
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(3600)
        if self.where == "close":
            return Step([self.last], 1.0, done=True)
        return await super().step(action)

    async def exit(self) -> None:
        sys.exit(3)

    @property
    def finish(self) -> None:
        raise Panic("in finish")

    async def close(self) -> None:
        # It was checked, and stands in the conversation.
        self.last["of"] = b"no JSON"


class Endless(Counting):
    """Says as it begins and as it is closed, through a pipe of the test."""

    def __init__(self, pipe: str) -> None:
        self.pipe = Path(pipe)

    def say(self, words: str) -> None:
        self.pipe.write_text(f"{words}\n")

    async def step(self, action: Action) -> Step:
        self.say(f"begun {self.number}")
        await asyncio.sleep(3600)
        raise AssertionError

    async def close(self) -> None:
        self.say(f"closed {self.number}")


class Greedy(Endless):
    """Takes memory that its process keeps, in the first episode."""

    taken: ClassVar[list[bytes]] = []

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        observation = await super().reset(task, seed)
        if not self.number:
            self.taken.append(b"1" * (256 << 20))
        return observation

    async def close(self) -> None:
        # Whoever does not wait for it ends its process meanwhile.
        await asyncio.sleep(0.3)
        await super().close()


class Parent(Endless):
    """Starts a process that holds a port, and makes a folder; it leaves both alone."""

    async def step(self, action: Action) -> Step:
        with socket.create_server(("127.0.0.1", 0)) as server:
            child = subprocess.Popen(
                ["sleep", "3600"], start_new_session=True, pass_fds=[server.fileno()]
            )
            port = server.getsockname()[1]
        self.say(f"{child.pid} {port} {tempfile.mkdtemp()}")
        await asyncio.sleep(3600)
        raise AssertionError


class Various(Counting):
    """Answers each turn by something else, and offers a tool if its task says so."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        self.num_turns = int(task.extra["num_turns"])
        self.turns = 0
        tool = {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds ünd more.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        return Observation(task.messages, [tool] if task.extra["has_tool"] else [])

    async def step(self, action: Action) -> Step:
        self.turns += 1
        if self.turns == self.num_turns:
            return Step(reward=1.0, done=True)
        results = ["", "半分 🙂", "two\n\nlines "]
        messages = [
            {"role": "tool", "content": results[(self.turns + at) % 3]}
            for at in range(len(action.tool_calls))
        ]
        return Step(messages or [{"role": "user", "content": results[self.turns % 3]}])


async def branching(task: EpisodeTask, base_url: str, api_key: str) -> float:
    """Echoes turns in other words, forks twice at the same time, forges, and shortens."""
    return await _branch(task, base_url, api_key, is_stream=False)


async def streaming(task: EpisodeTask, base_url: str, api_key: str) -> float:
    """Does the same and reads each turn as it comes; returns the parts of all words."""
    return await _branch(task, base_url, api_key, is_stream=True)


async def _branch(
    task: EpisodeTask, base_url: str, api_key: str, *, is_stream: bool
) -> float:
    # Few of these environments are agents.
    import openai

    add: Any = {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {}},
    }

    def echo(turn: Any) -> list[Any]:
        calls = [
            {
                "id": f"mine {number}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": f" {call.function.arguments} ",
                },
            }
            for number, call in enumerate(turn.tool_calls or ())
        ]
        message = {"role": "assistant", "content": f"\n{turn.content or ''} "}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "é"}
            for call in calls
        ]
        if not calls:
            return [message, {"role": "user", "content": "Grüße"}]
        return [{**message, "tool_calls": calls}, *results]

    num_parts = 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def streamed(**options: Any) -> Any:
            nonlocal num_parts
            async with client.chat.completions.stream(**options) as events:
                async for event in events:
                    num_parts += event.type == "content.delta"
                return events.current_completion_snapshot

        async def ask(messages: list[Any]) -> list[Any]:
            create = streamed if is_stream else client.chat.completions.create
            reply: Any = await create(model="m", messages=messages, tools=[add])
            return [*messages, *echo(reply.choices[0].message)]

        messages: list[Any] = list(task.messages)
        for _ in range(3):
            messages = await ask(messages)
        branches = [[*messages, {"role": "user", "content": each}] for each in "ab"]
        messages, _ = await asyncio.gather(*map(ask, branches))
        forged = {"role": "assistant", "content": "forged"}
        await ask([*task.messages, forged, messages[-1]])
    return float(num_parts)
