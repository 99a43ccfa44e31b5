"""The training backends: how a role's model computes, and where its tensors are.

Invariant: a backend's settings change speed and memory, never what a role computes. Deliberately not here: what a
role learns (`roles`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.section import NonNegative, Positive, Section


class EngineBackend(Section):
    kind: Literal["engine"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the forward and backward computation; master weights, log-probs and losses are always float32."""
    micro_batch_tokens_per_rank: Positive
    """The most tokens one rank takes through the model at once."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass instead of keeping them."""

    @property
    def peers(self) -> int:
        """Neighbouring ranks that are given the same rows, and compute them together."""
        return 1


class FsdpBackend(Section):
    kind: Literal["fsdp"]
    dtype: Literal["float32", "bfloat16"]
    """As for the engine backend."""
    micro_batch_tokens_per_rank: Positive
    """As for the engine backend."""
    activation_checkpointing: bool
    """As for the engine backend."""
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

    @property
    def peers(self) -> int:
        """As of the engine backend."""
        return self.sequence_parallel


Backend = Annotated[EngineBackend | FsdpBackend, Field(discriminator="kind")]
