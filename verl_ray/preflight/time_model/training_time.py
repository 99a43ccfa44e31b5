"""Estimated seconds of the passes of a role on a training backend.

Invariant: pure arithmetic over a role's settings, the size of its model, the lengths of
rows, and the figures of a machine. Rows are balanced over ranks, and the rank with the
most rows counts. Deliberately not here: phases of a step (`step_time.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_ray.backends.base import FLOAT32
from verl_ray.backends.fsdp import FsdpBackend
from verl_ray.backends.megatron import MegatronBackend
from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.roles import ModelRole
from verl_ray.preflight.footprints import BFLOAT16, trained_parameters
from verl_ray.preflight.model_sizes import ModelSize
from verl_ray.preflight.time_model.assumptions import (
    DECODE_BANDWIDTH_SHARE,
    EXCHANGE_LATENCY_S,
    FLOAT32_SLOWDOWN,
    HOST_MEMORY_BYTES_PER_S,
    LAYER_LAUNCH_S,
    TRAINING_EFFICIENCY,
)
from verl_ray.preflight.time_model.links import Links
from verl_ray.profiling.flops import ModelShape

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

    # A micro-batch ends where the next row does not fit: half a row is free.
    per_batch = float(backend.micro_batch_tokens_per_rank)
    per_batch -= rows.mean_tokens / backend.token_slices / 2
    batches = min(rows_per_rank, math.ceil(tokens / max(per_batch, 1)))

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
