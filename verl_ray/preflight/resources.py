"""Resources that a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem. What works slowly, and what is
estimated not to fit, is a warning. There is one advice for GPUs and hosts that are too
small. It stands with the first of the problems, or else of the warnings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl_ray.backends import BACKENDS
from verl_ray.backends.base import BytesPerPart, MemoryPart
from verl_ray.config.load import with_changes
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.preflight.device_defaults import shared_memory_bytes
from verl_ray.preflight.devices import (
    as_sum,
    device_problems,
    idle_gpus,
    larger,
    ranks_on_devices,
    ranks_on_idle_gpus,
    ranks_without_rows,
)
from verl_ray.preflight.disk_space import disk_problems
from verl_ray.preflight.footprints import CERTAIN
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.memory_plan import Job, MemoryPlan
from verl_ray.preflight.role_memory import ROLLOUT, Phase, RoleMemory
from verl_ray.preflight.savings import as_overrides, cheapest_change, single_rows
from verl_ray.suggest import either


def resource_problems(
    config: Config, machine: Machine | None, *, learns: bool = True
) -> Iterator[Problem]:
    """Yield what would stop the run.

    Args:
        config: Configuration of the run, resolved for this machine.
        machine: Machine that must hold the run. None checks only the disk, of which a
            description says nothing.
        learns: Whether the job trains. False stands for an evaluation alone.
    """
    if machine is None or not machine.is_described:
        yield from disk_problems(config, learns=learns)
    if machine is None:
        return

    job = Job(config, machine, learns)
    yield from _shared_memory_problems(config, machine)
    yield from memory_problems(job)
    yield from device_problems(job)


def resource_warnings(
    config: Config, machine: Machine | None, *, learns: bool = True
) -> Iterator[str]:
    """Yield what would only slow the run; the arguments are those of its problems.

    A cluster of which nothing is known may be used by others, so none of its GPUs
    counts as idle.
    """
    if learns:
        yield from ranks_without_rows(config)
    if machine is None:
        return

    job = Job(config, machine, learns)
    if not machine.gpus:
        yield from _cpu_warnings(job)
        return
    if learns:
        yield from idle_gpus(job)
    yield from memory_warnings(job)


def _cpu_warnings(job: Job) -> Iterator[str]:
    """Yield a warning if more threads compute than the machine has cores."""
    config = job.config
    ranks = ranks_on_devices(job)
    # Cores are shared out so that each rank has at least one.
    threads = 1
    if isinstance(config.run.threads_per_rank, int):
        threads = config.run.threads_per_rank

    busy = sum(ranks.values()) * threads
    cores = job.machine.nodes * job.machine.cores
    if busy > cores:
        yield (
            f"{busy} threads compute at once ({as_sum(ranks)}, {threads} per rank) on"
            f" {cores} cores: the run works, slower than with fewer ranks"
            " (num_ranks, rollout.num_replicas, run.threads_per_rank)"
        )


# ------------------------------------------------------------------------ shared memory


def _shared_memory_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield a problem if /dev/shm is too small."""
    needed = shared_memory_bytes(config, machine.nodes)
    if needed <= machine.shm_free_bytes:
        return

    # Ray's object store and the wire are files in /dev/shm.
    free = f"{machine.shm_free_bytes / MIB:.0f} MiB free"
    rule = (
        f"rows and weights travel through shared memory, about {needed / MIB:.0f} MiB"
        " of it"
    )
    size_gib = math.ceil(needed / GIB) + 1
    fix = (
        f"Start the container with --shm-size={size_gib}g, or remount /dev/shm larger."
    )
    yield Problem("/dev/shm", free, rule, fix, may_pass=True)


# ------------------------------------------------------------------------------- memory


