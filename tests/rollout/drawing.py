"""Drawing responses with an engine alone, without a server around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk, Request


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[list[Chunk]]:
    """Submit requests and step until the engine has none in flight; yields the chunks of each step that has any."""
    engine.submit(requests)
    while engine.unfinished:
        if chunks := engine.step():
            yield chunks
