"""The settings that a plan chooses among, as complete configurations, and which fit.

Invariant: the backends of every candidate can compute and share out its models. Sizes
are powers of two; on more than eight GPUs every other of them is tried where there are
many. Whether all of a candidate fits is what the memory plan says; a part of each
device and host stays free (`USED_SHARE`), since activations are estimates.

Not tried: Megatron-FSDP, whose figures here would be those of FSDP2; virtual stages;
experts cut by tensor parallelism; gathering ahead; activations on the host; and
different settings for actor, critic and reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_ray.backends.base import BackendSettings, ModelFacts
from verl_ray.backends.engine import EngineBackend
from verl_ray.backends.fsdp import FsdpBackend
from verl_ray.backends.layouts import ModelSizes, can_exchange, obstacles
from verl_ray.backends.megatron import MegatronBackend, sizes_of
from verl_ray.config.rollout_task import Offloaded
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.assumptions import Links
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import (
    MICRO_BATCH_TOKENS,
    USED_SHARE,
    MemoryPlan,
    cache_bounds_gib,
    growing_roles,
    memory_plan,
    with_larger_batches,
    with_largest_batches,
    with_largest_caches,
)
from verl_ray.preflight.model_files import settings_of
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.role_memory import ROLLOUT, Phase
from verl_ray.preflight.step_time import step_time

PLANNED_BACKENDS = ("engine", "fsdp", "megatron")
"""The backends that a plan may propose."""

OFFLOADS: tuple[Offloaded, ...] = ("none", "optimizer", "all")
"""Ways to free shared GPUs, the fastest first."""

_MOST_MODEL_RANKS = 64
"""Ranks of the largest copy of a model that pipelines and tensor parallelism make."""

_BATCHES = (1, 2, 4, 8)
"""Sizes of micro-batches, in rows of the greatest length."""

_SMALL = 8
"""GPUs up to which all sizes are tried."""


@dataclass(frozen=True)
class Space:
    """A machine, and the configurations that candidates begin with.

    Attributes:
        machine: Described machine with GPUs.
        links: The links of its GPUs.
        colocated: Resolved configuration with placement=colocated, by its backend.
        separate: The same with placement=separate.
        models: The model of each role, by name.
    """

    machine: Machine
    links: Links
    colocated: Mapping[str, RLConfig]
    separate: Mapping[str, RLConfig]
    models: Mapping[str, ModelFacts]

    @staticmethod
    def of(bases: Mapping[str, RLConfig], machine: Machine) -> Space:
        """Return the space of a machine.

        Args:
            bases: Composed configuration by the backend of all of its roles.
            machine: Described machine with GPUs.
        """
        any_base = next(iter(bases.values()))
        return Space(
            machine,
            Links.of(machine),
            {kind: _on(machine, base, "colocated") for kind, base in bases.items()},
            {kind: _on(machine, base, "separate") for kind, base in bases.items()},
            {name: _model_facts(name, any_base) for name in any_base.model_roles},
        )

    def is_possible(self, config: RLConfig) -> bool:
        """Return whether backends can share out and compute the models of a run."""
        for name, role in config.model_roles.items():
            backend = role.backend
            if any(backend.rank_problems(name, role.num_ranks)):
                return False
            model = self.models[name]
            if any(backend.model_problems(name, role.num_ranks, model)):
                return False
        return True


def _model_facts(role: str, config: RLConfig) -> ModelFacts:
    path = config.model_roles[role].model.folder
    return ModelFacts(
        path=path,
        settings=settings_of(path, config),
        tensors={},
        has_value_head=config.head_of(role) == "value",
    )


def _on(machine: Machine, base: RLConfig, placement: str) -> RLConfig:
    """Return the configuration as it is resolved on a machine.

    What follows from the memory of its GPUs is for candidates to choose.
    """
    update = {"kind": placement, "offload": "auto"}
    placed = base.placement.model_copy(update=update)
    config = base.model_copy(update={"placement": placed})
    facts = replace(facts_here(config, machine), gpu_memory_bytes=None)
    resolved = resolve(config, facts)
    rollout = resolved.rollout.model_copy(update={"dtype": "bfloat16"})
    return resolved.model_copy(update={"rollout": rollout})


def candidates(space: Space, *, frugal: bool = False) -> Iterator[RLConfig]:
    """Yield candidates for a machine.

    Their key-value caches, and what they offload, are still to be chosen.

    Args:
        space: The machine, and where candidates begin.
        frugal: Whether to yield those alone that need least memory of their kind.
    """
    yield from _colocated(space, frugal=frugal)
    yield from _separate(space, frugal=frugal)


# --------------------------------------------------------------------------- placements


def _colocated(space: Space, *, frugal: bool) -> Iterator[RLConfig]:
    """Yield candidates in which all roles share GPUs, an engine on each."""
    total = space.machine.total_gpus
    counts = [total] if frugal else _halves(total)
    if total > _SMALL:
        counts = counts[:2]
    for base in space.colocated.values():
        for ranks in counts:
            engines = with_engines(base, ranks, 1)
            sized = with_ranks(engines, {"actor": ranks})
            for backend in _backends(space, sized, frugal=frugal):
                config = with_backend(sized, backend)
                if space.is_possible(config):
                    yield config


def offloaded(config: RLConfig, offload: Offloaded) -> RLConfig:
    """Return the configuration with state that leaves shared GPUs."""
    placement = config.placement.model_copy(update={"offload": offload})
    return config.model_copy(update={"placement": placement})


def _separate(space: Space, *, frugal: bool) -> Iterator[RLConfig]:
    """Yield candidates in which every role has GPUs of its own."""
    machine = space.machine
    total = machine.total_gpus
    for base in space.separate.values():
        for ranks in _splits(base, machine):
            used = sum(ranks[name] for name in base.model_roles)
            sized = with_ranks(base, ranks)
            legal = [
                backend
                for backend in _backends(space, sized, frugal=frugal)
                if space.is_possible(with_backend(sized, backend))
            ]
            engines = _best_engines(space, sized, total=total - used, frugal=frugal)
            if engines is not None:
                for backend in legal:
                    yield with_backend(engines, backend)


def _best_engines(
    space: Space, config: RLConfig, *, total: int, frugal: bool
) -> RLConfig | None:
    """Return the configuration with the fastest engines; None if none fit.

    Engines with GPUs of their own need nothing of the trainers.

    Args:
        space: The machine.
        config: Configuration with the ranks of the trainers.
        total: Number of GPUs of all engines together.
        frugal: Whether to return the widest engines, fit or not.
    """
    widths = [size for size in _engine_widths(space) if size <= total]
    if frugal:
        return with_engines(config, total // widths[-1], widths[-1])

    best: RLConfig | None = None
    best_s = float("inf")
    for width in widths:
        # An engine without a row would be idle.
        engines = with_engines(config, min(total // width, config.rows_per_step), width)
        cached = with_largest_cache(engines, space.machine)
        if cached is None:
            continue
        seconds = step_time(cached, space.links).total_s
        if seconds < best_s:
            best, best_s = cached, seconds
    return best


def _splits(base: RLConfig, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield numbers of ranks of the trainers that leave some GPUs for the engines."""
    total = machine.total_gpus
    unit = 1
    if total > _SMALL:
        # On a few nodes a role gets half a node or more, on many whole nodes.
        unit = machine.gpus if machine.nodes > 4 else max(1, machine.gpus // 2)
    counts: Sequence[int] = range(1, total // unit)
    if total > _SMALL:
        powers = _powers(total // unit)
        counts = sorted({size for power in powers for size in (power, 3 * power // 2)})
    sizes = [unit * count for count in counts]

    for actor in sizes:
        references = [actor, actor // 2, actor // 4] if base.has_reference else [actor]
        for reference in dict.fromkeys(references):
            ranks = {"actor": actor, "reference": reference}
            used = actor + (actor if base.has_critic else 0)
            used += reference if base.has_reference else 0
            if reference and used < total:
                yield ranks | {"critic": actor}


def _engine_widths(space: Space) -> list[int]:
    """Return the numbers of ranks that an engine may have: on one node, whole heads."""
    settings = space.models["actor"].settings
    heads = settings.get("num_attention_heads")
    key_heads = settings.get("num_key_value_heads") or heads
    assert isinstance(heads, int), "a model without sizes is refused before"
    assert isinstance(key_heads, int), "transformers reads it as a number"
    sizes = _powers(space.machine.gpus)
    return [size for size in sizes if can_exchange(heads, key_heads, size)]


# ----------------------------------------------------------------------------- backends


def _backends(
    space: Space, config: RLConfig, *, frugal: bool
) -> Iterator[BackendSettings]:
    """Yield the settings of a backend for the ranks of an actor."""
    base = config.actor.backend.model_copy(update={"dtype": "bfloat16"})
    ranks = config.actor.num_ranks
    layouts: Iterator[BackendSettings]
    if isinstance(base, FsdpBackend):
        layouts = _fsdp(base, ranks, space.machine, frugal=frugal)
    elif isinstance(base, MegatronBackend):
        sizes = sizes_of(space.models["actor"].settings)
        layouts = _megatron(base, ranks, space.machine, sizes, frugal=frugal)
    else:
        assert isinstance(base, EngineBackend), f"no plan knows backend={base.kind}"
        layouts = _checkpointed(base, frugal=frugal)

    for layout in layouts:
        for tokens in _micro_batches(layout, config, ranks, frugal=frugal):
            yield layout.model_copy(update={"micro_batch_tokens_per_rank": tokens})


def _micro_batches(
    layout: BackendSettings, config: RLConfig, ranks: int, *, frugal: bool
) -> Iterator[int]:
    """Yield tokens of a micro-batch: rows of the greatest length, up to all rows."""
    longest, _ = config.longest_row
    row = -(-longest // layout.token_slices)
    rows_per_rank = -(-config.rows_per_step // max(1, ranks // layout.peers))
    batches = _BATCHES[:1] if frugal else _BATCHES
    for rows in batches:
        if rows < 2 * rows_per_rank:
            yield rows * row


def _checkpointed(base: BackendSettings, *, frugal: bool) -> Iterator[BackendSettings]:
    for recomputes in (True,) if frugal else (False, True):
        yield base.model_copy(update={"activation_checkpointing": recomputes})


def _fsdp(
    base: FsdpBackend, ranks: int, machine: Machine, *, frugal: bool
) -> Iterator[BackendSettings]:
    """Yield ways to share a model out with FSDP2."""
    shardings: list[dict[str, object]] = [{"sharding": "full"}]
    if not frugal:
        shardings += [{"sharding": name} for name in ("grad_op", "none")]
        # Groups within a node, or of a few nodes.
        unit = machine.gpus if machine.nodes > 1 else 2
        groups = [unit * size for size in (1, 2, 4)]
        shardings += [
            {"sharding": "hybrid", "shard_size": size}
            for size in groups
            if size < ranks
        ]
    shardings.append({"sharding": "full", "host_parameters": True})

    accumulates = ("sharded",) if frugal else ("whole", "sharded")
    slices = [size for size in _powers(machine.gpus) if ranks % size == 0]
    slices = _every_other(slices, ranks)
    for sharding, accumulate, size in itertools.product(shardings, accumulates, slices):
        update = {**sharding, "accumulate": accumulate, "sequence_parallel": size}
        yield from _checkpointed(base.model_copy(update=update), frugal=frugal)


def _megatron(
    base: MegatronBackend,
    ranks: int,
    machine: Machine,
    sizes: ModelSizes | None,
    *,
    frugal: bool,
) -> Iterator[BackendSettings]:
    """Yield ways to share a model out with megatron-core."""
    if sizes is None:
        return
    in_node = _powers(machine.gpus)
    stages = [size for size in _powers(ranks) if sizes.layers % size == 0]
    experts = [1]
    if sizes.experts:
        experts = [size for size in _powers(ranks) if sizes.experts % size == 0]

    experts = _every_other(experts, ranks)
    contexts = _every_other(in_node, ranks)
    recomputes = ("full",) if frugal else ("none", "full")
    for tensor, pipeline, context in itertools.product(in_node, stages, contexts):
        peers = tensor * pipeline * context
        if ranks % peers or peers > _MOST_MODEL_RANKS:
            continue
        for expert, recompute in itertools.product(experts, recomputes):
            # All copies of a stage together have this many ranks.
            if (ranks // pipeline) % expert or expert > _MOST_MODEL_RANKS:
                continue
            update = {
                "tensor_parallel": tensor,
                "sequence_parallel": tensor > 1,
                "pipeline_parallel": pipeline,
                "context_parallel": context,
                "expert_parallel": expert,
                "recompute": recompute,
            }
            layout = base.model_copy(update=update)
            if not any(obstacles(layout, ranks, sizes)):
                yield layout


# ------------------------------------------------------------------------------- values


def with_ranks(config: RLConfig, ranks: Mapping[str, int]) -> RLConfig:
    """Return the configuration with numbers of ranks of actor, critic and reference.

    Roles that are absent have those of the actor.
    """
    update = {
        name: getattr(config, name).model_copy(
            update={"num_ranks": ranks.get(name, ranks["actor"])}
        )
        for name in ("actor", "critic", "reference")
    }
    return config.model_copy(update=update)


def with_engines(config: RLConfig, replicas: int, tensor: int) -> RLConfig:
    """Return the configuration with a number of engines, and of ranks of each."""
    sizes = {"num_replicas": replicas, "tensor_parallel": tensor}
    rollout = config.rollout.model_copy(update=sizes)
    return config.model_copy(update={"rollout": rollout})


def with_backend(config: RLConfig, backend: BackendSettings) -> RLConfig:
    """Return the configuration with one backend for actor, critic and reference."""
    roles = {
        name: getattr(config, name).model_copy(update={"backend": backend})
        for name in ("actor", "critic", "reference")
    }
    return config.model_copy(update=roles)


def _halves(number: int) -> list[int]:
    """Return a number, its half and so on, as long as they are whole."""
    halves = [number]
    while halves[-1] % 2 == 0:
        halves.append(halves[-1] // 2)
    return halves


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _every_other(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return all sizes for few ranks, and every other one for many."""
    return list(sizes) if ranks <= _SMALL else list(sizes[::2])


# ------------------------------------------------------------------------------- memory


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
