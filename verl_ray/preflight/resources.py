"""Resources that a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem. What works slowly is a
warning.

Deliberately not here: the resources of a cluster, which are requested when the run
starts, and what memory is needed for (`memory_plan.py`).
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.rules.vllm_args import VLLM_ARGS_FIXED_ON_A_CPU
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.paths import nearest_existing
from verl_ray.preflight.device_memory import (
    device_memory_problems,
    device_memory_warnings,
)
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.role_memory import model_size, wire_bytes

BYTES_PER_SAVED_PARAMETER = 12
"""Bytes of a float32 weight and of AdamW's two moments."""

BYTES_PER_TOKEN_OF_A_ROW = 32
"""Bytes of a token, its mask, and the log-probs, values, advantages and returns that a
step adds."""

OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Smallest object store. Ray refuses to start with much less."""

LOG_BYTES = 256 * MIB
"""Disk space for the logs, samples and metrics of a run."""


def resource_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield what would stop the run.

    Args:
        config: Configuration of the run, resolved for this machine.
        machine: Machine that must hold the run. None checks only the disk, of which a
            description says nothing.
    """
    if machine is None or not machine.is_described:
        yield from _disk_problems(config)
    if machine is None:
        return

    yield from _memory_problems(config, machine)
    if machine.gpus:
        yield from _gpu_problems(config, machine)
    else:
        yield from _cpu_problems(config)


def resource_warnings(config: Config, machine: Machine | None) -> Iterator[str]:
    """Yield what would only slow the run."""
    yield from _idle_ranks(config)
    if machine is None:
        return
    if machine.gpus:
        yield from device_memory_warnings(config, machine)
    else:
        yield from _cpu_warnings(config, machine)


# ------------------------------------------------------------------------------ devices


def _ranks(config: Config) -> dict[str, int]:
    """Return the number of devices of each role.

    Colocated roles share their devices, so only the role with most ranks is listed.
    """
    judges = {
        name: engine.ranks
        for name, engine in config.engines.items()
        if name in config.judges
    }
    others = {name: role.num_ranks for name, role in config.model_roles.items()}
    for name, engine in config.engines.items():
        if name not in judges:
            others[name] = engine.ranks

    if config.shares_processes:
        largest = max(others, key=lambda name: others[name])
        others = {largest: others[largest]}
    # Judges have devices of their own.
    return others | judges


def _ranks_key(role: str, config: Config) -> str:
    """Return the key of the setting that determines a role's number of devices."""
    engine = config.engines.get(role)
    if engine is None:
        return f"{role}.num_ranks"
    return f"{engine.section}.num_replicas"


def _as_sum(ranks: Mapping[str, int]) -> str:
    """Return numbers per role as text: actor 2 + rollout 1."""
    return " + ".join(f"{name} {count}" for name, count in ranks.items())


def _cpu_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that need a GPU."""
    task = config.rollout_task
    if task is not None and task.rollout.sync.transport == "cuda_ipc":
        rule = "it joins processes on one GPU, and this machine has none"
        yield Problem("rollout.sync.transport", "cuda_ipc", rule, "Use auto.")

    if task is not None and task.placement.offload in ("all", "optimizer"):
        rule = "it frees GPUs, and this machine has none"
        yield Problem("placement.offload", task.placement.offload, rule, "Use auto.")

    for engine in config.engines.values():
        arguments = engine.config.vllm_args
        for name in sorted(arguments.keys() & VLLM_ARGS_FIXED_ON_A_CPU.keys()):
            key = f"{engine.section}.vllm_args.{name}"
            reason = VLLM_ARGS_FIXED_ON_A_CPU[name]
            rule = f"this argument may not change on a CPU: {reason}"
            yield Problem(key, arguments[name], rule, "Leave it out.")


def _gpu_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield settings that do not fit the GPUs of the machine."""
    task = config.rollout_task
    if task is not None and task.placement.kind == "colocated":
        parallel = task.rollout.tensor_parallel
        if parallel > 1:
            rule = (
                "with placement=colocated a rollout engine shares exactly one GPU with"
                " a trainer rank"
            )
            fix = (
                "Use placement=separate, or rollout.tensor_parallel=1 and"
                f" {parallel} times the rollout.num_replicas."
            )
            yield Problem("rollout.tensor_parallel", parallel, rule, fix)

    if machine.nodes > 1:
        yield from _node_problems(config, machine)

    ranks = _ranks(config)
    needed = sum(ranks.values())
    if needed > machine.total_gpus:
        largest = max(ranks, key=lambda name: ranks[name])
        rule = (
            f"the run needs {needed} GPUs ({_as_sum(ranks)}), and {machine.in_words}"
            f" has {machine.total_gpus}"
        )
        fix = (
            f"Lower it by {needed - machine.total_gpus}, choose placement=colocated, or"
            f" {_larger(machine)}."
        )
        yield Problem(_ranks_key(largest, config), ranks[largest], rule, fix)


