"""The memory plan: predicted memory of a run's devices and hosts, before it starts.

Invariant: a pure function of the configuration, the models' directories and the kind of
machine. Figures that are marked as certain are lower bounds, so a machine with less
memory cannot hold the run. All other figures are estimates. Caches, then micro-batches
of some roles, grow into memory that nothing else needs, and no further than is of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from verl_ray.backends.base import BytesPerPart
from verl_ray.config.load import with_changes
from verl_ray.config.rollout import ServedModel
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, row_tokens_per_rank
from verl_ray.preflight.footprints import CERTAIN
from verl_ray.preflight.ladder import MICRO_BATCH_TOKENS
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.model_directories import row_cache_bytes
from verl_ray.preflight.model_files import settings_of
from verl_ray.preflight.role_memory import (
    ROLLOUT,
    Phase,
    RoleMemory,
    memory_by_role,
    phases_of,
)
from verl_ray.settings.section import resolved

ProcessKind = Literal["trainer", "rollout", "judge", "reward"]

PROCESS_BYTES: Mapping[ProcessKind, int] = {
    "trainer": int(0.3 * GIB),
    "rollout": int(0.45 * GIB),
    "judge": int(0.45 * GIB),
    "reward": int(0.25 * GIB),
}
"""Memory of a process alone (unique set size), without its model.

It was 303, 504 and 279 MiB in runs of a model of 0.1 million parameters on a CPU, and
is rounded down.
"""

RESIDENT_BYTES: Mapping[ProcessKind, int] = {
    "trainer": 460 * MIB,
    "rollout": 670 * MIB,
    "judge": 670 * MIB,
    "reward": 420 * MIB,
}
"""Memory of a process, including the libraries that processes share.

It was 458, 665 and 418 MiB in the same runs.
"""

NODE_BYTES = 820 * MIB
"""Memory of a node besides the processes of the roles: the driver, Ray's own processes,
libraries that processes share, and the least object store that Ray accepts.

