"""One conversation as a coroutine and as an agent over HTTP, for the suite `agents`.

Invariant: both say the same words to the policy, as often.
"""

from __future__ import annotations

import functools
from typing import Any

import openai

from verl_ray.agents.contract import EpisodeTask, Message, Policy, message_of

_FIRST = {"role": "user", "content": "Guess a number."}
_NEXT = {"role": "user", "content": "Higher than that. Guess again."}


async def converse(task: EpisodeTask, policy: Policy, turns: int) -> float:
    """Talk with the policy itself."""
    messages: list[Message] = [_FIRST]
    for _ in range(turns):
        action = await policy.respond(messages)
        messages = [*messages, message_of(action), _NEXT]
    return 0.0


async def ask(task: EpisodeTask, base_url: str, api_key: str, turns: int) -> float:
    """Talk with it through OpenAI's client."""
    client = _client().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [_FIRST]
    for _ in range(turns):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        turn = reply.choices[0].message.model_dump(exclude_none=True)
        messages = [*messages, turn, _NEXT]
    return 0.0


@functools.cache
def _client() -> openai.AsyncOpenAI:
    """Return a client of this process, which has its connections."""
    limits = openai.DefaultAsyncHttpxClient(limits=openai.DEFAULT_CONNECTION_LIMITS)
    return openai.AsyncOpenAI(api_key="none", timeout=600.0, http_client=limits)
