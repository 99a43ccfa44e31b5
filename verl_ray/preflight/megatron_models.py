"""Whether megatron-core can compute a run's models, and share them out as their roles ask: from config.json alone.

Invariant: what is refused here would fail after the processes have started, or compute something else. Nothing of
megatron-core is imported. Deliberately not here: what no model changes (`verl_ray.config.rules.megatron`), and where
parameters are (`verl_ray.engine.megatron`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from verl_ray.config.backends import MegatronBackend
from verl_ray.config.layouts import ModelSizes
from verl_ray.config.rules.megatron import layout_problems
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import Problem
from verl_ray.models.families import ACTIVATIONS_IN_MEGATRON, FAMILIES, IN_MEGATRON, WITH_EXPERTS
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_directories import settings_of

BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",), "qwen3_moe": ("attention_bias",)}
"""Settings that add biases for which megatron-core's model has no place: it has those of queries, keys and values."""

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3")
"""Those that only turn queries and keys; others also scale them, or turn long rows otherwise."""


def megatron_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Packages that `machine` lacks, unless it is None; and models and layouts that do not go together."""
    if machine is not None:
        yield from _package_problems(config)
    for name, role in config.model_roles.items():
        if not isinstance(role.backend, MegatronBackend):
            continue
        path, settings = role.model.path, settings_of(role.model.path, config)
        others = either(f"backend@{name}.backend={choice}" for choice in ("fsdp", "engine"))
        for rule, instead in _unmapped(path, settings):
            fix = f"Choose {others}, or {instead}." if instead else f"Choose {others}."
            yield Problem(f"{name}.backend", role.backend.kind, rule, fix)
        sizes = sizes_of(settings)
        if sizes is not None:
            yield from layout_problems(name, role, sizes)


def _package_problems(config: Config) -> Iterator[Problem]:
    """One per backend, however many roles use it."""
    users: dict[str, list[str]] = {}
    for name, role in config.model_roles.items():
        users.setdefault(role.backend.kind, []).append(name)
    for kind, names in users.items():
        missing = missing_packages(kind)
        if missing:
            rule = f"this backend needs {' and '.join(missing)}, not installed here"
            yield Problem(f"{names[0]}.backend", kind, rule, f"Install it: {INSTALL}")


def _unmapped(path: str, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
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
