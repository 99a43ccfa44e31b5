"""Memory of one rank of every role in every phase of a step, in bytes.

Invariant: a pure function of the configuration, the models' directories and the kind of
machine.

A step has these phases. generate: rollouts are generated and scored. measure: log-probs
and values are computed. learn: optimizers step. publish: new weights are sent to the
rollout engines.

On GPUs that trainers share with rollout engines, the state that placement.offload names
is on the host while rollouts are generated, and the rollout engine sleeps while
trainers work. While weights are sent, those of the actor and of the engine are both on
the device, and all other state that is offloaded is on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_ray.backends.base import FLOAT32, BytesPerPart, MemoryPart
from verl_ray.config.roles import ModelRole
from verl_ray.config.rollout import SCORED_PROMPT_TOKENS, ServedModel
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, batch_algebra
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.footprints import (
    BFLOAT16,
    Footprint,
    Workload,
    engine_footprint,
    footprint,
    sent_bytes,
    snapshot_bytes,
    trained_parameters,
)
from verl_ray.preflight.model_files import model_size, size_of
from verl_ray.settings.section import resolved
from verl_ray.weight_sync import SLOTS

Phase = Literal["generate", "measure", "learn", "publish"]
PHASES: tuple[Phase, ...] = ("generate", "measure", "learn", "publish")

SUPERVISED_PHASES: tuple[Phase, ...] = ("measure", "learn")
"""Phases of a task without rollouts."""

EVALUATION_PHASES: tuple[Phase, ...] = ("generate", "publish")
"""Phases of an evaluation of rollouts."""

ROLLOUT = "rollout"
"""Name of the rollout role."""

NO_PARTS: frozenset[MemoryPart] = frozenset()


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one rank of a role in one phase, in bytes per part."""

    persistent: BytesPerPart = field(default_factory=dict)
    """Memory where the role computes, throughout the phase."""

    working: BytesPerPart = field(default_factory=dict)
    """Additional memory while the role computes.

    Roles that share a process compute in turn.
    """

    on_host: BytesPerPart = field(default_factory=dict)
    """Memory on the host of a role that computes on a device."""

    def of(self, part: MemoryPart) -> int:
        """Return the bytes of one part, wherever it is."""
        places = (self.persistent, self.working, self.on_host)
        return sum(sizes.get(part, 0) for sizes in places)

    def computing(self) -> int:
        """Return the bytes where the role computes."""
        return sum(self.persistent.values()) + sum(self.working.values())


def phases_of(config: Config, *, learns: bool = True) -> tuple[Phase, ...]:
    """Return the phases that a step of this task has, or a single evaluation."""
    if not isinstance(config, RolloutTaskConfig):
        return SUPERVISED_PHASES if learns else ("measure",)
    return PHASES if learns else EVALUATION_PHASES


def memory_by_role(
    config: Config, *, on_gpus: bool, learns: bool = True
) -> dict[str, Mapping[Phase, RoleMemory]]:
    """Return the memory of a rank of each role that runs a model, in each phase.

    Args:
        config: Resolved configuration of the run.
        on_gpus: Whether the machine has GPUs.
        learns: Whether the job trains. False stands for an evaluation alone, which has
            neither gradients nor optimizers.
    """
    by_role: dict[str, Mapping[Phase, RoleMemory]] = {}
    for name, role in config.active_models(learns=learns).items():
        by_role[name] = dict(
            _trainer_memory(name, role, config, on_gpus=on_gpus, learns=learns)
        )
    if learns and config.run.recovery.taken_every:
        for name, nbytes in snapshot_bytes(config).items():
            by_role[name] = _with_part(
                by_role[name], "snapshots", nbytes, on_gpus=on_gpus
            )

    if not isinstance(config, RolloutTaskConfig):
        return by_role

    for name, engine in config.active_engines(learns=learns).items():
        by_role[name] = dict(
            _engine_memory(name, engine, config, on_gpus=on_gpus, learns=learns)
        )

    # To send only changes, sender and receiver both keep what was sent last.
    if on_gpus and config.rollout.sync.delta:
        for name in ("actor", ROLLOUT):
            by_role[name] = _with_part(
                by_role[name], "buffers", sent_bytes(config), on_gpus=True
            )

    # A replica that starts again while the actor learns gets what its ranks keep.
    if learns and config.keeps_published_version:
        size = model_size("actor", config.actor, config)
        changing = size.parameters
        if config.sends_adapter_alone:
            changing = trained_parameters(config.actor, size)
        share = config.actor.backend.sent_width * changing // config.actor.num_ranks
        by_role["actor"] = _with_part(
            by_role["actor"], "buffers", share, on_gpus=on_gpus
        )
    return by_role


