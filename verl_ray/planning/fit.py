"""Whether a candidate fits a described machine, and the cache that then remains.

Invariant: memory is that of the memory plan; a part of each device and host stays free
(`MEMORY_SHARE`), since activations are estimates. Deliberately not here: which
candidates there are (`candidates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.planning.assumptions import MEMORY_SHARE
from verl_ray.planning.generation_time import cache_bytes_per_token
from verl_ray.preflight.gpus import GIB
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.model_sizes import size_of
from verl_ray.preflight.role_memory import ROLLOUT, Phase

_CACHE_UNIT_GIB = 0.1

_BLOCKS = 1.05
"""A cache is made of blocks, so it takes a little more than its tokens."""


@dataclass(frozen=True)
class Shortage:
    """Memory that a candidate lacks.

    Attributes:
        place: A GPU, or the host of a node.
        phase: Phase of a step in which it is short.
        needed: Bytes that it needs there.
        available: Bytes that a plan may fill there.
    """

    place: str
    phase: Phase
    needed: int
    available: int

    @property
    def factor(self) -> float:
        """Times by which it is short."""
        return self.needed / self.available


def with_cache(config: RLConfig, cache_gib: float) -> RLConfig:
    """Return the configuration with a key-value cache."""
    rollout = config.rollout.model_copy(update={"kv_cache_gib": cache_gib})
    return config.model_copy(update={"rollout": rollout})


def largest_cache_gib(config: RLConfig) -> float:
    """Return the cache that holds all rows of a replica at their greatest length."""
    rows = -(-config.rows_per_step // resolved(config.rollout.num_replicas))
    return _rounded(rows * _row_bytes(config), math.ceil)


def fitted(config: RLConfig, machine: Machine) -> RLConfig | Shortage:
    """Return a candidate with its cache, or what it lacks on a machine.

    Args:
        config: Resolved configuration; the size of its cache does not matter.
        machine: Described machine with GPUs.
    """
    cached = with_largest_cache(config, machine)
    if cached is None:
        cached = with_cache(config, _row_gib(config))
    shortage = shortage_of(memory_plan(cached, on_gpus=True), machine)
    return cached if shortage is None else shortage


def with_largest_cache(config: RLConfig, machine: Machine) -> RLConfig | None:
    """Return a candidate with a cache that takes what remains of the engines' devices.

    None if not a single row fits there.
    """
    assert machine.gpu is not None, "a machine with GPUs was described"
    row_gib = _row_gib(config)
    plan = memory_plan(with_cache(config, row_gib), on_gpus=True)
    # The cache is there in the phases in which the engine is awake.
    device = plan.device_of(ROLLOUT)
    used = max(
        plan.bytes_by_device(phase)[device]
        for phase in plan.phases
        if "cache" in plan.by_role[ROLLOUT][phase].persistent
    )
    free = MEMORY_SHARE * machine.gpu.memory_bytes - used
    if free < 0:
        return None
    cache_gib = row_gib + _rounded(free, math.floor)
    return with_cache(config, round(min(cache_gib, largest_cache_gib(config)), 1))


def shortage_of(plan: MemoryPlan, machine: Machine) -> Shortage | None:
    """Return the memory that a plan lacks most of on a machine; None if it fits."""
    assert machine.gpu is not None, "a machine with GPUs was described"
    phase, device_bytes = plan.fullest(on_device=True)
    on_device = int(MEMORY_SHARE * machine.gpu.memory_bytes)
    on_host = int(MEMORY_SHARE * machine.memory_bytes)
    shortages = [Shortage("a GPU", phase, device_bytes, on_device)]
    for each in plan.phases:
        node_bytes = plan.node_bytes(each, machine.gpus)
        shortages.append(Shortage("the host of a node", each, node_bytes, on_host))
    worst = max(shortages, key=lambda shortage: shortage.factor)
    return worst if worst.factor > 1 else None


def _row_gib(config: RLConfig) -> float:
    """Return the smallest cache that holds the longest row."""
    return _rounded(_row_bytes(config), math.ceil)


def _row_bytes(config: RLConfig) -> float:
    """Return the bytes of the longest row in the cache of one rank."""
    shape = size_of(config.actor.model.folder, config, "policy").shape
    assert shape is not None, "models without a shape are refused before"
    longest, _ = config.longest_row
    return _BLOCKS * longest * cache_bytes_per_token(config.rollout, shape)


def _rounded(nbytes: float, rounding: Callable[[float], int]) -> float:
    """Return bytes in GiB, to a whole number of units."""
    return float(round(rounding(nbytes / GIB / _CACHE_UNIT_GIB) * _CACHE_UNIT_GIB, 1))
