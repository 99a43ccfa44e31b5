"""The training backends: how a role's model computes, and where its tensors are.

Invariant: a backend's settings change speed and memory, never what a role computes. Deliberately not here: what a
role learns (`roles`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

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

    token_slices_key: ClassVar[str | None] = None
    """The key that says `token_slices`; None where there is no such choice."""

    @property
    def peers(self) -> int:
        """Ranks that are given the same rows, and compute them together."""
        return 1

    @property
    def token_slices(self) -> int:
        """Into how many slices, one per peer, the tokens of a micro-batch are cut."""
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

    token_slices_key: ClassVar[str | None] = "sequence_parallel"

    @property
    def peers(self) -> int:
        """As of the engine backend."""
        return self.sequence_parallel

    @property
    def token_slices(self) -> int:
        """As of the engine backend."""
        return self.sequence_parallel


class MegatronBackend(Section):
    kind: Literal["megatron"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the weights that compute; main weights and gradients, log-probs and losses are always float32."""
    micro_batch_tokens_per_rank: Positive
    """As for the engine backend."""
    tensor_parallel: Positive
    """Ranks that share out each layer's matrices and heads, and the vocabulary."""
    sequence_parallel: bool
    """Between the matrices, each of the tensor_parallel ranks holds a slice of the tokens in place of all."""
    pipeline_parallel: Positive
    """Ranks that share out the layers; micro-batches go through them one behind the other (1F1B)."""
    virtual_stages: Positive
    """Runs of layers per pipeline rank (interleaved 1F1B): smaller bubbles for more messages; 1 = one run."""
    context_parallel: Positive
    """Ranks that share out the tokens of each row; within attention they share out its heads."""
    expert_parallel: Positive
    """Ranks, of those with rows of their own, that share out the experts of each layer."""
    expert_tensor_parallel: Positive
    """Ranks that share out each expert's matrices."""
    recompute: Literal["none", "selective", "full"]
    """What the backward pass computes again instead of keeping it: attention alone (selective), or whole layers."""

    token_slices_key: ClassVar[str | None] = "context_parallel"

    @property
    def peers(self) -> int:
        """As of the engine backend."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def token_slices(self) -> int:
        """As of the engine backend."""
        return self.context_parallel


class MegatronFsdpBackend(Section):
    kind: Literal["megatron_fsdp"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the weights that compute; main weights and gradients, log-probs and losses are always float32."""
    micro_batch_tokens_per_rank: Positive
    """As for the engine backend."""
    activation_checkpointing: bool
    """As for the engine backend."""
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

    token_slices_key: ClassVar[str | None] = None

    @property
    def peers(self) -> int:
        """As of the engine backend."""
        return 1

    @property
    def token_slices(self) -> int:
        """As of the engine backend."""
        return 1


Backend = Annotated[EngineBackend | FsdpBackend | MegatronBackend | MegatronFsdpBackend, Field(discriminator="kind")]

BACKENDS: dict[str, type[Section]] = {
    get_args(one.model_fields["kind"].annotation)[0]: one for one in get_args(get_args(Backend)[0])
}
"""The settings of each choice of the group `backend`, by its name."""