In a run on a CPU these were 365, 345 and 36 MiB (proportional set sizes), and Ray
refuses a store of less than 75 MiB. Their sum is rounded down.
"""

CONTEXT_BYTES = GIB // 2
"""Memory of a device that CUDA and its libraries take for every process on it."""


@dataclass(frozen=True)
class PlannedProcesses:
    """Processes of one kind, one per rank, and the roles in each of them."""

    kind: ProcessKind
    roles: tuple[str, ...]
    ranks: int

    device: str
    """Name of their devices. Processes with the same name share them, rank by rank."""

    key: str
    """Key of the setting that determines their number."""

    value: int
    """Value of this setting."""

    @property
    def nbytes(self) -> int:
        """Bytes of all these processes, without their models."""
        return self.ranks * PROCESS_BYTES[self.kind]


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of a run. All figures are in bytes."""

    on_gpus: bool
    phases: tuple[Phase, ...]
    processes: tuple[PlannedProcesses, ...]

    by_role: Mapping[str, Mapping[Phase, RoleMemory]]
    """Memory of a rank of each role. Graders without a model are left out."""

    def predicted(self, role: str, phase: Phase) -> int:
        """Return the peak memory of a rank's process while a role works in a phase.

        The other roles of the process are included. The figure is the resident set on
        a CPU, and the memory of the device where there is one.
        """
        # A role runs in one kind of process.
        home = next(group for group in self.processes if role in group.roles)
        persistent = sum(
            _total(self.by_role[name][phase].persistent) for name in home.roles
        )
        if self.on_gpus:
            return persistent + _total(self.by_role[role][phase].working)
        return RESIDENT_BYTES[home.kind] + persistent + self._retained(home)

    def is_measured(self, role: str, phase: Phase) -> bool:
        """Return whether the process of a rank can measure its memory in a phase."""
        home = next((group for group in self.processes if role in group.roles), None)
        if home is None or role not in self.by_role or phase not in self.phases:
            return False
        if home.kind == "trainer":
            return True

        # The ranks of a tensor-parallel engine are vLLM's own processes.
        if home.ranks != home.value:
            return False
        # On a GPU torch counts memory that vLLM has put to sleep as if it were in use.
        return not self.on_gpus or phase == "generate"

    def host_bytes(self, phase: Phase, *, certain: bool = False, nodes: int = 1) -> int:
        """Return the memory of all hosts in a phase.

        On a CPU this is all memory. On a machine with GPUs it is that of the processes,
        and of the state that is offloaded.
        """
        # What every node needs is an estimate.
        total = 0 if certain else nodes * NODE_BYTES
        for group in self.processes:
            total += group.nbytes + group.ranks * self._on_host(group, phase, certain)
        return total

    def node_bytes(self, phase: Phase, gpus: int) -> int:
        """Return the most that the host of a node may need in a phase.

        The ranks that take most of their hosts are assumed to be on one node, together
        with all processes that have no GPU.

        Args:
            phase: Phase of a step.
            gpus: Number of GPUs of a node.
        """
        by_gpu, others = self._hosts(phase, certain=False)
        return NODE_BYTES + others + sum(sorted(by_gpu, reverse=True)[:gpus])

    def least_node_bytes(self, phase: Phase, machine: Machine) -> int:
        """Return a lower bound of what the host of the fullest node needs in a phase.

        It is a node's share of everything. Where a run leaves GPUs idle, it is the
        memory of as many GPUs as a node has: processes fill one node after another, if
        these have enough cores.
        """
        by_gpu, others = self._hosts(phase, certain=True)
        share_bytes = (others + sum(by_gpu)) // machine.nodes
        processes = sum(group.ranks for group in self.processes)
        if not machine.gpus or processes > machine.cores:
            return share_bytes
        return max(share_bytes, sum(sorted(by_gpu)[: machine.gpus]))

    def _hosts(self, phase: Phase, *, certain: bool) -> tuple[list[int], int]:
        """Return the memory of the hosts for each GPU, and for processes without one.

        A rank of a model stands for a GPU where there are none.
        """
        by_gpu: dict[tuple[str, int], int] = {}
        without_gpu = 0
        for group in self.processes:
            rank_bytes = PROCESS_BYTES[group.kind] + self._on_host(
                group, phase, certain
            )
            if not any(role in self.by_role for role in group.roles):
                without_gpu += group.ranks * rank_bytes
                continue
            for rank in range(group.ranks):
                gpu = (group.device, rank)
                by_gpu[gpu] = by_gpu.get(gpu, 0) + rank_bytes
        return list(by_gpu.values()), without_gpu

    def device_bytes(self, phase: Phase, *, certain: bool = False) -> int:
        """Return the memory of the fullest GPU in a phase; 0 without GPUs."""
        return max(self.bytes_by_device(phase, certain=certain).values(), default=0)

    def device_of(self, role: str) -> str:
        """Return the name of the devices on which a role computes."""
        return next(group.device for group in self.processes if role in group.roles)

    def bytes_by_device(
        self, phase: Phase, *, certain: bool = False
    ) -> Mapping[str, int]:
        """Return the memory of each kind of GPU in a phase; empty without GPUs."""
        if not self.on_gpus:
            return {}

        # The size of a context is an estimate.
        context = 0 if certain else CONTEXT_BYTES
        per_device: dict[str, int] = {}
        for group in self.processes:
            uses_device = any(role in self.by_role for role in group.roles)
            if uses_device:
                before = per_device.get(group.device, 0)
                own = self._computing(group, phase, certain)
                per_device[group.device] = before + context + own
        return per_device

    def fullest(
        self, *, on_device: bool, certain: bool = False, nodes: int = 1
    ) -> tuple[Phase, int]:
        """Return the phase that needs most memory, and the bytes that it needs."""
        sizes = {
            phase: self.device_bytes(phase, certain=certain)
            if on_device
            else self.host_bytes(phase, certain=certain, nodes=nodes)
            for phase in self.phases
        }
        phase = max(self.phases, key=lambda phase: sizes[phase])
        return phase, sizes[phase]

    def _on_host(self, group: PlannedProcesses, phase: Phase, certain: bool) -> int:
        """Return the memory of one rank on the host, without its process."""
        if not self.on_gpus:
            return self._computing(group, phase, certain)
        return sum(
            _total(memory.on_host, certain) for memory in self._memory(group, phase)
        )

    def _computing(self, group: PlannedProcesses, phase: Phase, certain: bool) -> int:
        """Return the memory of one rank where it computes, without its process."""
        memory = self._memory(group, phase)
        persistent = sum(_total(each.persistent, certain) for each in memory)
        if not self.on_gpus and not certain:
            return persistent + self._retained(group)

        # Roles that share a process compute in turn.
        working = [_total(each.working, certain) for each in memory]
        return persistent + max(working, default=0)

    def _memory(self, group: PlannedProcesses, phase: Phase) -> list[RoleMemory]:
        """Return the memory of each role in these processes that runs a model."""
        return [
            self.by_role[name][phase] for name in group.roles if name in self.by_role
        ]

    def _retained(self, group: PlannedProcesses) -> int:
        """Return the memory of a computation that a process on a CPU retains.

        The C library keeps what it once got for the next computation. Measured: after
        its first update a process of a model of 20 million parameters held 1.9 GiB in
        every phase, and 1.2 GiB before.
        """
        most = 0
        for name in group.roles:
            for memory in self.by_role.get(name, {}).values():
                most = max(most, _total(memory.working))
        return most


