"""An agent of two turns, as a function over OpenAI's client and as a command without one.

Both pay for each 1 or 2 that the policy writes.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

SECOND = {"role": "user", "content": "7+8="}


def reward_of(text: str) -> float:
    """Return what a turn is worth."""
    return sum(character in "12" for character in text) / 8


async def run(task: Any, base_url: str, api_key: str) -> float:
    """Take the two turns over chat completions."""
    # A command does without it.
    import openai

    messages: list[Any] = [dict(message) for message in task.messages]
    reward = 0.0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="policy", messages=messages
            )
            said = reply.choices[0].message
            reward += reward_of(said.content or "")
            messages += [said.model_dump(exclude_none=True), SECOND]
    return reward


def ask(messages: Sequence[Any], key: str | None = None) -> list[Any]:
    """Return the content of a turn over Anthropic's messages, without its client."""
    body = {"model": "policy", "max_tokens": 100, "messages": messages}
    request = urllib.request.Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages",
        json.dumps(body).encode(),
        {
            "x-api-key": key or os.environ["ANTHROPIC_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        content: list[Any] = json.load(answer)["content"]
    return content


def take_turns(messages: Sequence[Any]) -> None:
    """Take the two turns of a command, and print the reward."""
    reward = 0.0
    for number in range(2):
        content = ask(messages)
        text = "".join(block["text"] for block in content)
        reward += reward_of(text)
        print(f"turn {number}: {text}")
        messages = [*messages, {"role": "assistant", "content": content}, SECOND]
    print(reward)


if __name__ == "__main__":
    take_turns(json.load(sys.stdin)["messages"])
