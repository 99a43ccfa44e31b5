"""What a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem; what works, slowly, is a warning. Deliberately not here: the
resources of a cluster, which the cluster is asked for when the run starts, and what memory is needed for
(`memory_plan.py`).
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.rules.rollout import VLLM_ARGS_FIXED_ON_A_CPU
from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.paths import nearest_existing
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.memory_plan import memory_plan, model_size, wire_bytes

BYTES_PER_SAVED_PARAMETER = 12
"""float32 weight and the two moments of AdamW."""

BYTES_PER_TOKEN_OF_A_ROW = 32
"""Token, mask, and the log-probs, values, advantages and returns that a step adds."""

OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Ray refuses to start with much less."""

LOG_ROOM_BYTES = 256 * MIB
"""Logs, samples and metrics of one run."""


def resource_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """What would stop the run, whose configuration is resolved: a disk that is too small, and what `machine` lacks,
    unless it is None."""
    yield from _disk_problems(config)
    if machine is not None:
        yield from _memory_problems(config, machine)
        yield from _gpu_problems(config, machine) if machine.gpus else _cpu_problems(config)


def resource_warnings(config: Config, machine: Machine | None) -> Iterator[str]:
    """What would only slow it."""
    yield from _idle_ranks(config)
    if machine is not None and not machine.gpus:
        yield from _cpu_warnings(config, machine)


def _ranks(config: Config) -> dict[str, int]:
    """Devices that each role keeps for itself: colocated roles count once, as the most that one of them has."""
    roles = {name: role.num_ranks for name, role in config.model_roles.items()}
    apart = {name: one.ranks for name, one in config.engines.items() if name in config.judges}
    roles |= {name: one.ranks for name, one in config.engines.items() if name not in apart}
    if config.shares_processes:
        largest = max(roles, key=lambda name: roles[name])
        return {largest: roles[largest]} | apart
    return roles | apart


def _ranks_key(role: str, config: Config) -> str:
    """The key that says how many ranks or replicas a role has."""
    engine = config.engines.get(role)
    return f"{role}.num_ranks" if engine is None else f"{engine.section}.num_replicas"


def _cpu_problems(config: Config) -> Iterator[Problem]:
    drawing = config.drawing
    if drawing is not None and drawing.rollout.sync.transport == "cuda_ipc":
        rule = "it joins processes on one GPU, and this machine has none"
        yield Problem("rollout.sync.transport", "cuda_ipc", rule, "Use auto.")
    if drawing is not None and drawing.placement.offload in ("all", "optimizer"):
        rule = "it frees GPUs, and this machine has none"
        yield Problem("placement.offload", drawing.placement.offload, rule, "Use auto.")
    for engine in config.engines.values():
        arguments = engine.config.vllm_args
        for name in sorted(arguments.keys() & VLLM_ARGS_FIXED_ON_A_CPU.keys()):
            rule = f"this argument may not change on a CPU: {VLLM_ARGS_FIXED_ON_A_CPU[name]}"
            yield Problem(f"{engine.section}.vllm_args.{name}", arguments[name], rule, "Leave it out.")


def _gpu_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    drawing = config.drawing
    if drawing is not None and drawing.placement.kind == "colocated" and drawing.rollout.tensor_parallel > 1:
        parallel = drawing.rollout.tensor_parallel
        rule = "with placement=colocated a rollout engine shares exactly one GPU with a trainer rank"
        fix = f"Use placement=separate, or rollout.tensor_parallel=1 and {parallel} times the rollout.num_replicas."
        yield Problem("rollout.tensor_parallel", parallel, rule, fix)
    ranks = _ranks(config)
    needed = sum(ranks.values())
    if needed > machine.gpus:
        largest = max(ranks, key=lambda name: ranks[name])
        key = _ranks_key(largest, config)
        split = " + ".join(f"{name} {count}" for name, count in ranks.items())
        rule = f"the run needs {needed} GPUs ({split}), and this machine has {machine.gpus}"
        fix = f"Lower it by {needed - machine.gpus}, choose placement=colocated, or set ray.address to a cluster."
        yield Problem(key, ranks[largest], rule, fix)


