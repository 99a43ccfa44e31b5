"""Whether a candidate fits a described machine, with what then takes the rest.

Invariant: memory is that of the memory plan; a part of each device and host stays free
(`USED_SHARE`), since activations are estimates. Deliberately not here: which candidates
there are (`candidates.py`), and how the rest is used (`remaining_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.remaining_memory import (
    MICRO_BATCH_TOKENS,
    USED_SHARE,
    cache_bounds_gib,
    growing_roles,
    with_larger_batches,
    with_largest_batches,
    with_largest_caches,
)
from verl_ray.preflight.role_memory import ROLLOUT, Phase


@dataclass(frozen=True)
class Demand:
    """Memory that a candidate needs in a place.

    Attributes:
        place: A GPU, or the host of a node.
        phase: Phase of a step in which it needs most.
        needed: Bytes that it needs there.
        available: Bytes that a plan may fill there.
    """

    place: str
    phase: Phase
    needed: int
    available: int

    @property
    def factor(self) -> float:
        """Share of what is available; above 1 it is short."""
        return self.needed / self.available


def with_cache(config: RLConfig, cache_gib: float) -> RLConfig:
    """Return the configuration with a key-value cache."""
    rollout = config.rollout.model_copy(update={"kv_cache_gib": cache_gib})
    return config.model_copy(update={"rollout": rollout})


def at_best(config: RLConfig) -> RLConfig:
    """Return a candidate as it would be if memory were no matter for the rest."""
    _, largest_gib = cache_bounds_gib(config.engines[ROLLOUT], config)
    cached = with_cache(config, largest_gib)
    return with_larger_batches(cached, growing_roles(config), MICRO_BATCH_TOKENS[0])


def fitted(config: RLConfig, machine: Machine) -> RLConfig | Demand:
    """Return a candidate that takes what remains, or what it lacks on a machine.

    Args:
        config: Resolved configuration; the size of its cache does not matter.
        machine: Described machine with GPUs.
    """
    cached = with_largest_cache(config, machine)
    if cached is None:
        cached = with_least_cache(config)
    shortage = shortage_of(memory_plan(cached, on_gpus=True), machine)
    if shortage is not None:
        return shortage

    def fits(larger: RLConfig) -> bool:
        return shortage_of(memory_plan(larger, on_gpus=True), machine) is None

    return with_largest_batches(cached, growing_roles(cached), fits)


def with_least_cache(config: RLConfig) -> RLConfig:
    """Return a candidate with a cache for the longest row alone."""
    least_gib, _ = cache_bounds_gib(config.engines[ROLLOUT], config)
    return with_cache(config, least_gib)


def with_largest_cache(config: RLConfig, machine: Machine) -> RLConfig | None:
    """Return a candidate with a cache that takes what remains of the engines' devices.

    None if not a single row fits there.
    """
    assert machine.gpu is not None, "a machine with GPUs was described"
    usable_bytes = USED_SHARE * machine.gpu.memory_bytes
    return with_largest_caches(config, [ROLLOUT], usable_bytes)


def shortage_of(plan: MemoryPlan, machine: Machine) -> Demand | None:
    """Return the memory that a plan lacks most of on a machine; None if it fits."""
    worst = max(demands_of(plan, machine), key=lambda demand: demand.factor)
    return worst if worst.factor > 1 else None


def demands_of(plan: MemoryPlan, machine: Machine) -> tuple[Demand, Demand]:
    """Return what a plan needs of a GPU, and of the host of a node."""
    assert machine.gpu is not None, "a machine with GPUs was described"
    phase, device_bytes = plan.fullest(on_device=True)
    on_device = int(USED_SHARE * machine.gpu.memory_bytes)
    of_gpu = Demand("a GPU", phase, device_bytes, on_device)

    of_phase = {phase: plan.node_bytes(phase, machine.gpus) for phase in plan.phases}
    phase = max(plan.phases, key=lambda phase: of_phase[phase])
    on_host = int(USED_SHARE * machine.memory_bytes)
    return of_gpu, Demand("the host of a node", phase, of_phase[phase], on_host)