def _total(sizes: BytesPerPart, certain: bool = False) -> int:
    """Return the sum over all parts, or over those that are certain."""
    return sum(size for part, size in sizes.items() if part in CERTAIN or not certain)


def memory_plan(config: Config, *, on_gpus: bool, learns: bool = True) -> MemoryPlan:
    """Return the memory plan of a run.

    Args:
        config: Configuration of the run, resolved for this kind of machine.
        on_gpus: Whether the machine has GPUs.
        learns: Whether the job trains. False stands for an evaluation alone, which
            starts fewer roles and holds neither gradients nor optimizers.
    """
    by_role = memory_by_role(config, on_gpus=on_gpus, learns=learns)
    processes = tuple(_planned_processes(config, learns=learns))
    return MemoryPlan(on_gpus, phases_of(config, learns=learns), processes, by_role)


def _planned_processes(config: Config, *, learns: bool) -> Iterator[PlannedProcesses]:
    """Yield all processes of a run, or of a single evaluation."""
    yield from _trainer_processes(config, learns=learns)

    for name, engine in config.active_engines(learns=learns).items():
        kind: ProcessKind = "rollout" if name == ROLLOUT else "judge"
        shares_devices = config.shares_processes and kind == "rollout"
        yield PlannedProcesses(
            kind=kind,
            roles=(name,),
            ranks=engine.ranks,
            device="shared" if shares_devices else name,
            key=f"{engine.section}.num_replicas",
            value=engine.replicas,
        )

    for name, grader in config.active_graders(learns=learns).items():
        # The others are models, which are among the roles above.
        if grader.cpu_ranks is None:
            continue
        yield PlannedProcesses(
            kind="reward",
            roles=(name,),
            ranks=grader.cpu_ranks,
            device=name,
            key=f"{name}.num_ranks",
            value=grader.cpu_ranks,
        )


def _trainer_processes(config: Config, *, learns: bool) -> Iterator[PlannedProcesses]:
    """Yield the processes that run models on training backends.

    With placement=colocated, the roles on one backend share their processes.
    """
    colocated = config.shares_processes
    homes: dict[str, list[str]] = {}
    for name, role in config.active_models(learns=learns).items():
        home = role.backend.kind if colocated else name
        homes.setdefault(home, []).append(name)

    for names in homes.values():
        first = names[0]
        ranks = config.model_roles[first].num_ranks
        yield PlannedProcesses(
            kind="trainer",
            roles=tuple(names),
            ranks=ranks,
            device="shared" if colocated else first,
            key=f"{first}.num_ranks",
            value=ranks,
        )


@dataclass(frozen=True)
class Job:
    """A configuration on a machine."""

    config: Config
    """Configuration of the run, resolved for this machine."""
    machine: Machine
    learns: bool = True
    """False stands for an evaluation alone, which starts fewer processes."""

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory plan."""
        on_gpus = self.machine.gpus > 0
        return memory_plan(self.config, on_gpus=on_gpus, learns=self.learns)


# ------------------------------------------------------------------------------- caches

USED_SHARE = 0.9
"""Share of a device, or of a host, that a prediction may fill.

The rest is for what is not predicted: CUDA graphs, fragments between tensors, and
errors of the estimates.
"""

LEAST_KV_CACHE_GIB = 0.25
"""A cache of fewer GiB saves nothing worth having."""

CACHE_PER_ROW = 1.02
"""Cache that a row takes in blocks, for each byte that its tokens take."""

UNKNOWN_KV_CACHE_GIB = 8.0
"""The most where a device's memory, or the size of a row, is not known."""

C = TypeVar("C", bound=Config)


def cache_bounds_gib(
    engine: ServedModel, config: Config, *, learns: bool = True
) -> tuple[float, float]:
    """Return the least and the largest useful KV cache of an engine, in GiB.

    The least holds the longest row, the largest as many of them as the engine runs at
    once.

    Args:
        engine: The engine.
        config: Configuration of the run.
        learns: Whether the job trains. False stands for an evaluation alone.
    """
    row_bytes = row_cache_bytes(engine, settings_of(engine.path, config))
    if row_bytes is None:
        return LEAST_KV_CACHE_GIB, UNKNOWN_KV_CACHE_GIB

    # vLLM counts in blocks, which hold a little more than a row.
    row_gib = CACHE_PER_ROW * row_bytes / GIB
    least = max(LEAST_KV_CACHE_GIB, _hundredths(row_gib, math.ceil))
    rows = _rows_at_once(engine, config, learns=learns)
    return least, max(least, _hundredths(rows * row_gib, math.ceil))


