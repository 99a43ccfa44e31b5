"""Resources that a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem. What works slowly is a
warning.

Deliberately not here: the resources of a cluster, which are requested when the run
starts, and what memory is needed for (`memory_plan.py`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator

from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.paths import nearest_existing
from verl_ray.preflight.devices import (
    as_sum,
    device_problems,
    idle_gpus,
    ranks_on_devices,
    ranks_without_rows,
)
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.job import Job
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.memory_advice import memory_problems, memory_warnings
from verl_ray.preflight.model_sizes import model_size
from verl_ray.preflight.shared_memory import shared_memory_bytes

BYTES_PER_SAVED_PARAMETER = 12
"""Bytes of a float32 weight and of AdamW's two moments."""

LOG_BYTES = 256 * MIB
"""Disk space for the logs, samples and metrics of a run."""


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
        yield from _disk_problems(config)
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
    yield Problem("/dev/shm", free, rule, fix)


# --------------------------------------------------------------------------------- disk


def _disk_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if the disk of run.dir is too small for the run's files."""
    free = shutil.disk_usage(nearest_existing(config.run.dir)).free

    needed = LOG_BYTES
    if config.run.checkpoint_every:
        learned = 0
        for name, role in config.model_roles.items():
            learned += trained_parameters(role, model_size(name, role, config))
        checkpoint = learned * BYTES_PER_SAVED_PARAMETER
        # The oldest checkpoint is removed only once the newest is whole, so for a
        # while there is one more.
        needed += checkpoint * (config.run.keep_checkpoints + 1)

    if needed > free:
        rule = (
            f"the run writes up to {needed / GIB:.1f} GiB there, and {free / GIB:.1f}"
            " GiB are free"
        )
        fix = "Free some, choose another run.dir, or lower run.keep_checkpoints."
        yield Problem("run.dir", config.run.dir, rule, fix)
