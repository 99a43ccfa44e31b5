"""The time model: estimated seconds of each phase of a step on GPUs.

Invariant: a pure function of a resolved configuration, the sizes of its models and the
links of the GPUs. Every figure is an estimate; what they stand on is in
`assumptions.py`.

Not counted: scoring, the driver and its messages, rows of uneven length on different
ranks, experts of uneven load, prompts of a group that an engine reads once, and
evaluations and checkpoints between steps.

A pass of a role on a training backend is pure arithmetic over its settings, the size of
its model, the lengths of rows, and the figures of a machine. Rows are balanced over
ranks, and the rank with the most rows counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.backends.base import FLOAT32
from verl_ray.backends.fsdp import FsdpBackend
from verl_ray.backends.megatron import MegatronBackend
from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.assumptions import (
    DECODE_BANDWIDTH_SHARE,
    DECODE_STEP_S,
    DISK_BYTES_PER_S,
    EXCHANGE_LATENCY_S,
    FLOAT32_SLOWDOWN,
    HOST_BROADCAST_BYTES_PER_S,
    HOST_MEMORY_BYTES_PER_S,
    LAYER_LAUNCH_S,
    MEAN_LENGTH_SHARE,
    PREFILL_EFFICIENCY,
    PROCESS_COPY_BYTES_PER_S,
    TRAINING_EFFICIENCY,
    Links,
)
from verl_ray.preflight.footprints import BFLOAT16, sent_bytes, trained_parameters
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.model_directories import cache_bytes_per_token
from verl_ray.preflight.model_files import ModelSize, model_size, size_of
from verl_ray.preflight.role_memory import ROLLOUT, Phase, offloaded_parts, phases_of
from verl_ray.profiling.flops import ModelShape, forward_flops

_LENGTHS = 16
"""Number of different lengths that stand for those of all responses."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step, and how long each pool of GPUs works in it."""

    seconds: Mapping[Phase, float]
    trainer_gpus: int
    engine_gpus: int
    shares_gpus: bool
    """Whether trainers and engines are on the same GPUs."""
    trainer_gpu_s: float
    """GPU-seconds in which trainers compute."""
    engine_gpu_s: float
    """GPU-seconds in which engines generate."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    @property
    def idle_share_of_trainers(self) -> float:
        """Share of the step in which a GPU of the trainers computes nothing for them,
        in the mean."""
        return 1 - self.trainer_gpu_s / (self.trainer_gpus * self.total_s)

    @property
    def idle_share_of_engines(self) -> float:
        """Share of the step in which a GPU of the engines generates nothing, in the
        mean."""
        return 1 - self.engine_gpu_s / (self.engine_gpus * self.total_s)

    @property
    def used_gpus(self) -> int:
        """Number of GPUs that trainers and engines have."""
        if self.shares_gpus:
            return max(self.trainer_gpus, self.engine_gpus)
        return self.trainer_gpus + self.engine_gpus

    def idle_share_of(self, gpus: int) -> float:
        """Return the share of the step in which a GPU computes nothing, in the mean.

        Args:
            gpus: Number of all GPUs of a machine, used or not.
        """
        return 1 - (self.trainer_gpu_s + self.engine_gpu_s) / (gpus * self.total_s)


def step_time(config: Config, links: Links) -> StepTime:
    """Return the estimated time of a step.

    Args:
        config: Resolved configuration, whose models have a shape (`ModelSize.shape`).
        links: Links of the GPUs.
    """
    measure: dict[str, float] = {}
    learn: dict[str, float] = {}
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        if _measures(name, role, config):
            rows = _row_lengths(config, size, config.rows_per_step)
            measure[name] = pass_s(role, size, rows, links, learns=False)

        if isinstance(role, SupervisedRole):
            per_update = role.rows_per_update(config.rows_per_step)
            rows = _row_lengths(config, size, per_update)
            update_s = pass_s(role, size, rows, links, learns=True)
            learn[name] = role.updates_per_step(config.rows_per_step) * update_s

    # Roles on the same GPUs take turns, others work at the same time.
    shares_gpus = config.shares_processes
    together = sum if shares_gpus else max
    seconds: dict[Phase, float] = {
        "measure": together([0.0, *measure.values()]),
        "learn": together([0.0, *learn.values()]),
    }
    engine_gpus = 0
    engine_gpu_s = 0.0
    if isinstance(config, RolloutTaskConfig):
        move_s = _offloaded_bytes(config) / links.host if shares_gpus else 0.0
        seconds["generate"], engine_gpu_s = _generate_s(config, links)
        seconds["measure"] += move_s
        seconds["publish"] = _publish_s(config, links) + move_s
        engine_gpus = config.engines[ROLLOUT].ranks

    ranks = {name: role.num_ranks for name, role in config.model_roles.items()}
    busy = sum(ranks[name] * time for name, time in [*measure.items(), *learn.items()])
    return StepTime(
        seconds={phase: seconds[phase] for phase in phases_of(config)},
        trainer_gpus=max(ranks.values()) if shares_gpus else sum(ranks.values()),
        engine_gpus=engine_gpus,
        shares_gpus=shares_gpus,
        trainer_gpu_s=busy,
        engine_gpu_s=engine_gpu_s,
    )


def _measures(name: str, role: ModelRole, config: Config) -> bool:
    """Return whether a role computes log-probs or values before others learn."""
    if not isinstance(role, SupervisedRole):
        return not role.scores_rollouts
    if not isinstance(config, RolloutTaskConfig):
        return False
    if name != config.evaluated_role:
        return True
    return config.needs_old_log_probs(corrects=config.corrects_mismatch)


# ------------------------------------------------------------------------------ lengths


@functools.lru_cache(maxsize=64)
def _mean_row(shape: ModelShape, prompt: int, longest: int) -> tuple[float, float]:
    """Return the mean tokens of rows, and the mean FLOPs of a forward pass over them.

    Lengths of responses are spread evenly from 0 to the longest.
    """
    shares = (np.arange(_LENGTHS) + 0.5) / _LENGTHS
    lengths = (prompt + shares * longest).astype(np.int64)
    return float(lengths.mean()), forward_flops(shape, lengths) / _LENGTHS


def _row_lengths(config: Config, size: ModelSize, rows: int) -> RowLengths:
    """Return the rows of a pass: prompts of the mean length, responses of all.

    Rows of a task without rollouts are responses alone.
    """
    assert size.shape is not None, "models without a shape are refused before"
    longest_row, _ = config.longest_row
    longest = config.longest_response
    prompt = int(MEAN_LENGTH_SHARE * (longest_row - longest))
    return RowLengths(rows, *_mean_row(size.shape, prompt, longest))


def _generate_s(config: RolloutTaskConfig, links: Links) -> tuple[float, float]:
    """Return the seconds in which engines generate the responses of a step.

    With them, the GPU-seconds in which they do: some replicas may have a row less than
    others, or none.
    """
    size = size_of(config.actor.model.folder, config, "policy")
    assert size.shape is not None, "models without a shape are refused before"
    longest = config.rollout.max_response_tokens
    prompt = MEAN_LENGTH_SHARE * config.data.max_prompt_tokens
    lengths = ResponseLengths(
        mean_prompt=prompt,
        mean_response=MEAN_LENGTH_SHARE * longest,
        longest_response=longest,
        prompt_flops=_mean_row(size.shape, int(prompt), 0)[1],
    )

    replicas = resolved(config.rollout.num_replicas)
    fewer, fuller_replicas = divmod(config.rows_per_step, replicas)

    def replica_s(rows: int) -> float:
        return generation_s(config.rollout, size, rows, lengths, links)

    if fuller_replicas == 0:
        seconds = replica_s(fewer)
        busy_s = replicas * seconds
    else:
        seconds = replica_s(fewer + 1)
        busy_s = fuller_replicas * seconds
        busy_s += (replicas - fuller_replicas) * replica_s(fewer)
    return seconds, config.rollout.tensor_parallel * busy_s


# ---------------------------------------------------------------------- moves and wires


def _offloaded_bytes(config: RolloutTaskConfig) -> int:
    """Return the bytes of a rank that go to the host, and come back, in each step."""
    total = 0
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        trained = trained_parameters(role, size)
        memory = role.backend.rank_memory(role.num_ranks, size, trained)
        if not role.backend.stays_on_host and not role.scores_rollouts:
            parts = offloaded_parts(memory.persistent, config)
            total += sum(memory.persistent[part] for part in parts)
    return total


def _publish_s(config: RolloutTaskConfig, links: Links) -> float:
    """Return the seconds in which new weights reach all engines.

    Buckets follow each other, so the slowest of writing, sending and loading counts.
    """
    sent = sent_bytes(config)
    ranks = config.actor.num_ranks
    engine_ranks = config.engines[ROLLOUT].ranks
    # All processes of a node share its memory.
    readers = min(engine_ranks, links.gpus_per_node)
    load = max(
        sent / PROCESS_COPY_BYTES_PER_S, sent * readers / HOST_MEMORY_BYTES_PER_S
    )

    wire = config.rollout.sync.wire
    if wire == "shared_memory":
        write = sent / min(ranks * PROCESS_COPY_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S)
        return max(write, load)
    if wire == "disk":
        return sent / DISK_BYTES_PER_S + load
    if wire == "host_broadcast":
        # Ranks send a bucket to its root, which broadcasts it.
        return max(2 * sent / HOST_BROADCAST_BYTES_PER_S, load)
    if wire == "cuda_ipc":
        return links.sum_s(sent, ranks)
    return 2 * sent / links.node


# --------------------------------------------------------------------------- generation

# Estimated seconds in which a replica generates its share of a step's responses.
#
# Invariant: pure arithmetic over the settings of an engine, the size of its model,
# the lengths of rows, and the figures of a machine.

_TAIL_POINTS = 8
"""Points at which the steps of the long tail are computed."""


@dataclass(frozen=True)
class ResponseLengths:
    """The lengths of rows in the mean and at most, in tokens."""

    mean_prompt: float
    mean_response: float
    longest_response: int
    prompt_flops: float
    """FLOPs of a forward pass over a prompt, in the mean."""


@dataclass(frozen=True)
class _Decoder:
    """One rank of an engine while it decodes."""

    settings: RolloutEngineConfig
    size: ModelSize
    shape: ModelShape
    links: Links

    @property
    def width(self) -> int:
        return FLOAT32 if resolved(self.settings.dtype) == "float32" else 2

    def step_s(self, running: float, context: float) -> float:
        """Return the time of a step in which every running response gets a token.

        Args:
            running: Number of responses.
            context: Tokens of one of them, with its prompt.
        """
        settings = self.settings
        tensor = settings.tensor_parallel
        size = self.size

        weights = size.parameters - size.in_experts
        if size.in_experts:
            # An expert is read if any of the tokens is given to it.
            chosen = experts_per_token(size) / self.shape.num_experts
            weights += int(size.in_experts * (1 - (1 - chosen) ** running))
        cache = running * context * _cache_bytes_per_token(settings, self.shape)
        bandwidth = self.links.gpu.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE
        reading = (self.width * weights / tensor + cache) / bandwidth

        flops = 2 * self.shape.matmul_parameters * running / tensor
        peak = flops_per_s(self.links, resolved(settings.dtype)) * PREFILL_EFFICIENCY

        exchange = 0.0
        if tensor > 1:
            hidden = self.width * running * self.shape.hidden_size
            sums = 2 * self.shape.num_layers
            exchange = sums * self.links.sum_s(hidden, tensor)
            exchange += sums * EXCHANGE_LATENCY_S
        return max(reading, flops / peak) + exchange + DECODE_STEP_S


def generation_s(
    settings: RolloutEngineConfig,
    size: ModelSize,
    rows: int,
    lengths: ResponseLengths,
    links: Links,
) -> float:
    """Return the seconds until the last response of a replica is finished.

    Prompts are read at the speed of matrix products. Then responses are decoded: as
    many at a time as the cache holds and the engine takes. The others follow as places
    become free. While the last ones run, their number falls evenly to 0.

    Args:
        settings: Settings of the engines.
        size: Size of the model.
        rows: Number of responses of the replica.
        lengths: Their lengths.
        links: Links of the machine.
    """
    shape = size.shape
    assert shape is not None, "models without a shape are refused before"
    if rows == 0:
        return 0.0
    peak = flops_per_s(links, resolved(settings.dtype)) * PREFILL_EFFICIENCY
    prefill = rows * lengths.prompt_flops / settings.tensor_parallel / peak

    running = min(rows, _running_requests(settings, shape, lengths))
    decoder = _Decoder(settings, size, shape, links)
    # Longer responses run for longer, so those that run are at M / 3 in the mean.
    context = lengths.mean_prompt + lengths.longest_response / 3

    full_steps = (rows - running) * lengths.mean_response / running
    decode = full_steps * decoder.step_s(running, context)

    steps_per_point = lengths.longest_response / _TAIL_POINTS
    for point in range(_TAIL_POINTS):
        passed = (point + 0.5) / _TAIL_POINTS
        context = lengths.mean_prompt + passed * lengths.longest_response
        remaining = max(1.0, running * (1 - passed))
        decode += steps_per_point * decoder.step_s(remaining, context)
    return prefill + decode


def _running_requests(
    settings: RolloutEngineConfig, shape: ModelShape, lengths: ResponseLengths
) -> float:
    """Return how many requests an engine runs at a time."""
    cache_bytes = resolved(settings.kv_cache_gib) * GIB
    tokens = cache_bytes / _cache_bytes_per_token(settings, shape)
    mean_row = lengths.mean_prompt + lengths.mean_response
    return max(1.0, min(float(settings.batched_requests), tokens / mean_row))


def _cache_bytes_per_token(settings: RolloutEngineConfig, shape: ModelShape) -> int:
    """Return the bytes of a token in the key-value cache of one rank of an engine."""
    return cache_bytes_per_token(
        settings, shape.num_layers, shape.num_kv_heads, shape.head_size
    )


# --------------------------------------------------------------------- passes of a role

OPTIMIZER_BYTES = 28
"""Bytes of a parameter that AdamW reads (weight, gradient, two moments) and writes."""


@dataclass(frozen=True)
class RowLengths:
    """The rows of a pass: their number and their mean length, with FLOPs for a row."""

    rows: int
    mean_tokens: float
    flops_per_row: float
    """FLOPs of a forward pass, in the mean."""


@dataclass(frozen=True)
class Pass:
    """A pass of a role over rows, on the rank that has the most."""

    role: ModelRole
    size: ModelSize
    shape: ModelShape
    links: Links
    learns: bool
    rows_per_rank: int
    flops_per_row: float
    """FLOPs of a forward pass over a row, in the mean."""
    tokens: float
    """Tokens of this rank's rows; with slices, those of its slices."""
    batches: int
    """Number of micro-batches."""

    @property
    def sweeps(self) -> int:
        """Number of times that data pass through the layers, in either direction.

        The backward pass counts twice, since it computes two products for each of the
        forward pass.
        """
        if not self.learns:
            return 1
        return 4 if self.role.backend.activation_partition().recompute else 3

    @property
    def directions(self) -> int:
        """Number of times that layers exchange their inputs or outputs."""
        return self.sweeps - 1 if self.learns else 1

    def compute_s(self) -> float:
        """Return the time of computation alone."""
        backend = self.role.backend
        layers = (
            self.shape.num_layers / backend.activation_partition().pipeline_parallel
        )
        launches = self.batches * layers * self.sweeps * LAYER_LAUNCH_S
        rate = flops_per_s(self.links, backend.compute_dtype) * TRAINING_EFFICIENCY
        rows_per_peer = self.rows_per_rank / backend.peers
        flops = self.sweeps * rows_per_peer * self.flops_per_row
        return max(flops / rate, launches)


