"""The `megatron_fsdp` backend: NVIDIA's Megatron-FSDP, which packs parameters,
gradients and optimizer state into buffers.

Invariant: every setting has an effect, or is refused with the setting that it depends
on. The memory between steps is counted without the padding of buckets, which is a few
rows each; `python -m scripts.bench megatron_fsdp_memory` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    BytesPerPart,
    ModuleBackend,
    ParameterCounts,
    RankMemory,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import Auto, Dtype, Positive
from verl_ray.suggest import either

UNBOUNDED_BUCKET = 10**9
"""Elements of a bucket if `bucket_size` is null: the package looks 500 million elements
ahead, half a bucket."""


@dataclass(frozen=True)
class MegatronFsdpMemory:
    """The memory of one rank of a model whose parameters all learn, in bytes.

    Attributes:
        weights: Weights that compute.
        main_weights: Weights that the optimizer steps, if they are separate.
        gradients: Gradients that are kept between micro-batches.
        moments: AdamW's moments.
        in_flight: The most that gathered layers and gradients waiting to be reduced
            take while a step computes.
    """

    weights: int
    main_weights: int
    gradients: int
    moments: int
    in_flight: int


class MegatronFsdpBackend(ModuleBackend):
    """The settings of Megatron-FSDP."""

    kind: Literal["megatron_fsdp"]
    dtype: Dtype | Auto
    """Type of the weights that compute; main weights and gradients, log-probs and
    losses are always float32."""
    sharding: Literal["none", "optimizer", "optimizer_gradients", "all"]
    """What ranks share: nothing, the optimizer's state and main weights, gradients too,
    parameters too (then each layer is gathered for its own computation alone)."""
    shard_size: Positive | None
    """Ranks per group that shares; the groups, an outer data-parallel axis, hold copies
    of each other. null = all ranks are one group."""
    outer_sharding: Literal["none", "optimizer"]
    """What the groups share with each other, with sharding=all: nothing, or the
    optimizer's state, main weights and gradients."""
    overlap_param_gather: bool
    """Gather parameters while others compute, each before it is used; false = all of
    them, right after each step. With sharding=all it must be true."""
    overlap_grad_reduce: bool
    """Sum gradients over ranks while the last micro-batch computes others; false = all
    of them after it. With sharded gradients it must be true."""
    bucket_size: Positive | None
    """Elements after which a buffer of parameters is full, unless it belongs to a
    layer; as many elements of gradients wait to be summed, and half as many elements
    are gathered ahead. null = one buffer, and the package's 500 million ahead."""
    reduce_in_float32: bool
    """Type in which gradients are summed over ranks; false = bfloat16, which halves
    what is sent."""
    double_buffer: bool
    """With sharding=all: gathered layers and their gradients alternate between two
    buffers that are kept, instead of memory that is allocated for each."""

    packages: ClassVar[tuple[str, ...]] = ("megatron.core", "megatron_fsdp")
    extra: ClassVar[str] = "megatron"
    gradient_settings: ClassVar[tuple[str, ...]] = (
        "overlap_grad_reduce",
        "reduce_in_float32",
    )
    releases_gradients_with_weights: ClassVar[bool] = True

    @property
    def shards_gradients(self) -> bool:
        """Whether ranks share gradients, which are summed in every micro-batch."""
        return self.sharding in ("optimizer_gradients", "all")

    def shards(self, num_ranks: int) -> int:
        """Return the number of ranks that share one copy of what is shared."""
        if self.sharding == "none":
            return 1
        return self.shard_size or num_ranks

    # ----------------------------------------------------------------------- problems

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._group_problems(role, num_ranks)
        yield from self._outer_problems(role)
        yield from self._overlap_problems(role)
        yield from self._buffer_problems(role)

    def _group_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        """Yield a problem if `shard_size` does not fit the ranks or the sharding."""
        if self.shard_size is None:
            return

        key = f"{role}.backend.shard_size"
        sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]
        if self.sharding == "none":
            yield Problem(
                key,
                self.shard_size,
                f"this setting would be ignored: {role}.backend.sharding=none shares"
                " nothing out",
                "Set it to null, or choose another sharding.",
            )
        elif self.shard_size not in sizes:
            fix = "Set it to null: one group."
            if sizes:
                fix = f"Use {either(sizes)}, or null for one group."
            yield Problem(
                key,
                self.shard_size,
                f"{role}.num_ranks={num_ranks} ranks are cut into several groups of"
                " this size, of more than one rank",
                fix,
            )

    def _outer_problems(self, role: str) -> Iterator[Problem]:
        """Yield a problem if `outer_sharding` has no groups to apply to."""
        if self.outer_sharding == "none":
            return

        if self.shard_size is None or self.sharding != "all":
            yield Problem(
                f"{role}.backend.outer_sharding",
                self.outer_sharding,
                "groups that hold copies (shard_size) can share out the optimizer's"
                " state once sharding=all",
                f"Set it to none, or {role}.backend.sharding=all and"
                f" {role}.backend.shard_size.",
            )

    def _overlap_problems(self, role: str) -> Iterator[Problem]:
        """Yield the communication that must overlap with this sharding, or cannot."""
        sharding = f"{role}.backend.sharding={self.sharding}"

        if not self.overlap_param_gather and self.sharding in ("none", "all"):
            reason = "gathers each layer when it computes"
            if self.sharding == "none":
                reason = "gathers nothing"
            yield Problem(
                f"{role}.backend.overlap_param_gather",
                False,
                f"{sharding} {reason}",
                "Set it to true, or use sharding=optimizer or optimizer_gradients.",
            )

        if not self.overlap_grad_reduce and self.shards_gradients:
            yield Problem(
                f"{role}.backend.overlap_grad_reduce",
                False,
                f"{sharding} has no memory for all gradients, so they are summed as"
                " they are computed",
                "Set it to true, or use sharding=none or optimizer.",
            )

    def _buffer_problems(self, role: str) -> Iterator[Problem]:
        """Yield a problem if no layers are gathered that a double buffer would hold."""
        if self.double_buffer and self.sharding != "all":
            yield Problem(
                f"{role}.backend.double_buffer",
                True,
                "this setting would be ignored:"
                f" {role}.backend.sharding={self.sharding} gathers no layer by itself",
                "Set it to false, or use sharding=all.",
            )

    # ------------------------------------------------------------------------- memory

    def memory_per_rank(
        self, num_ranks: int, model: ParameterCounts
    ) -> MegatronFsdpMemory:
        """Return the memory of one rank of a model whose parameters all learn."""
        group_size = self.shard_size or num_ranks
        parameters = model.parameters

        weights = self.compute_width * parameters
        if self.sharding == "all" and group_size > 1:
            # Parameters outside of layers stay gathered once they were, in addition to
            # the shard.
            shard = weights // group_size
            weights = shard + self.compute_width * model.outside_layers

        # Between micro-batches a rank keeps all gradients that are not sharded.
        gradient_shards = group_size if self.shards_gradients else 1
        stepped = parameters // self._optimizer_shards(num_ranks)
        main_weights = 0
        if self.compute_width != FLOAT32:
            main_weights = FLOAT32 * stepped

        return MegatronFsdpMemory(
            weights=weights,
            main_weights=main_weights,
            gradients=FLOAT32 * parameters // gradient_shards,
            moments=MOMENTS * stepped,
            in_flight=self._bytes_in_flight(model, group_size),
        )

    def _optimizer_shards(self, num_ranks: int) -> int:
        """Return the number of ranks that share the optimizer's state."""
        if self.outer_sharding == "optimizer":
            return num_ranks
        return self.shards(num_ranks)

    def _bytes_in_flight(self, model: ParameterCounts, group_size: int) -> int:
        """Return the most bytes of gathered layers and of gradients to be reduced."""
        if group_size == 1:
            return 0

        largest_layer = max(model.largest_layer, 1)
        bucket = self.bucket_size or UNBOUNDED_BUCKET
        in_flight = 0

        if self.sharding == "all":
            layers_ahead = math.ceil(bucket / 2 / largest_layer)
            gathered = min(model.in_layers, (1 + layers_ahead) * largest_layer)
            in_flight += self.compute_width * gathered

        if self.shards_gradients:
            # A bucket waits to be summed while the next one is filled; with
            # sharding=all the buckets are layers.
            next_bucket = largest_layer if self.sharding == "all" else bucket
            in_flight += FLOAT32 * min(model.parameters, bucket + next_bucket)

        return in_flight

    def rank_memory(
        self, num_ranks: int, model: ParameterCounts, trained: int
    ) -> RankMemory:
        memory = self.memory_per_rank(num_ranks, model)

        if trained != model.parameters:
            adapter = trained // num_ranks
            with_adapter: BytesPerPart = {
                "weights": memory.weights,
                "gradients": FLOAT32 * adapter,
                "optimizer": MOMENTS * adapter,
            }
            return RankMemory(with_adapter)

        # Main weights count as weights, because they are offloaded together.
        persistent: BytesPerPart = {
            "weights": memory.weights + memory.main_weights,
            "gradients": memory.gradients,
            "optimizer": memory.moments,
        }
        return RankMemory(persistent)

    def working_bytes(
        self,
        num_ranks: int,
        model: ParameterCounts,
        trained: int,
        *,
        batches: int,
        learns: bool,
    ) -> int:
        in_flight = self.memory_per_rank(num_ranks, model).in_flight
        if learns:
            # Gradients of a module exist before they are added to those that are kept,
            # and those of a layer may still be there, in the type of these.
            largest_module = max(model.largest_layer, model.outside_layers)
            waiting = self.compute_width * largest_module
            return max(in_flight, waiting + FLOAT32 * model.largest_layer)
        # Without a backward pass no gradients are in flight: about half.
        return in_flight // 2
