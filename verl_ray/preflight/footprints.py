"""What one rank of a role holds of its model between calls, and what it needs beside while it computes: in bytes.

Invariant: of roles on a training backend, what is held is counted from the layout alone, and no rank holds less on
average; activations and buffers are estimates of the largest micro-batch. Pure arithmetic; nothing is imported that
computes. Deliberately not here: which role works when, and where its state is meanwhile (`memory_plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl_ray.config.backends import EngineBackend, FsdpBackend, MegatronBackend, MegatronFsdpBackend
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS, RolloutEngineConfig
from verl_ray.engine.megatron_fsdp.memory import Elements, Held, held
from verl_ray.ops.chunks import CHUNK_LOGITS, KEPT_LOGITS
from verl_ray.preflight.model_sizes import ModelSize
from verl_ray.profiling.flops import ModelShape

Part = Literal["weights", "gradients", "optimizer", "cache", "activations", "buffers"]
Bytes = Mapping[Part, int]

CERTAIN: frozenset[Part] = frozenset({"weights", "gradients", "optimizer", "cache"})
"""Parts that are counted; the others are estimated. The optimizer's are its moments, and with Megatron the weights that
it steps where others compute: what place(optimizer=...) moves."""

FLOAT32 = 4
MOMENTS = 8
"""AdamW's two, in float32."""


@dataclass(frozen=True)
class Work:
    """What a rank computes in one call."""

    tokens: int
    """Of its largest micro-batch."""
    read: int
    """Of these, those whose logits are asked for."""
    batches: int


@dataclass(frozen=True)
class Footprint:
    """One rank of a role."""

    held: Bytes
    """Between calls."""
    forward: Bytes
    """Beside, in a pass without gradients."""
    update: Bytes
    """Beside, in an optimizer step; nothing for a role that does not learn."""


def footprint(role: ModelRole, model: ModelSize, forward: Work, update: Work, device: str) -> Footprint:
    """Of a role on a training backend; `device`: "cpu" or "cuda"."""
    learning = isinstance(role, SupervisedRole)
    kept, passing = _state(role, model)
    width = 2 if role.backend.dtype == "bfloat16" else FLOAT32
    shape = model.shape

    def activations(work: Work, *, learns: bool) -> int:
        return 0 if shape is None else _activations(role, shape, work, width, device, learns=learns)

    looked_at: Bytes = {
        "activations": activations(forward, learns=False),
        "buffers": _gathered(role, model, width, forward.batches, learns=False),
    }
    learned: Bytes = {}
    if learning:
        learned = {
            "gradients": passing,
            "activations": activations(update, learns=True),
            "buffers": _gathered(role, model, width, update.batches, learns=True),
        }
    return Footprint(kept, looked_at, learned)


def trained_parameters(role: ModelRole, model: ModelSize) -> int:
    """How many learn: all, those of an adapter, or none."""
    if not isinstance(role, SupervisedRole):
        return 0
    return role.lora.rank * model.adapter if role.lora.rank else model.parameters


