"""What a run needs of a machine: devices, memory, shared memory, disk.

Invariant: only what certainly does not fit is a problem; what works, slowly, is a warning. Deliberately not here: the
resources of a cluster, which the cluster is asked for when the run starts.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from controllers.machine import GIB, MIB, Machine
from controllers.model_directories import MADE_VOCABULARY, Engine, engines, parameter_count
from controllers.paths import nearest_existing
from verl_ray.config.algebra import batch_algebra
from verl_ray.config.backends import FsdpBackend, MegatronBackend, MegatronFsdpBackend
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.reward import FunctionReward, HttpReward
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rules.rollout import VLLM_ARGS_FIXED_ON_A_CPU
from verl_ray.config.schema import Config, RLConfig
from verl_ray.errors import Problem

PROCESS_BYTES = {
    "trainer": int(0.3 * GIB),
    "rollout": int(0.45 * GIB),
    "judge": int(0.45 * GIB),
    "reward": int(0.25 * GIB),
}
"""Memory of a process alone (unique set size) but for its model: in runs of a model of 0.1 million parameters on a CPU
it was 303, 504 and 279 MiB, of 458, 665 and 418 MiB resident; rounded down."""

BYTES_PER_TRAINED_PARAMETER = 16
"""float32 weight, gradient and the two moments of AdamW."""

BYTES_PER_SAVED_PARAMETER = 12
"""float32 weight and the two moments of AdamW."""

BYTES_PER_TOKEN_OF_A_ROW = 32
"""Token, mask, and the log-probs, values, advantages and returns that a step adds."""

OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Ray refuses to start with much less."""

LOG_ROOM_BYTES = 256 * MIB
"""Logs, samples and metrics of one run."""

WIRE_BUCKET_BYTES = 256 << 20
"""Of the weights that travel to the rollout engine at once: a bucket's calls cost little beside its copy, and it is
small beside any model. A single larger tensor takes more."""


def resource_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """What would stop the run: a disk that is too small, and what `machine` lacks, unless it is None."""
    yield from _disk_problems(config)
    if machine is not None:
        yield from _memory_problems(config, machine)
        yield from _gpu_problems(config, machine) if machine.gpus else _vllm_problems(config)


def resource_warnings(config: Config, machine: Machine | None) -> Iterator[str]:
    """What would only slow it."""
    yield from _idle_ranks(config)
    if machine is not None and not machine.gpus:
        yield from _cpu_warnings(config, machine)


def _ranks(config: Config) -> dict[str, int]:
    """Devices that each role keeps for itself: colocated roles count once, as the most that one of them has."""
    roles = {name: role.num_ranks for name, role in config.model_roles.items()}
    if isinstance(config, RLConfig):
        roles["rollout"] = config.rollout.num_replicas * config.rollout.tensor_parallel
        apart = {name: one.engine.num_replicas * one.engine.tensor_parallel for name, one in config.judges.items()}
        if config.placement.kind == "colocated":
            largest = max(roles, key=lambda name: roles[name])
            return {largest: roles[largest]} | apart
        return roles | apart
    return roles


def _ranks_key(role: str, config: Config) -> str:
    """The key that says how many ranks or replicas a role has."""
    if role == "rollout":
        return "rollout.num_replicas"
    judges = config.judges if isinstance(config, RLConfig) else {}
    return f"{role}.engine.num_replicas" if role in judges else f"{role}.num_ranks"


def _vllm_problems(config: Config) -> Iterator[Problem]:
    for section, engine in engines(config).items():
        arguments = engine.config.vllm_args
        for name in sorted(arguments.keys() & VLLM_ARGS_FIXED_ON_A_CPU.keys()):
            rule = f"this argument may not change on a CPU: {VLLM_ARGS_FIXED_ON_A_CPU[name]}"
            yield Problem(f"{section}.vllm_args.{name}", arguments[name], rule, "Leave it out.")


