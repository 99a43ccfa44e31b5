"""Memory of one rank of a role in bytes, between calls and while it computes.

Sizes of the copies of a model's state are here as well: the weights that are sent, and
the snapshots.

Invariant: the memory that a role on a training backend holds is counted from the
layout alone, and no rank holds less on average. Activations and buffers are estimates
for the largest micro-batch. This is pure arithmetic; nothing is imported that computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ray.backends import Backend
from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    ActivationPartition,
    BytesPerPart,
    MemoryPart,
    RankMemory,
)
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout import VLLM_BATCHED_TOKENS, RolloutEngineConfig
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.ops.chunks import CHUNK_LOGITS, KEPT_LOGITS
from verl_ray.preflight.model_files import ModelSize, model_size
from verl_ray.profiling.flops import ModelShape
from verl_ray.settings.section import resolved
from verl_ray.weight_sync import SLOTS

BFLOAT16 = 2
"""Bytes of a bfloat16 number."""

ROW_BYTES = 64
"""Bytes per token of ids, positions, indices and the columns that a loss reads."""

CERTAIN: frozenset[MemoryPart] = frozenset(
    {"weights", "gradients", "optimizer", "cache", "snapshots"}
)
"""Parts that are counted; the others are estimated.

The optimizer's part is its state, and the average of the weights if there is one.
With Megatron it also has the main weights that the optimizer steps, since they are
offloaded together.
"""


@dataclass(frozen=True)
class Workload:
    """The rows that a rank computes in one call."""

    tokens: int
    """Number of tokens of the largest micro-batch."""

    logit_tokens: int
    """Number of these tokens whose logits are needed."""

    batches: int
    """Number of micro-batches."""

    replays_routing: bool = False
    """Whether rows hold the experts of their tokens."""

    candidates: int = 0
    """Tokens beside the one of a place that are compared, or found, for a teacher."""


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank of a role, in bytes per part."""

    persistent: BytesPerPart
    """Memory between calls."""

    forward: BytesPerPart
    """Additional memory during a pass without gradients."""

    update: BytesPerPart
    """Additional memory during an optimizer step; empty if the role is frozen."""


# -------------------------------------------------------------------- training backends


def footprint(
    role: ModelRole,
    model: ModelSize,
    forward: Workload,
    update: Workload,
    device: str,
    *,
    learns: bool = True,
    averages: bool = False,
) -> Footprint:
    """Return the memory of a role on a training backend.

    Args:
        role: Settings of the role.
        model: Size of its model.
        forward: Rows of a pass without gradients.
        update: Rows of an optimizer step.
        device: "cpu" or "cuda".
        learns: Whether the job trains. False stands for an evaluation alone.
        averages: Whether the weights have an average.
    """
    backend = role.backend
    trained = trained_parameters(role, model) if learns else 0
    memory = _rank_memory(role, model, trained, averages=averages)

    def working(work: Workload, *, learns: bool) -> dict[MemoryPart, int]:
        activations = 0
        if model.shape is not None:
            # An adapter's gradient passes through the head, which has none itself.
            head_learns = learns and trained == model.parameters
            activations = _activations(
                backend,
                model.shape,
                work,
                device,
                learns=learns,
                head_learns=head_learns,
            )
            in_place = backend.sums_tied_gradients_in_place
            if head_learns and model.tied and not in_place:
                activations = max(activations, _embedding_gradients(model.shape))
        buffers = backend.working_bytes(
            role.num_ranks, model, trained, batches=work.batches, learns=learns
        )
        return {"activations": activations, "buffers": buffers}

    update_bytes: BytesPerPart = {}
    if trained:
        update_bytes = {
            "gradients": memory.transient,
            **working(update, learns=True),
        }

    return Footprint(
        persistent=memory.persistent,
        forward=working(forward, learns=False),
        update=update_bytes,
    )


def _rank_memory(
    role: ModelRole, model: ModelSize, trained: int, *, averages: bool
) -> RankMemory:
    """Return the memory that a rank holds, with an average of the weights if any."""
    backend = role.backend
    memory = backend.rank_memory(role.num_ranks, model, trained)
    if not isinstance(role, SupervisedRole) or not trained:
        return memory

    # A backend counts that of AdamW, of the parameters that the rank steps.
    adamw = memory.persistent["optimizer"]
    state = adamw * state_bytes(role, model) // (MOMENTS * trained)
    if averages:
        state += adamw * FLOAT32 // backend.optimizer_width
    persistent: BytesPerPart = {**memory.persistent, "optimizer": state}
    return replace(memory, persistent=persistent)


def state_bytes(role: SupervisedRole, model: ModelSize) -> int:
    """Return the bytes of the optimizer's state over all ranks, without an average."""
    trained = trained_parameters(role, model)
    if role.adapter is None:
        outside = model.outside_layers
        return role.optimizer.state_bytes(trained - outside, outside, model.factors)
    return role.optimizer.state_bytes(trained, 0, model.adapter)


def trained_parameters(role: ModelRole, model: ModelSize) -> int:
    """Return the number of parameters that learn: all, those of an adapter, or none."""
    if not isinstance(role, SupervisedRole):
        return 0
    if role.adapter is None:
        return model.parameters
    return role.adapter.rank * model.adapter


