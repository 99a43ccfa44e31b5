"""The `megatron_fsdp` backend: NVIDIA's Megatron-FSDP, which packs parameters, gradients and optimizer state into
buffers.

Invariant: every setting does something, or is refused with the one that it depends on. What is held between steps is
counted without the padding of buckets, which is a few rows each; `verl-ray bench megatron_fsdp_memory` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_ray.backends.base import FLOAT32, MOMENTS, Bytes, ModuleBackend, ParameterCounts, State
from verl_ray.config.section import Positive
from verl_ray.config.suggest import either
from verl_ray.errors import Problem
from verl_ray.lazy import Lazy


@dataclass(frozen=True)
class Held:
    """Of one rank of a model whose every parameter learns, in bytes."""

    weights: int  # that compute
    main_weights: int  # that the optimizer steps, where they are not the same
    gradients: int
    moments: int
    in_flight: int  # at most, while a step computes: gathered layers, and gradients on their way

    @property
    def between_steps(self) -> int:
        return self.weights + self.main_weights + self.gradients + self.moments


class MegatronFsdpBackend(ModuleBackend):
    kind: Literal["megatron_fsdp"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the weights that compute; main weights and gradients, log-probs and losses are always float32."""
    sharding: Literal["none", "optimizer", "optimizer_gradients", "all"]
    """What ranks share out: nothing, the optimizer's state and main weights, gradients too, parameters too (then each
    layer is gathered for its own computation alone)."""
    shard_size: Positive | None
    """Ranks per group that shares out; the groups, an outer data-parallel axis, hold copies of each other. null = all
    ranks are one group."""
    outer_sharding: Literal["none", "optimizer"]
    """What the groups share out between them, with sharding=all: nothing, or the optimizer's state, main weights and
    gradients."""
    overlap_param_gather: bool
    """Gather parameters while others compute, each before it is used; false = all of them, right after each step. With
    sharding=all it must be true."""
    overlap_grad_reduce: bool
    """Sum gradients over ranks while the last micro-batch computes others; false = all of them after it. With gradients
    shared out it must be true."""
    bucket_size: Positive | None
    """Elements after which a buffer of parameters is full, where it is no layer's; of as many, gradients wait to be
    summed, and half as many are gathered ahead. null = one buffer, and the package's 500 million ahead."""
    reduce_in_float32: bool
    """Type in which gradients are summed over ranks; false = bfloat16, which halves what is sent."""
    double_buffer: bool
    """With sharding=all: gathered layers and their gradients take turns in two buffers that are kept, in place of
    memory that comes and goes."""

    engine: ClassVar[Lazy] = Lazy("verl_ray.engine.megatron_fsdp.engine:MegatronFsdpEngine")
    packages: ClassVar[tuple[str, ...]] = ("megatron.core", "megatron_fsdp")
    of_gradients: ClassVar[tuple[str, ...]] = ("overlap_grad_reduce", "reduce_in_float32")
    gradients_leave_with_weights: ClassVar[bool] = True

    @classmethod
    def prepare_cpu(cls) -> None:
        Lazy("verl_ray.engine.megatron.shim:install")(core=False)

    @property
    def moved_width(self) -> int:
        return FLOAT32 + MOMENTS + (self.width if self.width != FLOAT32 else 0)

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._group_problems(role, num_ranks)
        yield from self._overlap_problems(role)

    def _group_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        size, key = self.shard_size, f"{role}.backend.shard_size"
        sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]
        if size is not None and self.sharding == "none":
            rule = f"this setting would be ignored: {role}.backend.sharding=none shares nothing out"
            yield Problem(key, size, rule, "Set it to null, or choose another sharding.")
        elif size is not None and size not in sizes:
            rule = f"{role}.num_ranks={num_ranks} ranks are cut into several groups of this size, of more than one rank"
            fix = f"Use {either(sizes)}, or null for one group." if sizes else "Set it to null: one group."
            yield Problem(key, size, rule, fix)
        if self.outer_sharding != "none" and (size is None or self.sharding != "all"):
            rule = "groups that hold copies (shard_size) can share out the optimizer's state once sharding=all"
            fix = f"Set it to none, or {role}.backend.sharding=all and {role}.backend.shard_size."
            yield Problem(f"{role}.backend.outer_sharding", self.outer_sharding, rule, fix)

    def _overlap_problems(self, role: str) -> Iterator[Problem]:
        held = f"{role}.backend.sharding={self.sharding}"
        gathers, sharded_gradients = self.sharding != "none", self.sharding in ("optimizer_gradients", "all")
        if not self.overlap_param_gather and (self.sharding == "all" or not gathers):
            why = "gathers each layer when it computes" if gathers else "gathers nothing"
            rule, fix = f"{held} {why}", "Set it to true, or use sharding=optimizer or optimizer_gradients."
            yield Problem(f"{role}.backend.overlap_param_gather", False, rule, fix)
        if not self.overlap_grad_reduce and sharded_gradients:
            rule = f"{held} has no room for all gradients, so they are summed as they come"
            fix = "Set it to true, or use sharding=none or optimizer."
            yield Problem(f"{role}.backend.overlap_grad_reduce", False, rule, fix)
        if self.double_buffer and self.sharding != "all":
            rule = f"this setting would be ignored: {held} gathers no layer by itself"
            yield Problem(f"{role}.backend.double_buffer", True, rule, "Set it to false, or use sharding=all.")

    def held(self, num_ranks: int, model: ParameterCounts) -> Held:
        """What one of so many ranks holds of a model whose every parameter learns."""
        inner = self.shard_size or num_ranks
        stepped = num_ranks if self.outer_sharding == "optimizer" else inner  # who shares out the optimizer's state
        shared, alone, whole = self.sharding, self.sharding == "none", model.parameters
        largest, bucket = max(model.largest_layer, 1), self.bucket_size or 10**9
        weights, in_flight = self.width * whole, 0
        if shared == "all" and inner > 1:
            # beside the shard: what is no layer stays gathered once it was
            weights = self.width * whole // inner + self.width * model.beside
            ahead = math.ceil(bucket / 2 / largest)
            in_flight += self.width * min(model.in_layers, (1 + ahead) * largest)
        if shared in ("optimizer_gradients", "all") and inner > 1:
            # as many wait to be summed, while the next ones are filled
            in_flight += FLOAT32 * min(whole, bucket + (largest if shared == "all" else bucket))
        gradients = FLOAT32 * whole // (inner if shared in ("optimizer_gradients", "all") else 1)
        optimizer = whole // (1 if alone else stepped)
        main = FLOAT32 * optimizer if self.width != FLOAT32 else 0
        return Held(weights, main, gradients, MOMENTS * optimizer, in_flight)

    def state(self, num_ranks: int, model: ParameterCounts, trained: int) -> State:
        found = self.held(num_ranks, model)
        if trained != model.parameters:
            adapter = trained // num_ranks
            kept: Bytes = {"weights": found.weights, "gradients": FLOAT32 * adapter, "optimizer": MOMENTS * adapter}
            return State(kept)
        weights = found.weights + found.main_weights  # they are moved together
        return State({"weights": weights, "gradients": found.gradients, "optimizer": found.moments})

    def in_flight(self, num_ranks: int, model: ParameterCounts, trained: int, *, batches: int, learns: bool) -> int:
        found = self.held(num_ranks, model).in_flight
        return found if learns else found // 2