def _gpu_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    if isinstance(config, RLConfig) and config.placement.kind == "colocated" and config.rollout.tensor_parallel > 1:
        parallel = config.rollout.tensor_parallel
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
    threads = 1 if config.run.threads_per_rank == "auto" else config.run.threads_per_rank
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
    if machine.gpus:
        return
    processes = _processes(config)
    idle = sum(one.nbytes for one in processes)
    needed = idle + sum(_host_bytes(role, config) for role in config.model_roles.values())
    needed += sum(_engine_bytes(engine, config) for engine in engines(config).values())
    if needed <= machine.memory_bytes:
        return
    has = f"This machine has {machine.memory_bytes / GIB:.1f} GiB"
    if 2 * idle > needed:
        most = max(processes, key=lambda one: one.nbytes)
        kinds = Counter[str]()
        for one in processes:
            kinds[one.kind] += one.count
        split = " + ".join(f"{kind} {count}" for kind, count in kinds.items())
        rule = f"{kinds.total()} processes ({split}) and what they hold take at least {needed / GIB:.1f} GiB"
        yield Problem(most.key, most.value, rule, f"{has}: use fewer, or set ray.address to a cluster.")
    else:
        rule = f"processes, weights, optimizer and caches take at least {needed / GIB:.1f} GiB before any activation"
        yield Problem("model.path", config.model.path, rule, f"{has}: take a smaller model or rollout.kv_cache_gib.")


@dataclass(frozen=True)
class _Processes:
    """Processes of one kind, and the key that says how many."""

    kind: str
    key: str
    value: int
    each: int = 1
    """Processes per one of them."""

    @property
    def count(self) -> int:
        return self.value * self.each

    @property
    def nbytes(self) -> int:
        return self.count * PROCESS_BYTES[self.kind]


def _processes(config: Config) -> list[_Processes]:
    """All of a run; colocated roles on one backend share theirs."""
    colocated = isinstance(config, RLConfig) and config.placement.kind == "colocated"
    homes: dict[str, _Processes] = {}
    for name, role in config.model_roles.items():
        home = role.backend.kind if colocated else name
        homes.setdefault(home, _Processes("trainer", f"{name}.num_ranks", role.num_ranks))
    found = list(homes.values())
    for section, engine in engines(config).items():
        kind, replicas = ("rollout" if section == "rollout" else "judge"), engine.config.num_replicas
        found.append(_Processes(kind, f"{section}.num_replicas", replicas, engine.config.tensor_parallel))
    if isinstance(config, RLConfig):
        for name, one in config.graders.items():
            if isinstance(one, FunctionReward | HttpReward):
                found.append(_Processes("reward", f"{name}.num_ranks", one.num_ranks))
    return found


def _host_bytes(role: ModelRole, config: Config) -> int:
    """Weights and training state of a role on all ranks: whole on each of them, or one copy in shards."""
    if isinstance(role.backend, MegatronBackend):
        return _megatron_bytes(role, role.backend, config)
    if isinstance(role.backend, MegatronFsdpBackend):
        return _megatron_fsdp_bytes(role, role.backend, config)
    copies = role.num_ranks
    if isinstance(role.backend, FsdpBackend) and role.backend.sharding != "none":
        copies //= role.backend.shard_size or role.num_ranks
    width = BYTES_PER_TRAINED_PARAMETER if _trains_everything(role) else 4
    return _parameters(role.model.path, config) * width * copies