def _activations(
    backend: Backend,
    shape: ModelShape,
    work: Workload,
    device: str,
    *,
    learns: bool,
    head_learns: bool,
) -> int:
    """Return the activations of the layers that a rank holds, and of the head."""
    partition = backend.activation_partition()
    tensor = partition.tensor_parallel
    # Norms see all tokens on every rank, unless the ranks share the tokens.
    norm_ranks = tensor if partition.sequence_parallel else 1

    width = backend.compute_width
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    queries = shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size

    # The layer that is computed at the moment.
    current_layer = work.tokens * (
        FLOAT32 * 2 * hidden // norm_ranks
        + width * (2 * queries + 2 * keys + 3 * inner) // tensor
    )
    head = _head(backend, shape, work, device, learns=learns, head_learns=head_learns)
    # Hidden states before, in and after the last norm, and as ranks exchange them;
    # cosines and sines of positions; the columns of rows.
    positions = 2 * shape.head_size
    token_bytes = work.tokens * (FLOAT32 * (4 * hidden + positions) + ROW_BYTES)
    if work.replays_routing:
        token_bytes += work.tokens * shape.routing_bytes
    if partition.sequence_parallel:
        # Inputs and outputs of matrix products, gathered from all ranks; the host
        # releases them late.
        token_bytes += work.tokens * width * 6 * hidden
    if not learns:
        # Candidates of all micro-batches wait for the last one.
        in_step = work.logit_tokens * work.batches
        token_bytes += _FOUND_CANDIDATE * work.candidates * in_step
        return max(current_layer, head) + token_bytes

    saved_of_layer = work.tokens * _saved_of_layer(shape, partition, width)

    # A pipeline stage holds as many micro-batches as there are stages (1F1B).
    pipeline = partition.pipeline_parallel
    layers = shape.num_layers // pipeline * min(pipeline, work.batches)

    if partition.recompute:
        # While the head computes, no layer is computed again.
        residual = partition.residual_width * hidden // norm_ranks
        inputs = layers * work.tokens * residual
        return inputs + max(saved_of_layer + current_layer, head) + token_bytes

    saved = layers * saved_of_layer
    if partition.offloaded and device != "cpu":
        saved = saved_of_layer
    return saved + max(current_layer, head) + token_bytes


def _saved_of_layer(
    shape: ModelShape, partition: ActivationPartition, width: int
) -> int:
    """Return the bytes per token that the backward pass of a layer needs.

    Norms compute in float32, those of queries and keys too. `tests/preflight` compares
    the sum with measurements of every backend.

    Args:
        shape: Shape of the model.
        partition: How the activations of a rank are reduced.
        width: Bytes of a number in the type of the computation.
    """
    tensor = partition.tensor_parallel
    norm_ranks = tensor if partition.sequence_parallel else 1
    queries = shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size
    inner = shape.intermediate_size

    # The two norms and additions; of attention, queries and outputs before and after
    # norms and exchanges, keys and values; of the feed-forward part, the gate, its
    # activation, the up projection and their product.
    hidden_bytes = 2 * FLOAT32 + 4 * partition.residual_width
    query_bytes = FLOAT32 + 4 * width
    key_bytes = FLOAT32 + 3 * width
    inner_bytes = 4 * width
    position_bytes = 0

    if partition.residual_width > width:
        # The inputs of matrix products are copies.
        hidden_bytes += width
    if partition.fused:
        hidden_bytes += FLOAT32
        query_bytes += width
        key_bytes += width
        inner_bytes += width
        # Every layer has cosines and sines of positions, for queries and for keys.
        position_bytes = 4 * width

    parts = query_bytes * queries + key_bytes * keys + inner_bytes * inner
    whole = hidden_bytes * shape.hidden_size // norm_ranks
    return whole + parts // tensor + position_bytes * shape.head_size


