"""Memory that a run needs of the host of a node.

Invariant: only a lower bound is certain. An estimate counts where there are GPUs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from verl_ray.backends.base import MemoryPart
from verl_ray.preflight.devices import (
    as_sum,
    larger,
)
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import Job, MemoryPlan
from verl_ray.preflight.role_memory import Phase
from verl_ray.preflight.too_small import Shortage


def host_shortage(job: Job) -> Shortage | None:
    """Return how the host of a node is too small; None if it is not."""
    machine = job.machine
    phase, needed = _least(job.memory, machine)
    if needed > machine.memory_bytes:
        return _certain_shortage(job, phase, needed)
    return _estimated_shortage(job) if machine.gpus else None


def _certain_shortage(job: Job, phase: Phase, needed: int) -> Shortage:
    """Return how a node certainly has too little memory."""
    plan = job.memory
    machine = job.machine
    at_least = f"at least {needed / GIB:.1f} GiB"
    host = machine.in_words
    if machine.nodes > 1:
        at_least += " of a node"
        host = "a node"
    size = f"{host.capitalize()} has {machine.memory_bytes / GIB:.1f} GiB"
    model_shortage = Shortage("the hosts", size, value=job.config.model.path)

    # Fewer processes help if these take more than half of the memory by themselves.
    everything = plan.host_bytes(phase, certain=True)
    if 2 * sum(group.nbytes for group in plan.processes) > everything:
        most = max(plan.processes, key=lambda group: group.nbytes)
        kinds = Counter[str]()
        for group in plan.processes:
            kinds[group.kind] += group.ranks
        rule = (
            f"{kinds.total()} processes ({as_sum(kinds)}) and what they hold take"
            f" {at_least}"
        )
        advice = f"use fewer, or {larger(machine)}"
        return Shortage("the hosts", size, most.key, most.value, rule, advice)

    if machine.gpus:
        rule = (
            f"what models keep on the host ({phase}{_largest(plan, phase)}) and"
            f" processes take {at_least}"
        )
        return replace(model_shortage, rule=rule)
    rule = (
        f"processes, weights, optimizer and caches take {at_least} before any"
        " activation"
    )
    advice = "take a smaller model or rollout.kv_cache_gib"
    return replace(model_shortage, rule=rule, own_advice=advice)


def _estimated_shortage(job: Job) -> Shortage | None:
    """Return how a node with GPUs is too small as far as can be estimated.

    Processes and state are counted as if the ranks with most were on one node.
    """
    plan = job.memory
    machine = job.machine
    sizes = {phase: plan.node_bytes(phase, machine.gpus) for phase in plan.phases}
    phase = max(plan.phases, key=lambda phase: sizes[phase])
    if sizes[phase] <= machine.memory_bytes:
        return None
    as_estimated = (
        f"the host of a node has {machine.memory_bytes / GIB:.1f} GiB, and {phase}"
        f" is estimated to need {sizes[phase] / GIB:.1f} of one{_largest(plan, phase)}"
    )
    return Shortage("the hosts", as_estimated)


def _least(plan: MemoryPlan, machine: Machine) -> tuple[Phase, int]:
    """Return the phase that takes most of a host, and a lower bound of it."""
    sizes = {phase: plan.least_node_bytes(phase, machine) for phase in plan.phases}
    phase = max(plan.phases, key=lambda phase: sizes[phase])
    return phase, sizes[phase]


def _largest(plan: MemoryPlan, phase: Phase) -> str:
    """Return what of a model takes most of a host, in words after what takes it."""
    sizes: dict[tuple[str, MemoryPart], int] = {
        (name, part): size
        for name, phases in plan.by_role.items()
        for part, size in phases[phase].on_host.items()
    }
    (name, part), size = max(sizes.items(), key=lambda item: item[1])
    return f"; {size / GIB:.1f} for {part} of each rank of {name}"