def memory_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem for a GPU, and for a host, that is certainly too small."""
    shortages = list(_shortages(job))
    for shortage in shortages:
        if shortage.is_certain:
            yield shortage.problem(_advice(shortage, shortages, job))


def memory_warnings(job: Job) -> Iterator[str]:
    """Yield a warning for a GPU, and for a host, that is too small by estimate."""
    shortages = list(_shortages(job))
    for shortage in shortages:
        if not shortage.is_certain:
            yield shortage.warning(_advice(shortage, shortages, job))


def _shortages(job: Job) -> Iterator[Shortage]:
    """Yield what is too small, a GPU first."""
    for shortage in (device_shortage(job), host_shortage(job)):
        if shortage is not None:
            yield shortage


def _advice(shortage: Shortage, shortages: list[Shortage], job: Job) -> str:
    """Return what to do about something that is too small."""
    if shortage.own_advice is not None:
        return shortage.own_advice
    advised = [each for each in shortages if each.own_advice is None]
    # Sorting keeps the order of those that are equally certain.
    first = min(advised, key=lambda each: not each.is_certain)
    if shortage is first:
        return how_it_fits(job)
    return f"the same is needed here as for {first.place}"


def how_it_fits(job: Job) -> str:
    """Return the cheapest change with which a run fits GPUs and hosts, in words."""
    sharing = _sharing(job)
    changes = cheapest_change(job)
    if changes is not None:
        cheapest = f"the cheapest change that would fit is {as_overrides(changes)}"
        return f"{sharing}; without that, {cheapest}" if sharing else cheapest

    last = "take a smaller model or a larger machine"
    ways = [way for way in (sharing, _separate_engines(job)) if way]
    if ways:
        last = f"or {last}"
    return f"no setting that was tried is enough: {'; '.join([*ways, last])}"


def _sharing(job: Job) -> str:
    """Return how to share out models of which each GPU has a copy; empty if none can.

    A backend is chosen as a whole, so nothing is predicted of another one.
    """
    phase, needed = job.memory.fullest(on_device=True)
    if needed <= (job.machine.gpu_memory_bytes or needed):
        return ""
    roles = fullest_roles(job.memory, phase)
    models = job.config.model_roles
    copied = [
        name
        for name in models
        if name in roles and not models[name].backend.shares_models
    ]
    more = ranks_on_idle_gpus(job, copied) if copied else {}
    if not more and all(models[name].num_ranks == 1 for name in copied):
        return ""
    kinds = [
        f"backend={kind}"
        for kind, backend in BACKENDS.items()
        if backend.shares_models and not backend.packages
    ]
    overrides = f"{either(kinds)} {as_overrides(more)}".strip()
    return f"{overrides} shares out models of which each GPU has a copy now"


def _separate_engines(job: Job) -> str:
    """Return how to share out an engine's model that is too large for a shared GPU."""
    available = job.machine.gpu_memory_bytes
    if available is None or not job.config.shares_processes:
        return ""
    for phase in job.memory.phases:
        if job.memory.device_bytes(phase) > available:
            name, part, _ = largest(job.memory, phase)
            if (name, part) == (ROLLOUT, "weights"):
                return (
                    "placement=separate with a larger rollout.tensor_parallel shares"
                    " the engine's model out"
                )
    return ""


# -------------------------------------------------------------------- memory of devices

# Memory that a run needs of a GPU.
#
# Invariant: only a lower bound is certain, and told with the parts that count in it.

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


def _counted(memory: RoleMemory, of_activations: float) -> RoleMemory:
    """Return what is certain, and a share of the activations."""
    persistent: BytesPerPart = {
        part: size for part, size in memory.persistent.items() if part in CERTAIN
    }
    working: BytesPerPart = {
        part: size for part, size in memory.working.items() if part in CERTAIN
    }
    activations = int(of_activations * memory.working.get("activations", 0))
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


# ---------------------------------------------------------------------- memory of hosts

# Memory that a run needs of the host of a node.
#
# Invariant: only a lower bound is certain. An estimate counts where there are GPUs.


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
    of_model = Shortage("the hosts", size, value=job.config.model.path)

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
        return replace(of_model, rule=rule)
    rule = (
        f"processes, weights, optimizer and caches take {at_least} before any"
        " activation"
    )
    advice = "take a smaller model or rollout.kv_cache_gib"
    return replace(of_model, rule=rule, own_advice=advice)


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


# -------------------------------------------------------------------- what is too small

# A GPU, or the host of a node, that is too small for a run.


@dataclass(frozen=True)
class Shortage:
    """A GPU, or the host of a node, that is too small: certainly, or by estimate."""

    place: str
    """What is too small, in words."""
    available: str
    """What there is; and what is needed, if that is an estimate."""
    key: str = "model.path"
    """Key of the setting that needs most."""
    value: object = None
    """Value of this setting."""
    rule: str | None = None
    """What is certainly needed; None for an estimate."""
    own_advice: str | None = None
    """What to do, where no change of settings is searched for."""

    @property
    def is_certain(self) -> bool:
        """Whether a lower bound does not fit."""
        return self.rule is not None

    def problem(self, advice: str) -> Problem:
        """Return what is certain as a problem."""
        assert self.rule is not None, "an estimate is no problem"
        return Problem(self.key, self.value, self.rule, f"{self.available}: {advice}.")

    def warning(self, advice: str) -> str:
        """Return what is estimated as a warning."""
        return f"{self.available}: {advice}"
