"""Turns of a policy, as an engine samples them and an environment sees them.

Invariant: what was sampled stays as it was; an action is what is read in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from verl_ray.agents.contract import (
    MOST_NESTED,
    Action,
    Constraint,
    End,
    EpisodeEnded,
    Sampled,
    ToolSchema,
    nests_too_deep,
)
from verl_ray.columns.stages import Finish
from verl_ray.rollout.requests import Chunk, GenerationRequest
from verl_ray.rollout.server import RolloutServer

ReadAction = Callable[[Sequence[int], Finish, Sequence[Any]], Action]
"""Makes an action of sampled tokens, why they end, and the tools that may be called."""


@runtime_checkable
class ReadsBehindPrompts(Protocol):
    """A `ReadAction` that reads otherwise where a prompt has begun something."""

    def behind(self, prompt: Sequence[int]) -> ReadAction:
        """Return what reads the tokens behind a prompt."""


@runtime_checkable
class WritesGrammars(Protocol):
    """A `ReadAction` that knows the grammar of a constrained turn."""

    def grammar(
        self,
        constraint: Constraint,
        tools: Sequence[ToolSchema],
        prompt: Sequence[int],
    ) -> str:
        """Return the grammar of the turn behind a prompt; see `Sampling`."""


async def sampled_turn(
    server: RolloutServer,
    request: GenerationRequest,
    tools: Sequence[Any],
    read: ReadAction,
    constraint: Constraint | None = None,
) -> Sampled:
    """Return the turn of a request that does not stream.

    Args:
        constraint: What the turn has to be; None for anything.

    Raises:
        EpisodeEnded: The request was aborted.
        CallRefused: The constraint cannot be held to.
        RolloutError: The engine failed, or refuses the request.
    """
    if constraint is not None:
        assert isinstance(read, WritesGrammars), "it reads for an engine"
        # A large schema takes a while, for which other turns do not wait.
        prompt = request.tokens.tolist()
        grammar = await asyncio.to_thread(read.grammar, constraint, tools, prompt)
        request = replace(request, sampling=replace(request.sampling, grammar=grammar))
    chunks: list[Chunk] = []
    async for more in server.respond_async([request]):
        chunks += more
    (chunk,) = chunks
    if chunk.finish is None or chunk.finish is Finish.ABORTED:
        raise EpisodeEnded(End.ABORTED)
    tokens = chunk.tokens.tolist()
    if isinstance(read, ReadsBehindPrompts):
        read = read.behind(request.tokens.tolist())
    action = read(tokens, chunk.finish, tools)
    if any(nests_too_deep(call.arguments) for call in action.tool_calls):
        why = f"the arguments of a call have more than {MOST_NESTED} levels"
        action = replace(action, tool_calls=(), parse_error=why)
    return Sampled(
        tokens,
        chunk.log_probs.tolist(),
        chunk.version_spans,
        action,
        chunk.routed_experts,
    )
