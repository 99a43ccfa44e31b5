"""Whether megatron-core can compute a model, and the sizes that a layout depends on: from config.json alone.

Invariant: what is refused here would fail after the processes have started, or compute something else. Nothing of
megatron-core is imported. Deliberately not here: which layouts go with which sizes (`layouts.py`), and where parameters
are (`verl_ray.engine.megatron`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from verl_ray.backends.layouts import ModelSizes
from verl_ray.config.suggest import either
from verl_ray.models.families import ACTIVATIONS_IN_MEGATRON, FAMILIES, IN_MEGATRON, WITH_EXPERTS

BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",), "qwen3_moe": ("attention_bias",)}
"""Settings that add biases for which megatron-core's model has no place: it has those of queries, keys and values."""

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3")
"""Those that only turn queries and keys; others also scale them, or turn long rows otherwise."""


def unmapped(path: str, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Why a model has no place in megatron-core's, and what would."""
    family = settings.get("model_type")
    if family in FAMILIES and family not in IN_MEGATRON:
        yield f"{path} is a {family!r} model, which has no map to megatron-core's", f"a model of {either(IN_MEGATRON)}"
    for name in BIASES.get(str(family), ()):
        if settings.get(name):
            yield f"{path} sets {name}, and megatron-core's model has no place for those biases", ""
    activation = settings.get("hidden_act", ACTIVATIONS_IN_MEGATRON[0])
    if family in IN_MEGATRON and activation not in ACTIVATIONS_IN_MEGATRON:
        yield f"{path} sets hidden_act={activation}, and {ACTIVATIONS_IN_MEGATRON[0]} is what this backend computes", ""
    for kind in sorted(_rotary_types(settings) - set(ROTARY_TYPES)):
        rule = f"{path} has rotary positions of type {kind}, which also scale attention: this backend does not"
        yield rule, ""
    if family in WITH_EXPERTS and settings.get("num_experts_per_tok") == 1 and settings.get("norm_topk_prob"):
        yield f"{path} sets num_experts_per_tok=1 and norm_topk_prob: routers would never learn", ""


def _rotary_types(settings: Mapping[str, object]) -> set[str]:
    """Of the whole model, or of each kind of layer."""
    found = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(found, dict):
        return set()
    each = [one for one in found.values() if isinstance(one, dict)] or [found]
    return {str(one.get("rope_type") or one.get("type") or "default") for one in each}


def sizes_of(settings: Mapping[str, object]) -> ModelSizes | None:
    """From the settings of a config.json; None where one is missing, and of families that are not mapped."""
    found = _numbers(settings, "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    family = settings.get("model_type")
    if found is None or family not in IN_MEGATRON:
        return None
    layers, heads, vocabulary, intermediate = found
    (key_heads,) = _numbers(settings, "num_key_value_heads") or (heads,)
    dense = ModelSizes(layers, heads, key_heads, vocabulary, intermediate)
    count = _layers_with_experts(settings, layers)
    if family not in WITH_EXPERTS or not count:
        return dense
    # transformers writes one name of their number and reads both
    experts = _numbers(settings, "num_local_experts") or _numbers(settings, "num_experts")
    inner = _numbers(settings, "moe_intermediate_size")
    if experts is None or inner is None:
        return None
    return replace(
        dense, intermediate=None if count == layers else intermediate, experts=experts[0], expert_intermediate=inner[0]
    )


def _layers_with_experts(settings: Mapping[str, object], layers: int) -> int:
    """How many have them: every so many, but for those that are named."""
    (every,) = _numbers(settings, "decoder_sparse_step") or (1,)
    named = settings.get("mlp_only_layers")
    without = named if isinstance(named, list) else ()
    return sum(number % every == 0 and number - 1 not in without for number in range(1, layers + 1))


def _numbers(settings: Mapping[str, object], *names: str) -> list[int] | None:
    """Sizes, of which none is 0; None where one is missing."""
    found = [value for name in names if isinstance(value := settings.get(name), int) and value]
    return found if len(found) == len(names) else None
