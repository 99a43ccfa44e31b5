"""The memory plan: what every role needs in every phase of a step, predicted before the start.

Invariant: a pure function of the configuration, the models' directories and the kind of machine; what is marked as
certain is a lower bound, so a machine that lacks it cannot hold the run, and the rest is an estimate. Deliberately not
here: how a backend shares a model out (`verl_ray/backends`), and what was measured (`watch/memory.py`).

Phases. generate: rollouts are drawn and scored. measure: log-probs and values. learn: optimizer steps. publish: new
weights go to the rollout engines. On GPUs that rollouts share with their trainers, what placement.offload says of the
trainers' state is on the host while rollouts are drawn, and the rollout engine sleeps while they work. While weights
are sent, the actor's and the engine's are both there, and all else that moves is on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_ray.backends.base import Bytes, Part
from verl_ray.config.algebra import batch_algebra
from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.roles import ModelRole
from verl_ray.config.rollout import ServedModel
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.footprints import CERTAIN, Footprint, Work, engine_footprint, footprint
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.model_sizes import ModelSize, size_of
from verl_ray.weight_sync import SLOTS

Phase = Literal["generate", "measure", "learn", "publish"]
PHASES: tuple[Phase, ...] = ("generate", "measure", "learn", "publish")

Kind = Literal["trainer", "rollout", "judge", "reward"]
ROLLOUT = "rollout"  # the role

PROCESS_BYTES: Mapping[Kind, int] = {
    "trainer": int(0.3 * GIB),
    "rollout": int(0.45 * GIB),
    "judge": int(0.45 * GIB),
    "reward": int(0.25 * GIB),
}
"""Memory of a process alone (unique set size) but for its model: in runs of a model of 0.1 million parameters on a CPU
it was 303, 504 and 279 MiB; rounded down."""

RESIDENT_BYTES: Mapping[Kind, int] = {
    "trainer": 460 * MIB,
    "rollout": 670 * MIB,
    "judge": 670 * MIB,
    "reward": 420 * MIB,
}
"""The same with the libraries that processes share: 458, 665 and 418 MiB in those runs."""

CONTEXT_BYTES = GIB // 2
"""What CUDA and its libraries take of a device for every process that uses it."""


@dataclass(frozen=True)
class Use:
    """One rank of a role in one phase."""

    held: Bytes = field(default_factory=dict)
    """All along."""
    working: Bytes = field(default_factory=dict)
    """Beside, while it computes: roles that share a process take turns."""
    host: Bytes = field(default_factory=dict)
    """What is on the host meanwhile, of a role that computes on a device."""

    def of(self, part: Part) -> int:
        """One part, wherever it is."""
        return sum(sizes.get(part, 0) for sizes in (self.held, self.working, self.host))

    def computing(self) -> int:
        """All of it where the role computes."""
        return _sum(self.held) + _sum(self.working)


@dataclass(frozen=True)
class Processes:
    """Processes of one kind, one per rank, and the roles in each of them."""

    kind: Kind
    roles: tuple[str, ...]
    ranks: int
    device: str
    """Those with the same name here share devices, rank by rank."""
    key: str
    """The key that says how many there are."""
    value: int

    @property
    def nbytes(self) -> int:
        """What all of them take by themselves."""
        return self.ranks * PROCESS_BYTES[self.kind]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes everywhere."""

    on_gpus: bool
    phases: tuple[Phase, ...]
    processes: tuple[Processes, ...]
    uses: Mapping[str, Mapping[Phase, Use]]
    """By role. Graders that are no model have none."""

    def predicted(self, role: str, phase: Phase) -> int:
        """What the process of a rank holds at most while this role does its part of a phase, the roles beside it
        included: resident on a CPU, on its device where there is one."""
        home = next(one for one in self.processes if role in one.roles)
        held = sum(_sum(self.uses[one][phase].held) for one in home.roles)
        if self.on_gpus:
            return held + _sum(self.uses[role][phase].working)
        return RESIDENT_BYTES[home.kind] + held + self._kept(home)

    def is_told(self, role: str, phase: Phase) -> bool:
        """Whether the process of a rank can say what it holds then. Not of a tensor-parallel engine, whose ranks are
        vLLM's own processes; and on a GPU torch counts what vLLM has put to sleep as if it were there."""
        home = next((one for one in self.processes if role in one.roles), None)
        if home is None or role not in self.uses or phase not in self.phases:
            return False
        if home.kind == "trainer":
            return True
        return home.ranks == home.value and (not self.on_gpus or phase == "generate")

    def machine(self, phase: Phase, *, certain: bool = False) -> int:
        """Of the host, all ranks together: everything on a CPU; beside GPUs the processes, and what waits there."""
        return sum(one.nbytes + one.ranks * self._on_host(one, phase, certain) for one in self.processes)

    def device(self, phase: Phase, *, certain: bool = False) -> int:
        """Of the fullest GPU; 0 without one."""
        if not self.on_gpus:
            return 0
        sums: dict[str, int] = {}
        for one in self.processes:
            if any(role in self.uses for role in one.roles):
                context = 0 if certain else CONTEXT_BYTES
                sums[one.device] = sums.get(one.device, 0) + context + self._computing(one, phase, certain)
        return max(sums.values(), default=0)

    def fullest(self, *, on_device: bool, certain: bool = False) -> tuple[Phase, int]:
        """The phase that needs most, and what it needs."""
        size = self.device if on_device else self.machine
        phase = max(self.phases, key=lambda one: size(one, certain=certain))
        return phase, size(phase, certain=certain)

    def _on_host(self, one: Processes, phase: Phase, certain: bool) -> int:
        if not self.on_gpus:
            return self._computing(one, phase, certain)
        return sum(_sum(self.uses[role][phase].host, certain) for role in one.roles if role in self.uses)

    def _computing(self, one: Processes, phase: Phase, certain: bool) -> int:
        """Of one rank's process, but for the process itself."""
        uses = [self.uses[role][phase] for role in one.roles if role in self.uses]
        held = sum(_sum(use.held, certain) for use in uses)
        if not self.on_gpus and not certain:
            return held + self._kept(one)
        return held + max((_sum(use.working, certain) for use in uses), default=0)

    def _kept(self, one: Processes) -> int:
        """On a CPU: what the C library once got for a computation, it keeps for the next one. Measured: after its first
        update a process of a model of 20 million parameters held 1.9 GiB in every phase, 1.2 before."""
        uses = (use for role in one.roles for use in self.uses.get(role, {}).values())
        return max((_sum(use.working) for use in uses), default=0)


