"""Names and shapes of a model's tensors, as its config.json describes them.

Invariant: the tensors are those that a checkpoint of this model has, in the order of
its layers; neither torch nor a file is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ray.models.families import (
    EMBEDDINGS,
    FAMILIES,
    LANGUAGE_HEAD,
    WITH_EXPERTS,
    WITH_QUERY_NORM,
)
from verl_ray.models.settings import DENSE_SIZES

Settings = Mapping[str, Any]
"""The contents of a config.json without a `wrong_value` (`settings.py`)."""

Tensor = tuple[str, list[int]]
"""Name and shape of a tensor."""


def described_tensors(settings: Settings) -> Iterator[Tensor]:
    """Yield every tensor of a language model; none if its family or sizes are unknown.

    A head that is tied to the embeddings is no tensor of its own.
    """
    family = settings.get("model_type")
    sizes = [*DENSE_SIZES]
    if family != "llama":
        # Llama has as many heads of keys as of queries unless it says otherwise.
        sizes.append("num_key_value_heads")
    if family in WITH_EXPERTS:
        sizes.append("moe_intermediate_size")
    if family not in FAMILIES or not all(settings.get(size) for size in sizes):
        return

    hidden = settings["hidden_size"]
    yield EMBEDDINGS, [settings["vocab_size"], hidden]
    for number in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield f"{layer}input_layernorm.weight", [hidden]
        yield f"{layer}post_attention_layernorm.weight", [hidden]
        yield from _attention(settings, f"{layer}self_attn.")
        if _has_experts(settings, number):
            yield from _experts(settings, f"{layer}mlp.")
        else:
            inner = settings["intermediate_size"]
            biased = family == "llama" and bool(settings.get("mlp_bias"))
            yield from _feed_forward(hidden, inner, f"{layer}mlp.", biased=biased)
    yield "model.norm.weight", [hidden]

    if not settings.get("tie_word_embeddings", family == "gemma"):
        yield LANGUAGE_HEAD, [settings["vocab_size"], hidden]


def _attention(settings: Settings, prefix: str) -> Iterator[Tensor]:
    """Yield the tensors of a layer's attention."""
    family = settings["model_type"]
    hidden = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    head_size = settings.get("head_dim") or hidden // heads
    queries = heads * head_size
    keys = (settings.get("num_key_value_heads") or heads) * head_size

    biased = {name for name in "qkvo" if settings.get("attention_bias")}
    if family == "qwen2":
        biased = set("qkv")

    for name, rows in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
        columns = queries if name == "o" else hidden
        yield f"{prefix}{name}_proj.weight", [rows, columns]
        if name in biased:
            yield f"{prefix}{name}_proj.bias", [rows]

    if family in WITH_QUERY_NORM:
        yield f"{prefix}q_norm.weight", [head_size]
        yield f"{prefix}k_norm.weight", [head_size]


def _feed_forward(
    hidden: int, inner: int, prefix: str, *, biased: bool = False
) -> Iterator[Tensor]:
    """Yield the tensors of a gated feed-forward layer, or of an expert."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = (hidden, inner) if name == "down_proj" else (inner, hidden)
        yield f"{prefix}{name}.weight", [rows, columns]
        if biased:
            yield f"{prefix}{name}.bias", [rows]


def _has_experts(settings: Settings, layer: int) -> bool:
    """Return whether a layer chooses among experts."""
    if settings["model_type"] not in WITH_EXPERTS or not _num_experts(settings):
        return False
    if layer in (settings.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (settings.get("decoder_sparse_step") or 1) == 0


def _num_experts(settings: Settings) -> int:
    # transformers writes the second name today.
    return settings.get("num_experts") or settings.get("num_local_experts") or 0


def _experts(settings: Settings, prefix: str) -> Iterator[Tensor]:
    """Yield the tensors of a layer's router and experts."""
    hidden = settings["hidden_size"]
    inner = settings["moe_intermediate_size"]
    experts = _num_experts(settings)
    yield f"{prefix}gate.weight", [experts, hidden]
    for expert in range(experts):
        yield from _feed_forward(hidden, inner, f"{prefix}experts.{expert}.")