def flops_per_s(links: Links, dtype: str) -> float:
    """Return the peak of matrix products in a type."""
    if dtype == "float32":
        return links.gpu.flops_per_s / FLOAT32_SLOWDOWN
    return links.gpu.flops_per_s


def pass_s(
    role: ModelRole, size: ModelSize, rows: RowLengths, links: Links, *, learns: bool
) -> float:
    """Return the seconds of a pass over rows, with the optimizer's step if it learns.

    Args:
        role: Settings of the role.
        size: Size of its model.
        rows: Rows of the pass, over all ranks.
        links: Links of the machine.
        learns: Whether there is a backward pass and a step of the optimizer.
    """
    shape = size.shape
    assert shape is not None, "models without a shape are refused before"
    backend = role.backend
    rows_per_rank = -(-rows.rows // max(1, role.num_ranks // backend.peers))
    tokens = rows_per_rank * rows.mean_tokens / backend.token_slices

    # All micro-batches but the last are nearly full.
    per_batch = resolved(backend.micro_batch_tokens_per_rank)
    batches = min(rows_per_rank, math.ceil(tokens / per_batch))

    work = Pass(
        role=role,
        size=size,
        shape=shape,
        links=links,
        learns=learns,
        rows_per_rank=rows_per_rank,
        flops_per_row=rows.flops_per_row,
        tokens=tokens,
        batches=max(1, batches),
    )

    if isinstance(backend, MegatronBackend):
        seconds = _megatron_s(work, backend)
    elif isinstance(backend, FsdpBackend):
        seconds = _fsdp_s(work, backend)
    elif isinstance(backend, MegatronFsdpBackend):
        seconds = _megatron_fsdp_s(work, backend)
    else:
        seconds = _whole_model_s(work)
    if learns:
        seconds += _optimizer_s(work)
    return seconds


# ----------------------------------------------------------------------------- backends


def _whole_model_s(work: Pass) -> float:
    """Return the time where every rank holds the model: gradients are summed once."""
    seconds = work.compute_s()
    if work.learns:
        trained = trained_parameters(work.role, work.size)
        gradients = work.links.sum_s(FLOAT32 * trained, work.role.num_ranks)
        # Sums overlap with the last of the micro-batches.
        seconds += max(0.0, gradients - seconds / work.batches)
    return seconds


def _fsdp_s(work: Pass, backend: FsdpBackend) -> float:
    """Return the time with FSDP2, which overlaps its exchanges with computation."""
    links = work.links
    ranks = work.role.num_ranks
    shards = backend.shards(ranks)
    copies = ranks // shards
    parameters = work.size.parameters
    trained = trained_parameters(work.role, work.size)

    gather = links.gather_s(backend.compute_width * parameters, shards)
    if backend.host_parameters:
        # A shard comes to the device in float32 before it is cast and gathered.
        gather += FLOAT32 * parameters / shards / links.host
    gathers = work.batches
    if work.learns and backend.sharding in ("full", "hybrid"):
        gathers *= 2

    scatter = 0.0
    scatters = 0
    if work.learns:
        scatters = work.batches if backend.accumulate == "sharded" else 1
        scatter = links.gather_s(FLOAT32 * trained, shards)
        scatter += links.sum_s(FLOAT32 * trained / shards, copies, stride=shards)
        if backend.host_parameters:
            scatter += FLOAT32 * trained / shards / links.host

    compute = work.compute_s() + _heads_exchange_s(work, backend.sequence_parallel)
    exchange = gathers * gather + scatters * scatter
    return _overlapped_s(work, compute, exchange, ends_s=gather + scatter)


def _megatron_fsdp_s(work: Pass, backend: MegatronFsdpBackend) -> float:
    """Return the time with Megatron-FSDP, which overlaps its exchanges, too."""
    links = work.links
    ranks = work.role.num_ranks
    shards = backend.shards(ranks)

    # Parameters that stay gathered are gathered once, after they were stepped.
    gathers = 1 if work.learns else 0
    if backend.sharding == "all":
        gathers = work.batches * (2 if work.learns else 1)
    parameter_bytes = backend.compute_width * work.size.parameters
    gather = links.gather_s(parameter_bytes, shards)

    scatter = 0.0
    scatters = 0
    if work.learns:
        scatters = work.batches if backend.shards_gradients else 1
        width = FLOAT32 if backend.reduce_in_float32 else BFLOAT16
        trained_bytes = width * trained_parameters(work.role, work.size)
        scatter = links.gather_s(trained_bytes, shards)
        scatter += links.sum_s(trained_bytes / shards, ranks // shards, stride=shards)

    exchange = gathers * gather + scatters * scatter
    return _overlapped_s(work, work.compute_s(), exchange, ends_s=gather + scatter)


def _overlapped_s(
    work: Pass, compute_s: float, exchange_s: float, *, ends_s: float
) -> float:
    """Return the time of computation and exchanges that overlap, layer by layer.

    Args:
        work: The pass.
        compute_s: Time of its computation.
        exchange_s: Time of its exchanges.
        ends_s: Time in which all layers are gathered, and their gradients summed, once.
            The first gather and the last sum have nothing to overlap with.
    """
    return max(compute_s, exchange_s) + ends_s / work.shape.num_layers


def _megatron_s(work: Pass, backend: MegatronBackend) -> float:
    """Return the time with megatron-core, whose exchanges wait for each other."""
    links = work.links
    shape = work.shape
    tensor = backend.tensor_parallel
    pipeline = backend.pipeline_parallel
    width = backend.compute_width
    layers = shape.num_layers / pipeline

    compute = work.compute_s()
    compute += _heads_exchange_s(work, backend.context_parallel) / pipeline / tensor
    if tensor > 1:
        # Forward and backward, attention and feed-forward part each end in a sum.
        sums = 2 * layers * work.directions
        hidden_bytes = width * work.tokens * shape.hidden_size
        compute += sums * links.sum_s(hidden_bytes, tensor)
        compute += sums * work.batches * EXCHANGE_LATENCY_S
    if backend.expert_parallel > 1:
        compute += _experts_exchange_s(work, backend) * layers

    # Stages wait for the first micro-batch, and for the last.
    compute *= 1 + (pipeline - 1) / (work.batches * backend.virtual_stages)
    if not work.learns:
        return compute

    # Each update, gradients are scattered, and weights gathered.
    own = work.size.parameters - work.size.in_experts
    own_bytes = (FLOAT32 + width) * own / (tensor * pipeline)
    copies = work.role.num_ranks // (tensor * pipeline)
    exchange = links.gather_s(own_bytes, copies, stride=tensor * pipeline)
    if work.size.in_experts:
        shards = backend.expert_tensor_parallel * backend.expert_parallel * pipeline
        expert_bytes = (FLOAT32 + width) * work.size.in_experts / shards
        expert_copies = work.role.num_ranks // shards
        exchange += links.gather_s(expert_bytes, expert_copies, stride=shards)
    return compute + exchange


def _heads_exchange_s(work: Pass, slices: int) -> float:
    """Return the time in which slices of tokens are exchanged for heads, in all layers.

    Queries, keys and values go one way, and the outputs of attention go back.
    """
    if slices == 1:
        return 0.0
    shape = work.shape
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    nbytes = work.role.backend.compute_width * work.tokens * heads * shape.head_size
    exchanges = work.directions * shape.num_layers
    latency = 4 * exchanges * work.batches * EXCHANGE_LATENCY_S
    # Tensor-parallel ranks, which are neighbours, share the heads.
    tensor = work.role.backend.activation_partition().tensor_parallel
    # A rank receives what it lacks of its own part, not of everybody's.
    received = work.links.gather_s(nbytes, slices, stride=tensor)
    return exchanges * received + latency


def _experts_exchange_s(work: Pass, backend: MegatronBackend) -> float:
    """Return the time in which a layer's tokens go to their experts and come back."""
    shape = work.shape
    chosen = experts_per_token(work.size)
    nbytes = backend.compute_width * work.tokens * chosen * shape.hidden_size
    nbytes /= backend.tensor_parallel
    return 2 * work.directions * work.links.gather_s(nbytes, backend.expert_parallel)


def _optimizer_s(work: Pass) -> float:
    """Return the time of an optimizer's step, which reads and writes its state."""
    backend = work.role.backend
    trained = trained_parameters(work.role, work.size)
    memory = backend.rank_memory(work.role.num_ranks, work.size, trained)
    # The state tells how many ranks share it.
    share = memory.persistent.get("optimizer", 0) / (2 * FLOAT32)
    nbytes = OPTIMIZER_BYTES * min(share, trained)
    if backend.stays_on_host:
        ranks_of_node = min(work.role.num_ranks, work.links.gpus_per_node)
        return nbytes * ranks_of_node / HOST_MEMORY_BYTES_PER_S
    return nbytes / (work.links.gpu.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE)


def experts_per_token(size: ModelSize) -> float:
    """Return the number of experts that a token is given to; 0 without experts."""
    shape = size.shape
    if shape is None or not size.in_experts or not shape.num_experts:
        return 0.0
    active = 3 * shape.hidden_size * shape.intermediate_size * shape.num_layers
    return shape.num_experts * active / size.in_experts
