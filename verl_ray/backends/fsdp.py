"""The `fsdp` backend: FSDP2, and Ulysses sequence parallelism.

Invariant: a setting that would be ignored is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self

from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    ActivationPartition,
    BytesPerPart,
    ModelFacts,
    ModuleBackend,
    ParameterCounts,
    RankMemory,
    Trade,
    adapter_parameters,
)
from verl_ray.backends.layouts import can_exchange
from verl_ray.errors import Problem
from verl_ray.settings.config_json import LANGUAGE_HEAD, chooses_experts
from verl_ray.settings.section import Auto, NonNegative, Positive, resolved
from verl_ray.suggest import either


class FsdpBackend(ModuleBackend):
    """The settings of FSDP2."""

    kind: Literal["fsdp"]
    sharding: Literal["full", "grad_op", "hybrid", "none"]
    """What ranks share. full: parameters, gradients and optimizer state; grad_op: the
    same, but a layer's gathered parameters are kept from its forward to its backward
    pass; hybrid: as full within groups of shard_size ranks, which hold copies of each
    other; none: every rank holds everything."""
    shard_size: Positive | None
    """Ranks per group with sharding=hybrid; null elsewhere."""
    accumulate: Literal["whole", "sharded"] | Auto
    """Gradients of several micro-batches. whole: each rank keeps all of them, and they
    are summed over ranks and cut into shards once, in the last micro-batch; sharded: in
    every micro-batch, which is slower and needs memory for shards alone.

    auto: sharded where the GPU needs it, by the memory plan; whole on a CPU.
    """
    prefetch_layers: NonNegative
    """Layers whose parameters are gathered ahead of the layer that computes, forward
    and backward; 0 = one, as torch itself does. More layers hide a slow network, for
    memory."""
    host_parameters: bool
    """Keep parameters, gradients and optimizer state on the host for good; a layer
    comes to the device to compute, and the optimizer steps on the host."""
    embedding_units: bool
    """Gather embeddings and language head by themselves, only while they are used;
    false = together, for the whole pass. Tied ones are one parameter, used at both
    ends: there it must be false."""
    read_weights: Literal["every_rank", "rank_zero"]
    """Who reads the model's directory: every rank its own slices, or rank 0 each
    tensor, which it sends to all; the latter spares a slow file system, and needs the
    directory on one node only."""
    activation_offload: bool
    """Keep activations that the backward pass needs on the host."""
    sequence_parallel: Positive
    """Ranks that compute the same rows together, each a slice of their tokens
    (Ulysses); 1 = every rank has rows of its own. It must divide the ranks of the role
    and the attention heads of the model."""

    activation_settings: ClassVar[tuple[str, ...]] = (
        "activation_checkpointing",
        "activation_offload",
    )
    gradient_sums: ClassVar[Trade | None] = Trade(
        "accumulate", fast="whole", small="sharded"
    )
    host_offload: ClassVar[Trade | None] = Trade(
        "host_parameters", fast=False, small=True
    )
    token_slices_key: ClassVar[str | None] = "sequence_parallel"
    # torch's Adafactor cannot sum over the rows of sharded matrices (2.11 and 2.13).
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "muon", "sgd")
    moves_expert_biases: ClassVar[bool] = True

    @classmethod
    def in_proofs(cls, tokens: int, *, has_experts: bool) -> Iterator[tuple[int, Self]]:
        settings = cls(
            kind="fsdp",
            dtype="float32",
            micro_batch_tokens_per_rank=tokens,
            activation_checkpointing=False,
            sharding="full",
            shard_size=None,
            accumulate="whole",
            prefetch_layers=0,
            host_parameters=False,
            embedding_units=False,
            read_weights="every_rank",
            activation_offload=False,
            sequence_parallel=1,
        )
        yield 2, settings

    @property
    def peers(self) -> int:
        return self.sequence_parallel

    @property
    def token_slices(self) -> int:
        return self.sequence_parallel

    @property
    def stays_on_host(self) -> bool:
        return self.host_parameters

    # --------------------------------------------------------------------- problems

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._peer_problems(role, num_ranks)
        yield from self._shard_problems(role, num_ranks)

    def _peer_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        """Yield a problem if the ranks cannot be cut into groups of peers."""
        if num_ranks % self.peers == 0:
            return

        sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        yield Problem(
            f"{role}.backend.sequence_parallel",
            self.peers,
            f"{role}.num_ranks={num_ranks} ranks are cut into groups of this size",
            f"Use {either(sizes)}.",
        )

    def _shard_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        """Yield a problem if `sharding` and `shard_size` do not fit the ranks."""
        # Groups of one rank would not shard, and one group of all would be `full`.
        hybrid = self.sharding == "hybrid"
        sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]

        if hybrid and not sizes:
            yield Problem(
                f"{role}.backend.sharding",
                "hybrid",
                f"{role}.num_ranks={num_ranks} cannot be cut into equal groups of more"
                " than one rank",
                "Use full, or a number of ranks that can, such as 4.",
            )
        elif hybrid and self.shard_size not in sizes:
            yield Problem(
                f"{role}.backend.shard_size",
                self.shard_size,
                f"{role}.num_ranks={num_ranks} ranks are cut into groups of this size",
                f"Use {either(sizes)}.",
            )
        elif not hybrid and self.shard_size is not None:
            yield Problem(
                f"{role}.backend.shard_size",
                self.shard_size,
                "this setting would be ignored:"
                f" {role}.backend.sharding={self.sharding} has no groups",
                "Set it to null, or use sharding=hybrid.",
            )

    def model_problems(
        self, role: str, num_ranks: int, model: ModelFacts
    ) -> Iterator[Problem]:
        yield from self._head_problems(role, num_ranks, model)
        yield from self._embedding_problems(role, model)

        has_experts = chooses_experts(model.settings)
        if has_experts and self.token_slices > 1:
            yield Problem(
                f"{role}.backend.sequence_parallel",
                self.token_slices,
                f"{model.path} has experts, whose balance is that of whole rows: rows"
                " cannot be cut",
                f"Set it to 1; or take backend@{role}.backend=megatron, if"
                " docs/megatron.md has the model's family, whose"
                f" {role}.backend.tensor_parallel={self.token_slices} and"
                f" {role}.backend.sequence_parallel=true share a row's tokens out"
                " between the matrices.",
            )

    def _head_problems(
        self, role: str, num_ranks: int, model: ModelFacts
    ) -> Iterator[Problem]:
        """Yield a problem if the peers cannot share the model's attention heads."""
        heads = model.settings.get("num_attention_heads")
        if self.peers == 1 or not isinstance(heads, int) or not heads:
            return

        key_heads = model.settings.get("num_key_value_heads") or heads
        assert isinstance(key_heads, int), "transformers reads it as a number"
        if can_exchange(heads, key_heads, self.peers):
            return

        sizes = [
            size
            for size in range(1, heads + 1)
            if can_exchange(heads, key_heads, size) and num_ranks % size == 0
        ]
        yield Problem(
            f"{role}.backend.sequence_parallel",
            self.peers,
            f"these ranks share out the model's {heads} attention heads and"
            f" {key_heads} key-value heads",
            f"Use {either(sizes)}.",
        )

    def _embedding_problems(self, role: str, model: ModelFacts) -> Iterator[Problem]:
        """Yield a problem if tied embeddings were to be gathered by themselves.

        Tied embeddings are one parameter, used before and after the layers.
        """
        if not self.embedding_units or model.has_value_head or not model.tensors:
            return

        if LANGUAGE_HEAD not in model.tensors:
            yield Problem(
                f"{role}.backend.embedding_units",
                True,
                f"{model.path} ties its embeddings, so they and its head are one"
                " parameter",
                "Set it to false.",
            )

    # ----------------------------------------------------------------------- memory

    def shards(self, num_ranks: int) -> int:
        """Return the number of ranks that share one copy of the model."""
        if self.sharding == "none":
            return 1
        return self.shard_size or num_ranks

    def rank_memory(
        self, num_ranks: int, model: ParameterCounts, trained: int
    ) -> RankMemory:
        shards = self.shards(num_ranks)
        parameters = model.parameters + adapter_parameters(model, trained)
        persistent: BytesPerPart = {
            "weights": FLOAT32 * parameters // shards,
            "optimizer": MOMENTS * trained // shards,
        }
        return RankMemory(persistent, transient=FLOAT32 * trained // shards)

    def working_bytes(
        self,
        num_ranks: int,
        model: ParameterCounts,
        trained: int,
        *,
        batches: int,
        learns: bool,
    ) -> int:
        if self.sharding in ("full", "hybrid"):
            # The layer that computes, the next one, and those that are prefetched.
            gathered_layers = (2 + self.prefetch_layers) * model.largest_layer
            gathered = model.outside_layers + min(model.in_layers, gathered_layers)
        else:
            gathered = model.parameters

        pending_gradients = 0
        if learns and trained:
            # With an adapter only its gradients are on their way.
            share = trained / max(model.parameters, 1)
            largest_unit = max(model.largest_layer, model.outside_layers)
            # Gradients are computed in one type and reduced in float32.
            width = self.compute_width + FLOAT32
            pending_gradients = int(share * width * largest_unit)
            if batches > 1 and resolved(self.accumulate) == "whole":
                pending_gradients += FLOAT32 * trained

        return self.compute_width * gathered + pending_gradients

    def activation_partition(self) -> ActivationPartition:
        partition = super().activation_partition()
        return replace(partition, offloaded=self.activation_offload)