def _cpu_warnings(config: Config, machine: Machine) -> Iterator[str]:
    ranks = _ranks(config)
    given = config.run.threads_per_rank
    threads = given if isinstance(given, int) else 1  # cores are shared out so that each rank has one at least
    busy = sum(ranks.values()) * threads
    if busy > machine.cores:
        split = " + ".join(f"{name} {count}" for name, count in ranks.items())
        yield (
            f"{busy} threads compute at once ({split}, {threads} per rank) on {machine.cores} cores: "
            "the run works, slower than with fewer ranks (num_ranks, rollout.num_replicas, run.threads_per_rank)"
        )


def _idle_ranks(config: Config) -> Iterator[str]:
    for role in batch_algebra(config).roles:
        if role.mini_batch_size is not None and role.mini_batch_size < role.shares:
            idle = (role.shares - role.mini_batch_size) * (role.ranks // role.shares)
            yield (
                f"{role.role}.num_ranks={role.ranks} share mini-batches of {role.mini_batch_size} rows: "
                f"{idle} ranks have nothing to do in each update"
            )


def _memory_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """What certainly does not fit: processes, weights, optimizer and caches, without activations."""
    shared = _shared_memory_bytes(config)
    if shared > machine.shm_free_bytes:
        yield Problem(
            "/dev/shm",
            f"{machine.shm_free_bytes / MIB:.0f} MiB free",
            f"rows and weights travel through shared memory, about {shared / MIB:.0f} MiB of it",
            f"Start the container with --shm-size={math.ceil(shared / GIB) + 1}g, or remount /dev/shm larger.",
        )
    found = memory_plan(config, on_gpus=machine.gpus > 0)
    phase, needed = found.fullest(on_device=True, certain=True)
    if machine.gpu_memory_bytes is not None and needed > machine.gpu_memory_bytes:
        rule = f"weights, optimizer and caches take at least {needed / GIB:.1f} GiB of a GPU ({phase})"
        has = f"These have {machine.gpu_memory_bytes / GIB:.1f} GiB"
        fix = f"{has}: share the model out over more ranks, lower rollout.kv_cache_gib, or take a smaller model."
        yield Problem("model.path", config.model.path, rule, fix)
    phase, needed = found.fullest(on_device=False, certain=True)
    if needed <= machine.memory_bytes:
        return
    has = f"This machine has {machine.memory_bytes / GIB:.1f} GiB"
    if 2 * sum(one.nbytes for one in found.processes) > needed:
        most = max(found.processes, key=lambda one: one.nbytes)
        kinds = Counter[str]()
        for one in found.processes:
            kinds[one.kind] += one.ranks
        split = " + ".join(f"{kind} {count}" for kind, count in kinds.items())
        rule = f"{kinds.total()} processes ({split}) and what they hold take at least {needed / GIB:.1f} GiB"
        yield Problem(most.key, most.value, rule, f"{has}: use fewer, or set ray.address to a cluster.")
    elif machine.gpus:
        rule = f"what models keep on the host ({phase}) and processes take at least {needed / GIB:.1f} GiB"
        yield Problem("model.path", config.model.path, rule, f"{has}: take a smaller model, or placement=separate.")
    else:
        rule = f"processes, weights, optimizer and caches take at least {needed / GIB:.1f} GiB before any activation"
        yield Problem("model.path", config.model.path, rule, f"{has}: take a smaller model or rollout.kv_cache_gib.")


def _shared_memory_bytes(config: Config) -> int:
    sizes = batch_algebra(config)
    rows = max(sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW, OBJECT_STORE_FLOOR_BYTES)
    return rows if config.drawing is None else rows + wire_bytes(config.drawing)


def _disk_problems(config: Config) -> Iterator[Problem]:
    free = shutil.disk_usage(nearest_existing(config.run.dir)).free
    roles = config.model_roles.items()
    learned = sum(trained_parameters(role, model_size(name, role, config)) for name, role in roles)
    checkpoint = learned * BYTES_PER_SAVED_PARAMETER
    # One more than are kept: the oldest goes only when the newest is whole.
    needed = LOG_ROOM_BYTES + (checkpoint * (config.run.keep_checkpoints + 1) if config.run.checkpoint_every else 0)
    if needed > free:
        yield Problem(
            "run.dir",
            config.run.dir,
            f"the run writes up to {needed / GIB:.1f} GiB there, and {free / GIB:.1f} GiB are free",
            "Free some, choose another run.dir, or lower run.keep_checkpoints.",
        )
