"""Models that megatron-core can compute, and the sizes that a layout depends on.

Both are read from config.json alone.

Invariant: a model that is refused here would fail after the processes have started, or
would be computed differently. Nothing of megatron-core is imported. Deliberately not
here: which layouts fit which sizes (`layouts.py`), and where the parameters are
(`verl_ray.engine.megatron`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl_ray.backends.layouts import ModelSizes
from verl_ray.config.suggest import either
from verl_ray.models.families import (
    ACTIVATIONS_IN_MEGATRON,
    FAMILIES,
    IN_MEGATRON,
    WITH_EXPERTS,
)
from verl_ray.models.settings import Settings, rotary_types

BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias",),
}
"""Settings that add biases for which megatron-core's model has no place. It has a place
for the biases of queries, keys and values."""

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3")
"""Types of rotary positions that only rotate queries and keys. Other types also scale
them, or rotate long rows differently."""


def unsupported_settings(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the reasons why megatron-core cannot compute the model of a directory.

    Args:
        path: The directory, for messages.
        settings: The contents of its config.json.

    Yields:
        The reason, and what the configuration could choose instead; an empty text if
        there is no such alternative.
    """
    yield from _unsupported_modules(path, settings)
    yield from _unsupported_positions(path, settings)

    # The weight of the only chosen expert is normalized to 1, a constant.
    chosen_experts = settings.get("num_experts_per_tok")
    if (
        _has_routers(settings)
        and chosen_experts == 1
        and settings.get("norm_topk_prob")
    ):
        yield (
            f"{path} sets num_experts_per_tok=1 and norm_topk_prob: routers would never"
            " learn",
            "",
        )


def _has_routers(settings: Settings) -> bool:
    return settings.get("model_type") in WITH_EXPERTS


def _unsupported_modules(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the modules of the model that megatron-core's model does not have."""
    family = settings.get("model_type")

    # A family that no backend knows is reported for all of them.
    if family in FAMILIES and family not in IN_MEGATRON:
        yield (
            f"{path} is a {family!r} model, which has no map to megatron-core's",
            f"a model of {either(IN_MEGATRON)}",
        )

    for name in BIASES.get(str(family), ()):
        if settings.get(name):
            yield (
                f"{path} sets {name}, and megatron-core's model has no place for those"
                " biases",
                "",
            )

    supported_activation = ACTIVATIONS_IN_MEGATRON[0]
    activation = settings.get("hidden_act", supported_activation)
    if family in IN_MEGATRON and activation not in ACTIVATIONS_IN_MEGATRON:
        yield (
            f"{path} sets hidden_act={activation}, and {supported_activation} is what"
            " this backend computes",
            "",
        )


def _unsupported_positions(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the types of rotary positions that this backend does not compute."""
    unsupported_types = rotary_types(settings) - set(ROTARY_TYPES)
    for kind in sorted(unsupported_types):
        yield (
            f"{path} has rotary positions of type {kind}, which also scale attention:"
            " this backend does not",
            "",
        )


def sizes_of(settings: Settings) -> ModelSizes | None:
    """Return the sizes of a model from its config.json.

    Returns:
        None if a size is missing, or if the family is not supported.
    """
    family = settings.get("model_type")
    numbers = _numbers(
        settings,
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
    )
    if numbers is None or family not in IN_MEGATRON:
        return None

    layers, heads, vocabulary, intermediate = numbers
    (key_heads,) = _numbers(settings, "num_key_value_heads") or (heads,)
    dense = ModelSizes(layers, heads, key_heads, vocabulary, intermediate)
    layers_with_experts = _count_layers_with_experts(settings, layers)
    if not _has_routers(settings) or not layers_with_experts:
        return dense

    # transformers writes the number of experts under one name, and reads both.
    experts = _numbers(settings, "num_local_experts")
    experts = experts or _numbers(settings, "num_experts")
    inner = _numbers(settings, "moe_intermediate_size")
    if experts is None or inner is None:
        return None

    if layers_with_experts == layers:
        dense = replace(dense, intermediate=None)
    return replace(dense, experts=experts[0], expert_intermediate=inner[0])


def _count_layers_with_experts(settings: Settings, layers: int) -> int:
    """Return how many layers have experts.

    Every `decoder_sparse_step`-th layer has experts, except for those that
    `mlp_only_layers` names by their indices.
    """
    (step,) = _numbers(settings, "decoder_sparse_step") or (1,)
    listed = settings.get("mlp_only_layers")
    without_experts = listed if isinstance(listed, list) else ()
    return sum(
        number % step == 0 and number - 1 not in without_experts
        for number in range(1, layers + 1)
    )


def _numbers(settings: Settings, *names: str) -> list[int] | None:
    """Return the sizes of these names; None if one is missing or 0."""
    numbers = []
    for name in names:
        value = settings.get(name)
        if not isinstance(value, int) or not value:
            return None
        numbers.append(value)
    return numbers
