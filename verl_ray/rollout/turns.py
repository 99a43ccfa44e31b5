"""Turns of a policy, as an engine samples them and an environment sees them.

Invariant: what was sampled stays as it was; an action is what is read in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl_ray.agents.contract import (
    MOST_NESTED,
    Action,
    Constraint,
    End,
    EpisodeEnded,
    Listener,
    Sampled,
    ToolSchema,
    nests_too_deep,
)
from verl_ray.columns.stages import Finish
from verl_ray.rollout.requests import Chunk, GenerationRequest
from verl_ray.rollout.server import RolloutServer

_TELL_S = 0.03
"""Least seconds between two parts of a turn that is heard.

A part costs about as much for many tokens as for one, on an event loop that all turns
of a replica share, and nobody reads faster.
"""

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


class Growing(Protocol):
    """A turn that grows with its tokens."""

    def add(self, tokens: Sequence[int]) -> Sequence[tuple[str, str]]:
        """Add tokens that are not the last ones; return what a `Listener` takes."""


@runtime_checkable
class ReadsGrowing(Protocol):
    """A `ReadAction` that reads a turn already while it is being sampled."""

    def growing(
        self, prompt: Sequence[int], tools: Sequence[Any], stop: Sequence[str]
    ) -> Growing:
        """Return a turn without tokens behind a prompt, which ends at texts of `stop`.

        What it returns begins what the whole turn is read as, as far as that is known.
        """


async def sampled_turn(
    server: RolloutServer,
    request: GenerationRequest,
    tools: Sequence[Any],
    read: ReadAction,
    constraint: Constraint | None = None,
    listener: Listener | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Sampled:
    """Return the turn of a request that does not stream.

    Args:
        constraint: What the turn has to be; None for anything.
        listener: Is told the turn while it is being sampled, where `read` can. The
            tokens are the same.
        say: Takes a sentence on why a listener is told nothing more before the end.

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
    if listener is not None and isinstance(read, ReadsGrowing):
        telling = _Telling(read, request, tools, listener, say)
        chunk = await _heard(server, request, telling)
    else:
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


async def _heard(
    server: RolloutServer, request: GenerationRequest, telling: _Telling
) -> Chunk:
    """Return the whole response to a request, which is told while it is sampled."""
    chunks: list[Chunk] = []
    request = replace(request, stream=True)
    async with contextlib.aclosing(server.respond_async([request])) as stream:
        async for more in stream:
            chunks += more
            # The last part is told with the whole.
            telling.add([each for each in more if each.finish is None])
    return _joined(chunks)


class _Telling:
    """Tells a listener a turn while it is sampled, a part every `_TELL_S`.

    A turn that cannot be read before its end is sampled all the same.
    """

    def __init__(
        self,
        read: ReadsGrowing,
        request: GenerationRequest,
        tools: Sequence[Any],
        listener: Listener,
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._say = say
        self._untold: list[Chunk] = []
        self._next_s = -math.inf
        self._growing: Growing | None = None
        with self._guarded():
            prompt = request.tokens.tolist()
            self._growing = read.growing(prompt, tools, request.sampling.stop)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks; tell them and those before once it is time."""
        now_s = asyncio.get_running_loop().time()
        self._untold += chunks
        if self._growing is None or not self._untold or now_s < self._next_s:
            return
        self._next_s = now_s + _TELL_S
        tokens = [token for each in self._untold for token in each.tokens.tolist()]
        self._untold.clear()
        parts: Sequence[tuple[str, str]] = ()
        with self._guarded():
            parts = self._growing.add(tokens)
        for thoughts, words in parts:
            self._listener(thoughts, words)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        # Parsers raise what they like, also about tools.
        except Exception as error:
            self._growing = None
            why = f"its words cannot be read before ({type(error).__name__})"
            self._say(f"a streamed turn of an agent is sent once it is whole: {why}")


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return the chunks of a response as one, as if it had not streamed."""
    if len(chunks) == 1:
        return chunks[0]
    spans: list[tuple[int, int]] = []
    for place, version in (span for each in chunks for span in each.version_spans):
        # Each chunk begins one, also where the version stays.
        if not spans or spans[-1][1] != version:
            spans.append((place, version))
    experts = [each.routed_experts for each in chunks]
    known = [each for each in experts if each is not None]
    return Chunk(
        request_id=chunks[0].request_id,
        tokens=np.concatenate([each.tokens for each in chunks]),
        log_probs=np.concatenate([each.log_probs for each in chunks]),
        finish=chunks[-1].finish,
        first_token=0,
        version_spans=tuple(spans),
        routed_experts=np.concatenate(known) if known else None,
    )