def _with_part(
    phases: Mapping[Phase, RoleMemory], part: MemoryPart, nbytes: int, *, on_gpus: bool
) -> dict[Phase, RoleMemory]:
    """Return the memory of a role that holds more on the host throughout."""
    place = "on_host" if on_gpus else "persistent"
    changed = {}
    for phase, memory in phases.items():
        parts: BytesPerPart = getattr(memory, place)
        parts = {**parts, part: parts.get(part, 0) + nbytes}
        changed[phase] = replace(memory, **{place: parts})
    return changed


# --------------------------------------------------------------------------------- wire


def _endpoint_bytes(config: RolloutTaskConfig, *, on_gpus: bool) -> int:
    """Return the size of the wire in the memory of a process that has used it.

    The wire stays open between weight syncs. On GPUs only a wire between devices
    counts. On a CPU the weights that were sent last are included where only changes
    are sent.
    """
    sync = config.rollout.sync
    sent = sent_bytes(config)
    slots = min(sent, SLOTS * sync.bucket_bytes)

    if not on_gpus:
        return slots + (sent if sync.delta else 0)

    if sync.wire == "cuda_ipc":
        return slots
    if sync.wire == "broadcast" and config.placement.kind == "separate":
        return slots
    return 0


# ----------------------------------------------------------------------------- trainers


def _trainer_memory(
    name: str, role: ModelRole, config: Config, *, on_gpus: bool, learns: bool
) -> Iterator[tuple[Phase, RoleMemory]]:
    """Yield the memory of a role on a training backend in each phase."""
    device = "cuda" if on_gpus else "cpu"
    model = model_size(name, role, config)
    forward, update = _workloads(name, config, learns=learns)
    averages = config.average_decay(name) is not None
    own = footprint(
        role, model, forward, update, device, learns=learns, averages=averages
    )

    offloaded = NO_PARTS
    if isinstance(config, RolloutTaskConfig):
        if name == "actor":
            own = _with_wire(own, config, on_gpus=on_gpus)

        # A model that grades works while rollouts are generated, so it stays.
        shares_devices = on_gpus and config.shares_processes
        if shares_devices and not role.scores_rollouts:
            offloaded = offloaded_parts(own.persistent, config)

    for phase in phases_of(config, learns=learns):
        working = _working_in(phase, own, role)
        if on_gpus and role.backend.stays_on_host:
            yield phase, _host_parameters(own, working)
        elif offloaded and phase in ("generate", "publish"):
            # The actor's own weights are read while they are sent.
            parts = offloaded
            if name == "actor" and phase == "publish":
                parts = offloaded - {"weights"}
            yield phase, _partly_offloaded(own, working, parts, role)
        else:
            yield phase, RoleMemory(own.persistent, working)


