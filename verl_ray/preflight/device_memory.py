"""Memory that a run needs of a GPU.

Invariant: only a lower bound is certain, and told with the parts that count in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from verl_ray.backends.base import BytesPerPart, MemoryPart
from verl_ray.config.load import with_changes
from verl_ray.preflight.footprints import CERTAIN
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import Job, MemoryPlan
from verl_ray.preflight.role_memory import Phase, RoleMemory
from verl_ray.preflight.savings import single_rows
from verl_ray.preflight.too_small import Shortage

SURE_SHARE = 0.5
"""Share of estimated activations that is needed in any case; see `docs/memory.md`."""


def device_shortage(job: Job) -> Shortage | None:
    """Return how the smallest GPU is too small; None if it is not, or is unknown."""
    available = job.machine.gpu_memory_bytes
    if available is None:
        return None

    least, phase = least_of_a_row(job)
    needed = least_device_bytes(least, phase)
    if needed > available:
        rule = (
            "weights, optimizer, caches and one row of the greatest length take at"
            f" least {needed / GIB:.1f} GiB of a GPU"
            f" ({phase}: {_largest_in_words(least, phase)})"
        )
        size = f"These have {available / GIB:.1f} GiB"
        return Shortage("the GPUs", size, value=job.config.model.path, rule=rule)

    phase, needed = job.memory.fullest(on_device=True)
    if needed <= available:
        return None
    sizes = (
        f"a GPU has {available / GIB:.1f} GiB, and {phase} is estimated to need"
        f" {needed / GIB:.1f} ({_largest_in_words(job.memory, phase)})"
    )
    return Shortage("the GPUs", sizes)


def least_of_a_row(job: Job) -> tuple[MemoryPlan, Phase]:
    """Return what certainly counts for one row, and the phase that takes most of a GPU.

    A row cannot be cut, so micro-batches of one longest row need least.
    """
    config = with_changes(job.config, single_rows(job.config))
    plan = counted(replace(job, config=config).memory)
    phase = max(plan.phases, key=lambda phase: least_device_bytes(plan, phase))
    return plan, phase


def counted(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan with the parts of memory that are needed in any case."""
    trainers = {
        name
        for group in plan.processes
        if group.kind == "trainer"
        for name in group.roles
    }
    by_role = {
        # What an engine computes at once is up to vLLM.
        name: {
            phase: _counted(memory, SURE_SHARE if name in trainers else 0)
            for phase, memory in phases.items()
        }
        for name, phases in plan.by_role.items()
    }
    return replace(plan, by_role=by_role)


def _counted(memory: RoleMemory, share: float) -> RoleMemory:
    """Return what is certain, and a share of the activations."""
    persistent: BytesPerPart = {
        part: size for part, size in memory.persistent.items() if part in CERTAIN
    }
    working: BytesPerPart = {
        part: size for part, size in memory.working.items() if part in CERTAIN
    }
    activations = int(share * memory.working.get("activations", 0))
    return RoleMemory(persistent, {**working, "activations": activations})


def least_device_bytes(plan: MemoryPlan, phase: Phase) -> int:
    """Return the bytes of the fullest GPU in a phase, of what is counted alone."""
    devices = Counter[str]()
    for group in plan.processes:
        memory = [
            plan.by_role[name][phase] for name in group.roles if name in plan.by_role
        ]
        devices[group.device] += sum(sum(each.persistent.values()) for each in memory)
        # Roles of one process compute in turn, each with its own gradients.
        working = (sum(each.working.values()) for each in memory)
        devices[group.device] += max(working, default=0)
    return max(devices.values())


# ----------------------------------------------------------------------------- in words


def fullest_roles(plan: MemoryPlan, phase: Phase) -> list[str]:
    """Return the roles that compute on the fullest kind of GPU in a phase."""
    devices = plan.bytes_by_device(phase)
    fullest = max(devices, key=lambda device: devices[device])
    return [name for name in plan.by_role if plan.device_of(name) == fullest]


def largest(plan: MemoryPlan, phase: Phase) -> tuple[str, MemoryPart, int]:
    """Return what takes most of the fullest GPU: a role, a part and its bytes."""
    sizes = Counter[tuple[str, MemoryPart]]()
    for name in fullest_roles(plan, phase):
        memory = plan.by_role[name][phase]
        for place in (memory.persistent, memory.working):
            for part, size in place.items():
                sizes[name, part] += size
    ((name, part), size) = sizes.most_common(1)[0]
    return name, part, size


def _largest_in_words(plan: MemoryPlan, phase: Phase) -> str:
    name, part, size = largest(plan, phase)
    return f"{size / GIB:.1f} of it {part} of {name}"