def _head(
    backend: Backend,
    shape: ModelShape,
    work: Workload,
    device: str,
    *,
    learns: bool,
    head_learns: bool,
) -> int:
    """Return the memory for logits, or for the values of a head with one number.

    Args:
        backend: Backend, whose tensor-parallel ranks share the vocabulary.
        shape: Shape of the model.
        work: Rows that are computed.
        device: "cpu" or "cuda".
        learns: Whether there is a backward pass.
        head_learns: Whether it makes a gradient of the head.
    """
    logit_tokens = work.logit_tokens
    if shape.vocab_size == 1:
        return FLOAT32 * logit_tokens * shape.hidden_size

    width = backend.compute_width
    tensor = backend.activation_partition().tensor_parallel
    words = -(-shape.vocab_size // tensor)
    logits = logit_tokens * words
    # A chunk of logits in float32 and its log-probs; with gradients, theirs too.
    chunk = (3 if learns else 2) * FLOAT32 * min(logits, CHUNK_LOGITS[device])
    # The hidden states of these tokens.
    chunk += FLOAT32 * logit_tokens * shape.hidden_size
    if learns:
        chunk += _LEARNED_CANDIDATE * work.candidates * logit_tokens

    if logits <= KEPT_LOGITS:
        copies = 2 if learns else 1
        return chunk + width * logits * copies

    # Logits are computed again in the backward pass, which sums the head's gradient.
    if head_learns:
        # Its share of a chunk is as large, in the type of the computation.
        widths = FLOAT32 + (width if width != FLOAT32 else 0)
        return chunk + widths * words * shape.hidden_size
    return chunk


_LEARNED_CANDIDATE = 48
"""Bytes of a candidate in an update: its number, both log-probs, and what the
divergence keeps for the backward pass (33, measured with its saved tensors)."""

_FOUND_CANDIDATE = 20
"""Bytes of a candidate that is found: its number and log-prob, and the former once more
while micro-batches are joined."""


def _embedding_gradients(shape: ModelShape) -> int:
    """Return what a tied embedding adds to the gradients at the end of an update.

    Its gradient as an embedding, and the sum with that as a head, are there next to it.
    """
    return 2 * FLOAT32 * shape.vocab_size * shape.hidden_size


# ---------------------------------------------------------------------- rollout engines


def engine_footprint(
    engine: RolloutEngineConfig,
    model: ModelSize,
    prompt_tokens: int,
    requests: int,
    device: str,
    *,
    scored_tokens: int = 0,
) -> Footprint:
    """Return the memory of one rank of a vLLM engine.

    Args:
        engine: Settings of the engine.
        model: Size of its model.
        prompt_tokens: Number of tokens of all prompts of a replica.
        requests: Number of requests of a replica.
        device: "cpu" or "cuda".
        scored_tokens: Number of tokens of the longest prompt whose log-probs may be
            asked for.
    """
    width = FLOAT32 if resolved(engine.dtype) == "float32" else BFLOAT16
    tensor = engine.tensor_parallel

    # The largest stage has a layer more than others, the first and the last one have
    # what is outside of layers.
    stages = engine.pipeline_parallel
    layers = model.shape.num_layers if model.shape else stages
    stage = model.in_layers * -(-layers // stages) // max(layers, 1)
    outside = model.parameters - model.in_layers
    # vLLM quantizes the layers' matrices, nearly all there is of them.
    width_in_layers = width if engine.quantization is None else 1
    persistent: dict[MemoryPart, int] = {
        "weights": (width_in_layers * stage + width * outside) // tensor,
        "cache": int(resolved(engine.kv_cache_gib) * 2**30),
    }

    shape = model.shape
    if shape is None:
        return Footprint(persistent, {"activations": 0}, {})

    # On a CPU vLLM packs a copy of the head for the processor's instructions.
    if model.tied and device == "cpu":
        persistent["buffers"] = width * shape.vocab_size * shape.hidden_size // tensor

    # vLLM limits the tokens and the requests of one forward pass.
    most_tokens = engine.vllm_args.get("max_num_batched_tokens")
    if not isinstance(most_tokens, int):
        most_tokens = VLLM_BATCHED_TOKENS
    tokens = min(prompt_tokens, most_tokens)
    running = min(requests, engine.batched_requests)

    queries = shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size
    parallel = 2 * queries + 2 * keys + 3 * shape.intermediate_size
    layer = tokens * width * (4 * shape.hidden_size + parallel // tensor)
    # The logits of a prompt that is scored come after those of the requests.
    rows = running + min(scored_tokens, most_tokens)
    logits = 3 * FLOAT32 * rows * shape.vocab_size
    return Footprint(persistent, {"activations": max(layer, logits)}, {})


# ------------------------------------------------------------ copies of a model's state


def sent_width(config: RolloutTaskConfig) -> int:
    """Return the bytes of a weight as it is sent to the rollout engines.

    It is sent in the type of the trainer or of the engines, whichever is narrower.
    """
    if resolved(config.rollout.dtype) == "bfloat16":
        return 2
    return config.actor.backend.sent_width


def sent_bytes(config: RolloutTaskConfig) -> int:
    """Return the size of all weights as they are sent to the rollout engines."""
    size = model_size("actor", config.actor, config)
    return sent_width(config) * size.parameters


def wire_bytes(config: RolloutTaskConfig) -> int:
    """Return the size of the shared memory through which weights are sent."""
    sync = config.rollout.sync
    if sync.wire != "shared_memory":
        return 0
    return SLOTS * min(sent_bytes(config), sync.bucket_bytes)


def snapshot_bytes(config: Config) -> dict[str, int]:
    """Return the size of a rank's snapshots, for each role that learns.

    There are two of them, each of what the rank holds of the weights that learn and of
    the state of the optimizer. With second copies a node has as many of other ranks.
    """
    num_snapshots = 2 * config.run.recovery.num_copies
    sizes = {}
    for name, role in config.model_roles.items():
        model = model_size(name, role, config)
        trained = trained_parameters(role, model)
        if trained:
            averages = config.average_decay(name) is not None
            held = _rank_memory(role, model, trained, averages=averages).persistent
            weights = held.get("weights", 0) * trained // model.parameters
            sizes[name] = num_snapshots * (weights + held.get("optimizer", 0))
    return sizes