def wanted_cache_gib(engine: ServedModel, config: Config, *, learns: bool) -> float:
    """Return the KV cache for which state leaves a shared GPU, in GiB.

    It holds half of the rows that an engine generates for a step at the greatest
    length, which most rows do not reach. A larger one takes what remains.

    Args:
        engine: The engine.
        config: Configuration of the run.
        learns: Whether the job trains. False stands for an evaluation alone, all of
            whose rows count.
    """
    least, most = cache_bounds_gib(engine, config, learns=learns)
    rows = most
    row_bytes = row_cache_bytes(engine, settings_of(engine.path, config))
    if learns and row_bytes is not None:
        share = -(-config.rows_per_step // engine.replicas)
        rows = min(most, share * CACHE_PER_ROW * row_bytes / GIB)
    return max(least, _hundredths(rows / 2, math.ceil))


def _rows_at_once(engine: ServedModel, config: Config, *, learns: bool) -> int:
    """Return the most rows that an engine ever runs at once."""
    most = engine.config.batched_requests
    assert isinstance(config, RolloutTaskConfig), "engines are of rollouts"
    # Clients of an endpoint send as many requests as they like.
    if engine.section == ROLLOUT and config.rollout.endpoint.enabled:
        return most

    rows = config.rows_per_step
    if config.run.evaluate_every or not learns:
        evaluated = config.responses_per_evaluation
        # The number may be known only once the held-out problems are read.
        if evaluated is None:
            return most
        rows = max(rows, evaluated)
    return min(most, -(-rows // engine.replicas))


def with_largest_caches(
    config: C, names: Collection[str], usable_bytes: float, *, learns: bool = True
) -> C | None:
    """Return a configuration whose caches take what remains of their devices.

    Whether all else fits is not looked at.

    Args:
        config: Resolved configuration; the sizes of these caches do not matter.
        names: Names of the engines whose caches are chosen.
        usable_bytes: Bytes of a device that may be filled.
        learns: Whether the job trains. False stands for an evaluation alone.

    Returns:
        The configuration; None if some device has too little for a single row.
    """
    if not names:
        return config
    plan = memory_plan(config, on_gpus=True, learns=learns)
    caches: dict[str, object] = {}
    for name in names:
        engine = config.engines[name]
        device = plan.device_of(name)
        # An engine that sleeps has no cache.
        others = max(
            plan.bytes_by_device(phase)[device] - cache
            for phase in plan.phases
            if (cache := plan.by_role[name][phase].of("cache"))
        )
        available_gib = (usable_bytes - others) / GIB
        least, most = cache_bounds_gib(engine, config, learns=learns)
        if available_gib < least:
            return None
        largest = max(least, _hundredths(min(available_gib, most), math.floor))
        caches[f"{engine.section}.kv_cache_gib"] = largest
    return with_changes(config, caches)


def _hundredths(gib: float, rounding: Callable[[float], int]) -> float:
    return rounding(round(100 * gib, 6)) / 100


# ------------------------------------------------------------------------ micro-batches


def growing_roles(config: Config) -> list[str]:
    """Return the roles whose micro-batches take what remains.

    They do not learn, so they keep no activations. In a pipeline, stages would wait for
    larger micro-batches.
    """
    learners = config.learners
    return [
        name
        for name, role in config.model_roles.items()
        if name not in learners and not role.backend.has_stages
    ]


def _with_larger_batches(config: C, names: Collection[str], tokens: int) -> C:
    """Return a configuration in which roles have micro-batches of at least `tokens`."""
    changes = {
        f"{name}.backend.micro_batch_tokens_per_rank": max(
            tokens,
            row_tokens_per_rank(config, name),
            resolved(config.model_roles[name].backend.micro_batch_tokens_per_rank),
        )
        for name in names
    }
    return with_changes(config, changes)


def with_largest_batches(
    config: C, names: Collection[str], fits: Callable[[C], bool]
) -> C:
    """Return a configuration whose micro-batches take what remains of the devices.

    Args:
        config: Resolved configuration that fits.
        names: Names of the roles, which get micro-batches of one size.
        fits: Tells whether a configuration fits the devices.
    """
    if not names:
        return config
    for tokens in MICRO_BATCH_TOKENS:
        larger = _with_larger_batches(config, names, tokens)
        if fits(larger):
            return larger
    return config