def memory_plan(config: Config, *, on_gpus: bool) -> MemoryPlan:
    """Of a run on a machine of this kind, for which its configuration is resolved."""
    rl, shares = config.drawing, on_gpus and config.shares_processes
    device = "cuda" if on_gpus else "cpu"
    uses: dict[str, Mapping[Phase, Use]] = {}
    for name, role in config.model_roles.items():
        model = model_size(name, role, config)
        forward, update = _work(name, config)
        own = footprint(role, model, forward, update, device)
        if name == "actor" and rl is not None and (wire := _wire_end_bytes(rl, on_gpus=on_gpus)):
            own = replace(own, held={**own.held, "buffers": wire})
        moves = rl is not None and shares and not role.grades
        leaves = _leaving(own, rl) if rl is not None and moves else frozenset()
        uses[name] = dict(_trainer(own, role, sends=name == "actor", leaves=leaves, on_gpus=on_gpus))
    if rl is not None:
        for name, engine in rl.engines.items():
            uses[name] = dict(_engine(name, engine, rl, device=device))
    if rl is not None and on_gpus and rl.rollout.sync.delta:
        for name in ("actor", ROLLOUT):  # both ends keep what was sent last
            kept: Bytes = {"buffers": sent_bytes(rl)}
            uses[name] = {phase: replace(use, host={**use.host, **kept}) for phase, use in uses[name].items()}
    phases = PHASES if rl is not None else PHASES[1:3]
    return MemoryPlan(on_gpus, phases, tuple(_processes(config)), uses)


def model_size(name: str, role: ModelRole, config: Config) -> ModelSize:
    """Of the model that a role runs, with the head that it has there."""
    adapted = role.adapter.targets if role.adapter is not None else ()
    return size_of(role.model.path, config, config.head_of(name), adapted)


def wire_bytes(config: DrawingConfig) -> int:
    """Shared memory through which weights travel."""
    if config.rollout.sync.wire != "shared_memory":
        return 0
    return SLOTS * min(sent_bytes(config), config.rollout.sync.bucket_bytes)


def sent_bytes(config: DrawingConfig) -> int:
    """All weights, as the trainer holds them or the rollout engines will, whichever is narrower."""
    actor = config.actor
    width = 2 if config.rollout.dtype == "bfloat16" else actor.backend.sent_width
    return width * model_size("actor", actor, config).parameters


def _wire_end_bytes(config: DrawingConfig, *, on_gpus: bool) -> int:
    """Of the wire, what the memory of every process counts that has used it, or its device: it stays open; and on a CPU
    what was sent last, where only changes follow."""
    sync, sent = config.rollout.sync, sent_bytes(config)
    slots = min(sent, SLOTS * sync.bucket_bytes)
    if not on_gpus:
        return slots + (sent if sync.delta else 0)
    on_devices = sync.wire == "cuda_ipc" or (sync.wire == "broadcast" and config.placement.kind == "separate")
    return slots if on_devices else 0


def _leaving(own: Footprint, config: DrawingConfig) -> frozenset[Part]:
    """What of a trainer's state is on the host while rollouts are drawn on its device."""
    offload = resolved(config.placement.offload)
    if offload == "all":
        return frozenset(own.held) - {"gradients", "buffers"}
    return frozenset(own.held) & {"optimizer"} if offload == "optimizer" else frozenset()


