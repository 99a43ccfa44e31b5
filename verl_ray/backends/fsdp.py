"""The `fsdp` backend: FSDP2, and slices of the tokens of a row on several ranks (Ulysses)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from verl_ray.backends.base import FLOAT32, MOMENTS, Bytes, Cut, ModelFacts, ModuleBackend, ParameterCounts, State
from verl_ray.backends.layouts import can_exchange
from verl_ray.config.section import NonNegative, Positive
from verl_ray.config.suggest import either
from verl_ray.errors import Problem
from verl_ray.lazy import Lazy
from verl_ray.models.families import LANGUAGE_HEAD, WITH_EXPERTS


class FsdpBackend(ModuleBackend):
    kind: Literal["fsdp"]
    sharding: Literal["full", "grad_op", "hybrid", "none"]
    """What ranks share out. full: parameters, gradients and optimizer state; grad_op: the same, but a layer's gathered
    parameters are kept from its forward to its backward pass; hybrid: as full within groups of shard_size ranks, which
    hold copies of each other; none: every rank holds everything."""
    shard_size: Positive | None
    """Ranks per group with sharding=hybrid; null elsewhere."""
    accumulate: Literal["whole", "sharded"]
    """Gradients of several micro-batches. whole: each rank keeps all of them, and they are summed over ranks and cut
    into shards once, in the last; sharded: in every one, which is slower and needs memory for shards alone."""
    prefetch_layers: NonNegative
    """Layers whose parameters are gathered ahead of the one that computes, forward and backward; 0 = one, as torch
    itself does. More hide a slow network, for memory."""
    host_parameters: bool
    """Keep parameters, gradients and optimizer state on the host for good; a layer comes to the device to compute, and
    the optimizer steps on the host."""
    embedding_units: bool
    """Gather embeddings and language head by themselves, only while they are used; false = together, for the whole
    pass. Tied ones are one parameter, used at both ends: there it must be false."""
    read_weights: Literal["every_rank", "rank_zero"]
    """Who reads the model's directory: every rank its own slices, or rank 0 each tensor, which it sends to all; the
    latter spares a slow file system, and needs the directory on one node only."""
    activation_offload: bool
    """Keep what the backward pass needs of the forward pass on the host."""
    sequence_parallel: Positive
    """Ranks that compute the same rows together, each a slice of their tokens (Ulysses); 1 = every rank has rows of its
    own. It must divide the ranks of the role and the attention heads of the model."""

    engine: ClassVar[Lazy] = Lazy("verl_ray.engine.fsdp:FsdpEngine")
    of_activations: ClassVar[tuple[str, ...]] = ("activation_checkpointing", "activation_offload")
    token_slices_key: ClassVar[str | None] = "sequence_parallel"

    @property
    def peers(self) -> int:
        return self.sequence_parallel

    @property
    def token_slices(self) -> int:
        return self.sequence_parallel

    @property
    def stays_on_host(self) -> bool:
        return self.host_parameters

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._peer_problems(role, num_ranks)
        yield from self._shard_problems(role, num_ranks)

    def _peer_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        if num_ranks % self.peers:
            sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
            rule = f"{role}.num_ranks={num_ranks} ranks are cut into groups of this size"
            yield Problem(f"{role}.backend.sequence_parallel", self.peers, rule, f"Use {either(sizes)}.")

    def _shard_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        key, hybrid = f"{role}.backend.shard_size", self.sharding == "hybrid"
        sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]
        if hybrid and not sizes:
            rule = f"{role}.num_ranks={num_ranks} cannot be cut into equal groups of more than one rank"
            fix = "Use full, or a number of ranks that can, such as 4."
            yield Problem(f"{role}.backend.sharding", "hybrid", rule, fix)
        elif hybrid and self.shard_size not in sizes:
            rule = f"{role}.num_ranks={num_ranks} ranks are cut into groups of this size"
            yield Problem(key, self.shard_size, rule, f"Use {either(sizes)}.")
        elif not hybrid and self.shard_size is not None:
            rule = f"this setting would be ignored: {role}.backend.sharding={self.sharding} has no groups"
            yield Problem(key, self.shard_size, rule, "Set it to null, or use sharding=hybrid.")

    def model_problems(self, role: str, num_ranks: int, model: ModelFacts) -> Iterator[Problem]:
        yield from self._head_problems(role, num_ranks, model)
        yield from self._embedding_problems(role, model)
        if self.token_slices > 1 and model.settings.get("model_type") in WITH_EXPERTS:
            rule = f"{model.path} has experts, whose balance is that of whole rows: none is cut"
            yield Problem(f"{role}.backend.sequence_parallel", self.token_slices, rule, "Set it to 1.")

    def _head_problems(self, role: str, num_ranks: int, model: ModelFacts) -> Iterator[Problem]:
        """Ranks that compute the same rows share out the attention heads of the model."""
        heads = model.settings.get("num_attention_heads")
        if self.peers == 1 or not isinstance(heads, int):
            return
        shared = model.settings.get("num_key_value_heads") or heads
        assert isinstance(shared, int), "transformers reads it as a number"
        if not can_exchange(heads, shared, self.peers):
            fitting = (size for size in range(1, heads + 1) if can_exchange(heads, shared, size))
            sizes = [size for size in fitting if num_ranks % size == 0]
            rule = f"these ranks share out the model's {heads} attention heads and {shared} key-value heads"
            yield Problem(f"{role}.backend.sequence_parallel", self.peers, rule, f"Use {either(sizes)}.")

    def _embedding_problems(self, role: str, model: ModelFacts) -> Iterator[Problem]:
        """Tied embeddings are one parameter, used before and behind the layers: it cannot be gathered apart."""
        if self.embedding_units and not model.reads_values and model.tensors and LANGUAGE_HEAD not in model.tensors:
            rule = f"{model.path} ties its embeddings, so they and its head are one parameter"
            yield Problem(f"{role}.backend.embedding_units", True, rule, "Set it to false.")

    def shards(self, num_ranks: int) -> int:
        """Ranks that share one copy out."""
        return 1 if self.sharding == "none" else self.shard_size or num_ranks

    def state(self, num_ranks: int, model: ParameterCounts, trained: int) -> State:
        shards, adapter = self.shards(num_ranks), trained if trained != model.parameters else 0
        weights = FLOAT32 * (model.parameters + adapter)
        kept: Bytes = {"weights": weights // shards, "optimizer": MOMENTS * trained // shards}
        return State(kept, passing=FLOAT32 * trained // shards)

    def in_flight(self, num_ranks: int, model: ParameterCounts, trained: int, *, batches: int, learns: bool) -> int:
        if self.sharding in ("full", "hybrid"):
            whole = model.beside + min(model.in_layers, (2 + self.prefetch_layers) * model.largest_layer)
        else:
            whole = model.parameters
        on_their_way = 0
        if learns and trained:
            share = trained / max(model.parameters, 1)
            on_their_way = int(share * (self.width + FLOAT32) * max(model.largest_layer, model.beside))
            if batches > 1 and self.accumulate == "whole":
                on_their_way += FLOAT32 * trained
        return self.width * whole + on_their_way

    def cut(self) -> Cut:
        return replace(super().cut(), on_host=self.activation_offload)