def _state(role: ModelRole, model: ModelSize) -> tuple[Bytes, int]:
    """What is held between calls, and gradients that are there only within one."""
    backend, ranks, trained = role.backend, role.num_ranks, trained_parameters(role, model)
    weights = FLOAT32 * (model.parameters + (trained if trained != model.parameters else 0))
    if isinstance(backend, MegatronBackend):
        return _megatron(backend, ranks, model, trained), 0
    if isinstance(backend, MegatronFsdpBackend):
        return _megatron_fsdp(backend, ranks, model, trained), 0
    if isinstance(backend, FsdpBackend):
        shards = fsdp_shards(backend, ranks)
        return {"weights": weights // shards, "optimizer": MOMENTS * trained // shards}, FLOAT32 * trained // shards
    kept: dict[Part, int] = {"weights": weights, "optimizer": MOMENTS * trained}
    if ranks == 1:
        return kept, FLOAT32 * trained
    kept["gradients"] = FLOAT32 * trained  # views of DDP's buckets, which are there whenever the weights are
    return kept, 0


def fsdp_shards(backend: FsdpBackend, ranks: int) -> int:
    """Ranks that share one copy out."""
    return 1 if backend.sharding == "none" else backend.shard_size or ranks


def _megatron(backend: MegatronBackend, ranks: int, model: ModelSize, trained: int) -> Bytes:
    """Every copy of the model has weights and gradients; what the optimizer steps, all copies share out. Experts may
    have other copies than the rest."""
    of_experts = backend.expert_tensor_parallel * backend.expert_parallel * backend.pipeline_parallel
    rest = (model.parameters - model.of_experts) // (backend.tensor_parallel * backend.pipeline_parallel)
    own = rest + model.of_experts // of_experts
    width = 2 if backend.dtype == "bfloat16" else FLOAT32
    if not trained:
        return {"weights": width * own}
    stepped = MOMENTS + (FLOAT32 if width == 2 else 0)  # in float32 the weights that compute are stepped
    return {"weights": width * own, "gradients": FLOAT32 * own, "optimizer": stepped * trained // ranks}


def _megatron_fsdp(backend: MegatronFsdpBackend, ranks: int, model: ModelSize, trained: int) -> Bytes:
    found = _held(backend, ranks, model)
    if trained != model.parameters:
        adapter = trained // ranks
        return {"weights": found.weights, "gradients": FLOAT32 * adapter, "optimizer": MOMENTS * adapter}
    return {
        "weights": found.weights + found.main_weights,  # they are moved together
        "gradients": found.gradients,
        "optimizer": found.moments,
    }


def _held(backend: MegatronFsdpBackend, ranks: int, model: ModelSize) -> Held:
    return held(Elements(model.in_layers, max(model.largest_layer, 1), model.beside), backend, ranks)


def _gathered(role: ModelRole, model: ModelSize, width: int, batches: int, *, learns: bool) -> int:
    """Parameters that are put together, or cast, for a computation, and gradients on their way."""
    backend, trained = role.backend, trained_parameters(role, model) if learns else 0
    if isinstance(backend, EngineBackend):
        cast = model.parameters if isinstance(role, SupervisedRole) else model.largest_layer
        return width * cast if width == 2 else 0  # autocast keeps what it has cast of weights that learn
    if isinstance(backend, MegatronFsdpBackend):
        in_flight = _held(backend, role.num_ranks, model).in_flight
        return in_flight if learns else in_flight // 2
    if isinstance(backend, MegatronBackend):
        return 0
    if backend.sharding in ("full", "hybrid"):
        whole = model.beside + min(model.in_layers, (2 + backend.prefetch_layers) * model.largest_layer)
    else:
        whole = model.parameters
    on_their_way = 0
    if trained:
        share = trained / max(model.parameters, 1)
        on_their_way = int(share * (width + FLOAT32) * max(model.largest_layer, model.beside))
        if batches > 1 and backend.accumulate == "whole":
            on_their_way += FLOAT32 * trained
    return width * whole + on_their_way


def _activations(role: ModelRole, shape: ModelShape, work: Work, width: int, device: str, *, learns: bool) -> int:
    """Of the layers that a rank holds, and of the head."""
    backend = role.backend
    tensor = pipeline = 1
    sliced = recompute = False
    if isinstance(backend, MegatronBackend):
        tensor, pipeline = backend.tensor_parallel, backend.pipeline_parallel
        sliced, recompute = backend.sequence_parallel, backend.recompute == "full"
    else:
        recompute = backend.activation_checkpointing
    spread = tensor if sliced else 1
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    hidden, inner = shape.hidden_size, shape.intermediate_size
    passing = work.tokens * (FLOAT32 * 2 * hidden // spread + width * (2 * queries + 2 * keys + 3 * inner) // tensor)
    head = _head(shape, work.read, width, device, tensor, learns=learns)
    if not learns:
        return max(passing, head) + work.tokens * FLOAT32 * hidden
    # Kept of a layer: 3 inputs and outputs of each norm in float32; of attention, queries and outputs before and behind
    # norms and exchanges, keys and values; of the feed-forward part gate, its activation, up and their product.
    saved = work.tokens * (FLOAT32 * 6 * hidden // spread + width * (5 * queries + 4 * keys + 4 * inner) // tensor)
    layers = shape.num_layers // pipeline * min(pipeline, work.batches)  # 1F1B: as many batches are under way
    offloaded = isinstance(backend, FsdpBackend) and backend.activation_offload and device != "cpu"
    if recompute:
        kept = layers * work.tokens * FLOAT32 * hidden // spread + saved
    elif offloaded:
        kept = saved
    else:
        kept = layers * saved
    return kept + max(passing, head)


def _head(shape: ModelShape, read: int, width: int, device: str, tensor: int, *, learns: bool) -> int:
    """Logits, or the values of a head that has one number."""
    if shape.vocab_size == 1:
        return FLOAT32 * read * shape.hidden_size
    words = -(-shape.vocab_size // tensor)
    logits = read * words
    needed = 3 * FLOAT32 * min(logits, CHUNK_LOGITS[device])  # a chunk in float32, its log-probs, and their entropy
    if logits <= KEPT_LOGITS:
        return needed + width * logits * (2 if learns else 1)
    return needed + (FLOAT32 * words * shape.hidden_size if learns else 0)


# ------------------------------------------------------------------------------------------------ rollout engines


def engine_footprint(
    engine: RolloutEngineConfig, model: ModelSize, prompt_tokens: int, requests: int, device: str
) -> Footprint:
    """One rank of a vLLM engine, which is given so many requests with so many tokens of prompts in all."""
    width, tensor = (FLOAT32 if engine.dtype == "float32" else 2), engine.tensor_parallel
    held: dict[Part, int] = {"weights": width * model.parameters // tensor, "cache": int(engine.kv_cache_gib * 2**30)}
    working = 0
    if (shape := model.shape) is not None:
        tokens = min(prompt_tokens, _argument(engine, "max_num_batched_tokens", VLLM_BATCHED_TOKENS))
        running = min(requests, _argument(engine, "max_num_seqs", VLLM_BATCHED_REQUESTS))
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        parallel = 2 * queries + 2 * keys + 3 * shape.intermediate_size
        layer = tokens * width * (4 * shape.hidden_size + parallel // tensor)
        working = max(layer, 3 * FLOAT32 * running * shape.vocab_size)
        if model.tied and device == "cpu":
            held["buffers"] = width * shape.vocab_size * shape.hidden_size // tensor  # the head, packed for this CPU
    return Footprint(held, {"activations": working}, {})


def _argument(engine: RolloutEngineConfig, name: str, otherwise: int) -> int:
    value = engine.vllm_args.get(name)
    return value if isinstance(value, int) else otherwise
