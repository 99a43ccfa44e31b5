"""Resources that a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem. What works slowly, and what is
estimated not to fit, is a warning. There is one advice for GPUs and hosts that are too
small. It stands with the first of the problems, or else of the warnings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl_ray.backends import BACKENDS
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.preflight.device_defaults import shared_memory_bytes
from verl_ray.preflight.device_memory import device_shortage, fullest_roles, largest
from verl_ray.preflight.devices import (
    as_sum,
    device_problems,
    idle_gpus,
    ranks_on_devices,
    ranks_on_idle_gpus,
    ranks_without_rows,
)
from verl_ray.preflight.disk_space import disk_problems
from verl_ray.preflight.host_memory import host_shortage
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.memory_plan import Job
from verl_ray.preflight.role_memory import ROLLOUT
from verl_ray.preflight.savings import as_overrides, cheapest_change
from verl_ray.preflight.too_small import Shortage
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
    # Engines on the GPUs of several ranks have been tried.
    if any(role.num_ranks > 1 for role in job.config.model_roles.values()):
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
