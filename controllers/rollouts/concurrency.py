"""How many responses each replica generates at a time, as its cache allows.

More rows at a time make better use of a GPU, until the key-value cache is full:
then the engine takes the cache of some rows away (a preemption) and computes it
again later.

Invariant: the number lies between a lower and an upper bound, and falls at once
after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from controllers.rollouts.generation import (
    ReplicaIncarnation,
)
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, RolloutConfig
from verl_ray.rollout.requests import EngineLoad
from verl_ray.settings.section import resolved

LOW_USE = 0.6
"""Share of the cache below which there may be more rows."""

HIGH_USE = 0.9
"""Share of the cache above which there should be fewer."""

GROWTH = 1.25
SHRINKAGE = 0.8

LEAST = 8
"""Responses that a replica always generates at a time, if there are so many."""


@dataclass
class Concurrency:
    """The number for one replica.

    Attributes:
        most: Upper bound.
        limit: The present number.
    """

    most: int
    limit: int
    _preemptions: int = 0

    def observe(self, load: EngineLoad, pending: int) -> None:
        """Follow the load of the engine, which is observed now and then.

        Args:
            load: The present load.
            pending: Responses that the replica has been asked for.
        """
        preempted = load.preemptions > self._preemptions
        self._preemptions = load.preemptions

        if preempted or load.kv_cache_use > HIGH_USE:
            # What runs now is too much, whatever the limit was.
            running = min(self.limit, max(load.running, 1))
            shrunk = max(LEAST, int(SHRINKAGE * running))
            self.limit = min(self.limit, shrunk)
        elif load.kv_cache_use < LOW_USE and pending >= self.limit / GROWTH:
            # Only a limit that is reached is in the way.
            self.limit = min(self.most, int(GROWTH * self.limit) + 1)


class AdaptiveConcurrency:
    """The numbers of all replicas; nothing to follow where the number is fixed."""

    def __init__(self, config: RolloutConfig) -> None:
        """Begin with what vLLM runs at once, or with the fixed number."""
        concurrency: int | Literal["adaptive"] = resolved(config.concurrency)
        self._is_fixed = concurrency != "adaptive"
        at_once: int = config.vllm_args.get("max_num_seqs", VLLM_BATCHED_REQUESTS)
        self.first: int = at_once if concurrency == "adaptive" else concurrency
        """The number for a replica whose load is not known yet."""
        # Twice as many, so that the engine never waits for the driver.
        self._most = 2 * at_once
        self._by_replica: dict[ReplicaIncarnation, Concurrency] = {}

    def observe(
        self, incarnation: ReplicaIncarnation, load: EngineLoad, pending: int
    ) -> int | None:
        """Return the new number for a replica; None where it is fixed."""
        if self._is_fixed:
            return None
        # An earlier process of the replica is gone, with its preemptions.
        replica, _ = incarnation
        for known in [known for known in self._by_replica if known[0] is replica]:
            if known != incarnation:
                del self._by_replica[known]

        concurrency = self._by_replica.setdefault(
            incarnation, Concurrency(self._most, self.first)
        )
        concurrency.observe(load, pending)
        return concurrency.limit

    def metrics(self) -> dict[str, float]:
        """Return the mean number; nothing where it is fixed."""
        if self._is_fixed:
            return {}
        limits = [concurrency.limit for concurrency in self._by_replica.values()]
        # No load has been reported yet.
        limits = limits or [self.first]
        return {"perf/rollout_concurrency": sum(limits) / len(limits)}