def _trainer(
    own: Footprint, role: ModelRole, *, sends: bool, leaves: frozenset[Part], on_gpus: bool
) -> Iterator[tuple[Phase, Use]]:
    """A role on a training backend. `leaves`: what is on the host while rollouts are drawn, and while weights are sent,
    except for the weights of the role that sends them."""
    stays = on_gpus and role.backend.stays_on_host
    for phase in PHASES:
        working: Bytes = {}
        if phase == ("generate" if role.grades else "measure"):
            working = own.forward
        elif phase == "learn":
            working = own.update
        if stays:
            moved: Bytes = {part: size for part, size in working.items() if part != "gradients"}
            kept: Bytes = {**own.held, "gradients": working.get("gradients", 0)}
            yield phase, Use({}, moved, kept)
        elif leaves and phase in ("generate", "publish"):
            gone = leaves - {"weights"} if sends and phase == "publish" else leaves
            # Gradients are none then.
            waits = role.backend.gradients_leave_with_weights and "weights" not in gone
            given_back = {"gradients"} if gone and not waits else set()
            stay: Bytes = {part: size for part, size in own.held.items() if part not in {*gone, *given_back}}
            yield phase, Use(stay, working, {part: size for part, size in own.held.items() if part in gone})
        else:
            yield phase, Use(own.held, working)


def _engine(name: str, engine: ServedModel, config: DrawingConfig, *, device: str) -> Iterator[tuple[Phase, Use]]:
    """A rollout engine: the policy's, or a judge."""
    own, policy = engine.config, name == ROLLOUT
    model = size_of(engine.path, config, "policy")
    rows = batch_algebra(config).rows
    requests = -(-rows // own.num_replicas)
    found = engine_footprint(own, model, requests * engine.max_prompt_tokens, requests, device)
    frees = config.rollout.frees if policy else None
    width = found.held["weights"] // max(model.parameters // own.tensor_parallel, 1)
    for phase in PHASES:
        asleep: frozenset[Part] = frozenset()
        if frees is not None and phase != "generate":
            asleep = frozenset({"cache"})
            if frees == "weights" and phase != "publish":
                asleep |= {"weights", "buffers"}
        held: Bytes = {part: size for part, size in found.held.items() if part not in asleep}
        working: Bytes = found.forward if phase == "generate" else {}
        if phase == "publish" and policy:
            working = {"buffers": 2 * width * model.largest_layer // own.tensor_parallel}
        if policy:
            direct = config.rollout.sync.wire == "cuda_ipc" or (device == "cuda" and config.rollout.sync.delta)
            # memory of the actor, or of the host
            wire = 0 if direct else _wire_end_bytes(config, on_gpus=device == "cuda")
            held = {**held, "buffers": held.get("buffers", 0) + wire}
        yield phase, Use(held, working)


def _work(name: str, config: Config) -> tuple[Work, Work]:
    """What a rank of a role computes at most: in a forward pass over the rows of a step, and in an update."""
    sizes = batch_algebra(config)
    role, backend = next(one for one in sizes.roles if one.role == name), config.model_roles[name].backend
    read = config.longest_response / sizes.max_row_tokens

    def work(rows: int) -> Work:
        longest = -(-rows * sizes.max_row_tokens // backend.token_slices)
        tokens = min(longest, role.micro_batch_tokens_per_rank)
        return Work(tokens, int(read * tokens), -(-longest // max(tokens, 1)))

    return work(role.rows_per_rank), work(role.mini_batch_size_per_rank or 0)


def _processes(config: Config) -> Iterator[Processes]:
    """All of a run; colocated roles on one backend share theirs."""
    colocated = config.shares_processes
    homes: dict[str, list[str]] = {}
    for name, role in config.model_roles.items():
        homes.setdefault(role.backend.kind if colocated else name, []).append(name)
    for names in homes.values():
        ranks = config.model_roles[names[0]].num_ranks
        place = "shared" if colocated else names[0]
        yield Processes("trainer", tuple(names), ranks, place, f"{names[0]}.num_ranks", ranks)
    for name, engine in config.engines.items():
        kind: Kind = "rollout" if name == ROLLOUT else "judge"
        place = "shared" if colocated and kind == "rollout" else name
        replicas = engine.config.num_replicas
        yield Processes(kind, (name,), engine.ranks, place, f"{engine.section}.num_replicas", replicas)
    for name, one in config.graders.items():
        if one.cpu_ranks is not None:
            yield Processes("reward", (name,), one.cpu_ranks, name, f"{name}.num_ranks", one.cpu_ranks)


def _sum(sizes: Bytes, certain: bool = False) -> int:
    return sum(size for part, size in sizes.items() if part in CERTAIN or not certain)