def _node_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield engines that do not fit the nodes, since their ranks share one."""
    for engine in config.engines.values():
        parallel = engine.config.tensor_parallel
        replicas = engine.replicas
        most = machine.nodes * (machine.gpus // parallel)
        rule = f"the ranks of an engine share a node, which has {machine.gpus} GPUs"

        if parallel > machine.gpus:
            key = f"{engine.section}.tensor_parallel"
            yield Problem(key, parallel, rule, f"Use at most {machine.gpus}.")
        # Engines that need more GPUs than there are at all are told of elsewhere.
        elif most < replicas and engine.ranks <= machine.total_gpus:
            key = f"{engine.section}.num_replicas"
            rule += f": {machine.nodes} nodes hold {most} engines of {parallel} ranks"
            yield Problem(key, replicas, rule, f"Use at most {most}.")


def _larger(machine: Machine) -> str:
    """Return what to do about a machine that is too small, after "or"."""
    if machine.is_described:
        return "describe a larger machine"
    return "set ray.address to a cluster"


def _cpu_warnings(config: Config, machine: Machine) -> Iterator[str]:
    """Yield a warning if more threads compute than the machine has cores."""
    ranks = _ranks(config)
    # Cores are shared out so that each rank has at least one.
    threads = 1
    if isinstance(config.run.threads_per_rank, int):
        threads = config.run.threads_per_rank

    busy = sum(ranks.values()) * threads
    cores = machine.nodes * machine.cores
    if busy > cores:
        yield (
            f"{busy} threads compute at once ({_as_sum(ranks)}, {threads} per rank) on"
            f" {cores} cores: the run works, slower than with fewer ranks"
            " (num_ranks, rollout.num_replicas, run.threads_per_rank)"
        )


def _idle_ranks(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose mini-batches are too small for its ranks."""
    for role in batch_algebra(config).roles:
        rows = role.mini_batch_size
        if rows is None or rows >= role.dp_size:
            continue

        # Ranks that share rows are idle together.
        ranks_per_share = role.ranks // role.dp_size
        idle = (role.dp_size - rows) * ranks_per_share
        yield (
            f"{role.role}.num_ranks={role.ranks} share mini-batches of {rows} rows:"
            f" {idle} ranks have nothing to do in each update"
        )


# ------------------------------------------------------------------------------- memory


def _memory_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield memory that the machine certainly lacks.

    Processes, weights, optimizer and caches are counted, activations are not.
    """
    yield from _shared_memory_problems(config, machine)

    plan = memory_plan(config, on_gpus=machine.gpus > 0)
    yield from device_memory_problems(plan, config, machine)
    yield from _host_memory_problems(plan, config, machine)


def _shared_memory_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield a problem if /dev/shm is too small."""
    needed = _shared_memory_bytes(config, machine.nodes)
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


def _shared_memory_bytes(config: Config, nodes: int) -> int:
    """Return a node's shared memory, which its rows and the weights travel through.

    The rows of a step are shared out over the nodes.
    """
    sizes = batch_algebra(config)
    rows = sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW
    object_store = max(rows // nodes, OBJECT_STORE_FLOOR_BYTES)
    if config.rollout_task is None:
        return object_store
    return object_store + wire_bytes(config.rollout_task)


def _host_memory_problems(
    plan: MemoryPlan, config: Config, machine: Machine
) -> Iterator[Problem]:
    """Yield a problem if the machine has too little memory, with what takes most."""
    phase, needed = plan.fullest(on_device=False, certain=True)
    # The fullest of equal nodes holds at least its share.
    memory_bytes = machine.nodes * machine.memory_bytes
    if needed <= memory_bytes:
        return

    at_least = f"at least {needed / GIB:.1f} GiB"
    available = f"{machine.in_words.capitalize()} has {memory_bytes / GIB:.1f} GiB"

    # Fewer processes help if these take more than half of the memory by themselves.
    if 2 * sum(group.nbytes for group in plan.processes) > needed:
        most = max(plan.processes, key=lambda group: group.nbytes)
        kinds = Counter[str]()
        for group in plan.processes:
            kinds[group.kind] += group.ranks
        rule = (
            f"{kinds.total()} processes ({_as_sum(kinds)}) and what they hold take"
            f" {at_least}"
        )
        fix = f"{available}: use fewer, or {_larger(machine)}."
        yield Problem(most.key, most.value, rule, fix)
        return

    if machine.gpus:
        # Offloaded weights and optimizer state.
        rule = f"what models keep on the host ({phase}) and processes take {at_least}"
        fix = f"{available}: take a smaller model, or placement=separate."
    else:
        rule = (
            f"processes, weights, optimizer and caches take {at_least} before any"
            " activation"
        )
        fix = f"{available}: take a smaller model or rollout.kv_cache_gib."
    yield Problem("model.path", config.model.path, rule, fix)


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