def _megatron_bytes(role: ModelRole, backend: MegatronBackend, config: Config) -> int:
    """Every copy of the model has weights and gradients; what the optimizer steps, all copies share out. Experts may
    have other copies than the rest."""
    whole, experts = _parameters(role.model.path, config), parameter_count(role.model.path, of_experts=True)
    held = (whole - experts) * (role.num_ranks // (backend.tensor_parallel * backend.pipeline_parallel))
    shared_by = backend.expert_tensor_parallel * backend.expert_parallel * backend.pipeline_parallel
    held += experts * (role.num_ranks // shared_by)
    width = _weight_width(role)
    if not _trains_everything(role):
        return held * width
    stepped = BYTES_PER_SAVED_PARAMETER - (4 if width == 4 else 0)  # in float32 the weights that compute are stepped
    return held * (width + 4) + whole * stepped


def _megatron_fsdp_bytes(role: ModelRole, backend: MegatronFsdpBackend, config: Config) -> int:
    """By what the ranks of a group share out, without what is gathered for a moment."""
    groups = role.num_ranks // (backend.shard_size or role.num_ranks)

    def copies(*shared: str) -> int:
        return groups if backend.sharding in shared else role.num_ranks

    weights = 4 * copies("all")
    if _trains_everything(role):
        weights += 4 * copies("optimizer_gradients", "all") + 8 * copies("optimizer", "optimizer_gradients", "all")
    return _parameters(role.model.path, config) * weights


def _weight_width(role: ModelRole) -> int:
    """Bytes of a weight as a role's backend holds it: only megatron has others than it steps."""
    return 2 if isinstance(role.backend, MegatronBackend) and role.backend.dtype == "bfloat16" else 4


def _trains_everything(role: ModelRole) -> bool:
    """Else it is frozen, but for an adapter that is small beside it."""
    return isinstance(role, SupervisedRole) and not role.lora.rank


def _engine_bytes(engine: Engine, config: Config) -> int:
    """Weights, split over the ranks of a replica, and the key-value cache of every rank."""
    width, replicas = (4 if engine.config.dtype == "float32" else 2), engine.config.num_replicas
    cache = engine.config.kv_cache_gib * GIB * replicas * engine.config.tensor_parallel
    return _parameters(engine.path, config) * width * replicas + int(cache)


def _parameters(path: str, config: Config) -> int:
    """Of the model that is there, or else of the one that the run will make."""
    found = parameter_count(path)
    if found or not isinstance(config, RLConfig) or config.prepare is None or path != config.model.path:
        return found
    return tiny_parameter_count(config.prepare.model)


def tiny_parameter_count(model: TinyModelConfig) -> int:
    """Parameters of the model that `verl_ray.models.tiny` makes for arithmetic (Qwen3: norms on queries and keys)."""
    hidden, size = model.hidden_size, model.head_size
    attention = 2 * hidden * size * (model.num_heads + model.num_kv_heads) + 2 * size
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    return MADE_VOCABULARY * hidden * (1 if model.tie_embeddings else 2) + model.num_layers * layer + hidden


def _shared_memory_bytes(config: Config) -> int:
    sizes = batch_algebra(config)
    rows = max(sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW, OBJECT_STORE_FLOOR_BYTES)
    if not isinstance(config, RLConfig):
        return rows
    # The wire has two slots of a bucket each; weights travel as the trainer holds them.
    weights = _weight_width(config.actor) * _parameters(config.actor.model.path, config)
    return rows + 2 * min(weights, WIRE_BUCKET_BYTES)


def _disk_problems(config: Config) -> Iterator[Problem]:
    free = shutil.disk_usage(nearest_existing(config.run.dir)).free
    trained = [role for role in config.model_roles.values() if _trains_everything(role)]
    checkpoint = sum(_parameters(role.model.path, config) for role in trained) * BYTES_PER_SAVED_PARAMETER
    # One more than are kept: the oldest goes only when the newest is whole.
    needed = LOG_ROOM_BYTES + (checkpoint * (config.run.keep_checkpoints + 1) if config.run.checkpoint_every else 0)
    if needed > free:
        yield Problem(
            "run.dir",
            config.run.dir,
            f"the run writes up to {needed / GIB:.1f} GiB there, and {free / GIB:.1f} GiB are free",
            "Free some, choose another run.dir, or lower run.keep_checkpoints.",
        )