def _workloads(name: str, config: Config, *, learns: bool) -> tuple[Workload, Workload]:
    """Return the largest forward pass over a step's rows, and the largest update.

    An evaluation may have more rows than a step, so its micro-batches are full.
    """
    sizes = batch_algebra(config)
    batch = next(each for each in sizes.roles if each.role == name)
    token_slices = config.model_roles[name].backend.token_slices
    largest = resolved(batch.micro_batch_tokens_per_rank)
    # Logits are needed of response tokens only.
    logit_share = config.longest_response / config.longest_own_row
    # Without a role of its own the actor is the teacher, or asks a server.
    teacher = "reference" if "reference" in config.model_roles else "actor"

    def workload(all_tokens: int, candidates: int) -> Workload:
        tokens = min(all_tokens, largest)
        batches = -(-all_tokens // max(tokens, 1))
        replays = config.replays_routing(name)
        logits = int(logit_share * tokens)
        return Workload(tokens, logits, batches, replays, candidates)

    def tokens_of(rows: int) -> int:
        return -(-rows * sizes.max_row_tokens // token_slices)

    # A file may have what a teacher said.
    asks = isinstance(config, RLConfig) and name == teacher
    top_tokens = config.num_top if asks else 0
    forward = workload(
        tokens_of(batch.rows_per_rank) if learns else largest, top_tokens
    )
    learned = config.num_top if name == "actor" else 0
    update = workload(tokens_of(batch.mini_batch_size_per_rank or 0), learned)
    return forward, update


def _with_wire(
    own: Footprint, config: RolloutTaskConfig, *, on_gpus: bool
) -> Footprint:
    """Return the footprint of the actor, including its end of the wire."""
    wire = _endpoint_bytes(config, on_gpus=on_gpus)
    if not wire:
        return own
    # Slices of other ranks arrive beside the slots, in a bucket's worth of memory.
    sync = config.rollout.sync
    if config.actor.num_ranks > 1 and sync.wire != "shared_memory":
        wire += min(sent_bytes(config), sync.bucket_bytes)
    return replace(own, persistent={**own.persistent, "buffers": wire})


def offloaded_parts(
    persistent: BytesPerPart, config: RolloutTaskConfig
) -> frozenset[MemoryPart]:
    """Return the parts that are on the host while a shared device generates rollouts.

    Args:
        persistent: Parts that a role holds between calls.
        config: Resolved configuration of the run.
    """
    offload = resolved(config.placement.offload)
    if offload == "all":
        return frozenset(persistent) - {"gradients", "buffers"}
    if offload == "optimizer":
        return frozenset(persistent) & {"optimizer"}
    return NO_PARTS


def _working_in(phase: Phase, own: Footprint, role: ModelRole) -> BytesPerPart:
    """Return the additional memory while a role computes in a phase."""
    forward_phase = "generate" if role.scores_rollouts else "measure"
    if phase == forward_phase:
        return own.forward
    if phase == "learn":
        return own.update
    return {}


def _host_parameters(own: Footprint, working: BytesPerPart) -> RoleMemory:
    """Return the memory of a role whose parameters never live on the device."""
    gradients = working.get("gradients", 0)
    on_device: BytesPerPart = {
        part: size for part, size in working.items() if part != "gradients"
    }
    on_host: BytesPerPart = {**own.persistent, "gradients": gradients}
    return RoleMemory(persistent={}, working=on_device, on_host=on_host)


def _partly_offloaded(
    own: Footprint,
    working: BytesPerPart,
    offloaded: frozenset[MemoryPart],
    role: ModelRole,
) -> RoleMemory:
    """Return the memory of a role while some of its parts are on the host."""
    # The memory of gradients is released, not copied: there are none between steps.
    # Some backends can release it only together with the weights.
    needs_weights_offloaded = role.backend.releases_gradients_with_weights
    released = NO_PARTS
    if offloaded and ("weights" in offloaded or not needs_weights_offloaded):
        released = frozenset({"gradients"})

    remaining = {
        part: size
        for part, size in own.persistent.items()
        if part not in offloaded and part not in released
    }
    on_host = {part: size for part, size in own.persistent.items() if part in offloaded}
    return RoleMemory(remaining, working, on_host)


# ---------------------------------------------------------------------- rollout engines


def _engine_memory(
    name: str,
    engine: ServedModel,
    config: RolloutTaskConfig,
    *,
    on_gpus: bool,
    learns: bool,
) -> Iterator[tuple[Phase, RoleMemory]]:
    """Yield the memory of the policy's or a judge's engine in each phase."""
    device = "cuda" if on_gpus else "cpu"
    settings = engine.config
    model = size_of(engine.path, config, "policy")

    rows = batch_algebra(config).rows
    requests = -(-rows // engine.replicas)
    prompt_tokens = requests * engine.max_prompt_tokens
    is_policy = name == ROLLOUT
    scored = 0
    # Clients may ask for the log-probs of a prompt.
    if is_policy and config.rollout.endpoint.enabled:
        longest = engine.max_prompt_tokens + engine.max_response_tokens
        scored = min(longest, SCORED_PROMPT_TOKENS)
    own = engine_footprint(
        settings, model, prompt_tokens, requests, device, scored_tokens=scored
    )

    wire = 0
    receiving: BytesPerPart = {}
    if is_policy:
        wire = _receiver_bytes(config, on_gpus=on_gpus)
        # A layer that arrives is held next to the one that it replaces.
        width = FLOAT32 if resolved(settings.dtype) == "float32" else BFLOAT16
        layer = 2 * width * model.largest_layer // settings.tensor_parallel
        receiving = {"buffers": layer}

    for phase in phases_of(config, learns=learns):
        asleep = _asleep_parts(phase, config) if is_policy else NO_PARTS
        persistent: dict[MemoryPart, int] = {
            part: size for part, size in own.persistent.items() if part not in asleep
        }
        if is_policy:
            persistent["buffers"] = persistent.get("buffers", 0) + wire

        working: BytesPerPart = {}
        if phase == "generate":
            working = own.forward
        elif phase == "publish":
            working = receiving
        yield phase, RoleMemory(persistent, working)


def _receiver_bytes(config: RolloutTaskConfig, *, on_gpus: bool) -> int:
    """Return the size of the wire in the memory of a rollout engine."""
    sync = config.rollout.sync
    # The engine reads the actor's memory, or that of the host.
    if sync.wire == "cuda_ipc" or (on_gpus and sync.delta):
        return 0
    return _endpoint_bytes(config, on_gpus=on_gpus)


def _asleep_parts(phase: Phase, config: RolloutTaskConfig) -> frozenset[MemoryPart]:
    """Return the parts that the policy's engine has freed in a phase."""
    freed = config.rollout.freed_by_sleep
    if freed is None or phase == "generate":
        return NO_PARTS

    cache: frozenset[MemoryPart] = frozenset({"cache"})
    # Weights are received in the publish phase, so their memory is back by then.
    if freed == "weights" and phase != "publish":
        return cache | {"weights", "buffers"}
    return cache
