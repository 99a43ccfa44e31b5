"""Generation of responses by an engine alone, without a server around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk, GenerationRequest


def drained(engine: RolloutEngine) -> list[Chunk]:
    """Step until nothing is in flight, and return the chunks."""
    chunks: list[Chunk] = []
    for _ in range(1000):
        if not engine.unfinished:
            return chunks
        chunks += engine.step()
    raise AssertionError(f"{engine.unfinished} requests do not end")


def generate(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> Iterator[list[Chunk]]:
    """Submit requests, step until none is in flight, and yield each step's chunks."""
    engine.submit(requests)
    while engine.unfinished:
        if chunks := engine.step():
            yield chunks
