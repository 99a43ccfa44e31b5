"""The load of a rollout engine, which says how many responses it can take.

Deliberately not here: what follows from it (`controllers/rollouts/replicas.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        kv_cache_use: Share of the KV cache that requests hold, 0 to 1.
        running: Number of requests that hold a part of it and are sampled from.
        waiting: Number of requests that wait for space.
        preemptions: How often, since the start, a request lost its part to others. What
            a pause frees does not count.
    """

    kv_cache_use: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
