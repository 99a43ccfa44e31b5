"""What one rank of a role holds of its model between calls, and what it needs beside while it computes: in bytes.

Invariant: of roles on a training backend, what is held is counted from the layout alone, and no rank holds less on
average; activations and buffers are estimates of the largest micro-batch. Pure arithmetic; nothing is imported that
computes. Deliberately not here: how a backend shares a model out (`verl_ray/backends`), which role works when, and
where its state is meanwhile (`memory_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.backends import Backend
from verl_ray.backends.base import FLOAT32, Bytes, Part
from verl_ray.config.roles import ModelRole
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS, RolloutEngineConfig
from verl_ray.ops.chunks import CHUNK_LOGITS, KEPT_LOGITS
from verl_ray.preflight.model_sizes import ModelSize
from verl_ray.profiling.flops import ModelShape

CERTAIN: frozenset[Part] = frozenset({"weights", "gradients", "optimizer", "cache"})
"""Parts that are counted; the others are estimated. The optimizer's are its moments, and with Megatron the weights that
it steps where others compute: what place(optimizer=...) moves."""


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
    learning = role.learning is not None
    backend, trained, shape = role.backend, trained_parameters(role, model), model.shape
    state = backend.state(role.num_ranks, model, trained)

    def activations(work: Work, *, learns: bool) -> int:
        return 0 if shape is None else _activations(backend, shape, work, device, learns=learns)

    def in_flight(work: Work, *, learns: bool) -> int:
        return backend.in_flight(role.num_ranks, model, trained, batches=work.batches, learns=learns)

    looked_at: Bytes = {
        "activations": activations(forward, learns=False),
        "buffers": in_flight(forward, learns=False),
    }
    learned: Bytes = {}
    if learning:
        learned = {
            "gradients": state.passing,
            "activations": activations(update, learns=True),
            "buffers": in_flight(update, learns=True),
        }
    return Footprint(state.kept, looked_at, learned)


def trained_parameters(role: ModelRole, model: ModelSize) -> int:
    """How many learn: all, those of an adapter, or none."""
    if role.learning is None:
        return 0
    return role.adapter.rank * model.adapter if role.adapter is not None else model.parameters


def _activations(backend: Backend, shape: ModelShape, work: Work, device: str, *, learns: bool) -> int:
    """Of the layers that a rank holds, and of the head."""
    cut, width = backend.cut(), backend.width
    tensor, pipeline = cut.tensor, cut.pipeline
    spread = tensor if cut.sliced else 1
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
    if cut.recompute:
        kept = layers * work.tokens * FLOAT32 * hidden // spread + saved
    elif cut.on_host and device != "cpu":
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
