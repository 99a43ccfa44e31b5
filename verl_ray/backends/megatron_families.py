"""The families whose weights have a place in megatron-core's model: one table.

Invariant: a row says how the layers of a family differ from Llama's. From it follow the
settings, the modules and the map of the weights (`engine/megatron`), the models that
are refused, and the layouts that are feasible. A model is judged by its config.json
alone, and nothing of megatron-core is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from verl_ray.backends.layouts import ModelSizes
from verl_ray.settings.config_json import EXPERT_COUNTS, Settings, rotary_types
from verl_ray.suggest import either


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of a family that choose among experts.

    Attributes:
        inner: The setting with the inner size of an expert.
        dense: Which layers have no experts: none, the first ones, or those between
            steps.
        scores: The function of a router's logits by which it chooses.
        normalized: Whether the weights of the chosen experts are scaled to a sum of 1;
            "setting" asks norm_topk_prob.
        scaled: Whether the weights are multiplied by routed_scaling_factor.
        biased: Whether each expert has a bias that counts in the choice alone.
        best_of_group: Experts are chosen from the best groups: how many of a group's
            best scores are added up to its own. 0 means that there are no groups.
        group_method: The value of topk_method with which groups count; None for any.
        float32_logits: Whether logits are computed in float32.
        shared: Name of the module that every token goes through as well, if any.
        shared_gate: Whether a gate weighs what that module adds.
    """

    inner: str = "moe_intermediate_size"
    dense: Literal["none", "first", "steps"] = "none"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: Literal["always", "never", "setting"] = "setting"
    scaled: bool = False
    biased: bool = False
    best_of_group: int = 0
    group_method: str | None = None
    float32_logits: bool = False
    shared: str | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class Family:
    """Differences between the layers of a family and those of Llama.

    Attributes:
        absent: Settings that ask for something without a place if they are set.
        needed: Settings that ask for something without a place if they are false.
        windows: Where the window of attention is: in no layer, in each layer that has
            one, or in the settings of the model, for all layers.
        softcap: Whether attn_logit_softcapping caps the scores of attention.
        positions_by_kind: Whether each kind of layers has rotary positions of its own.
        unit_norms: Whether norms multiply by 1 + weight.
        norms_after: Whether attention and feed-forward layers have norms behind them.
        scaled_embeddings: Whether embeddings are multiplied by the square root of the
            hidden size.
        latent: Whether attention is multi-head latent attention (MLA).
        experts: The layers with experts; None in a family without.
    """

    absent: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    windows: Literal["none", "layer", "model"] = "none"
    softcap: bool = False
    positions_by_kind: bool = False
    unit_norms: bool = False
    norms_after: bool = False
    scaled_embeddings: bool = False
    latent: bool = False
    experts: ExpertLayers | None = None


# megatron-core's layers have a place for the biases of queries, keys and values alone,
# and the settings below also add others.
_BIASES = ("attention_bias", "mlp_bias")
_GEMMA = Family(
    absent=("attention_bias", "use_bidirectional_attention"),
    unit_norms=True,
    scaled_embeddings=True,
)

_BALANCED_BY_BIASES = ExpertLayers(
    dense="first",
    scores="sigmoid",
    scaled=True,
    biased=True,
    best_of_group=2,
    float32_logits=True,
    shared="shared_experts",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(absent=_BIASES),
    "mistral": Family(windows="model"),
    "mixtral": Family(
        absent=("router_jitter_noise",),
        windows="model",
        experts=ExpertLayers(inner="intermediate_size", normalized="always"),
    ),
    "qwen2": Family(windows="layer"),
    # The window of some layers is in no argument of attention.
    "qwen2_moe": Family(
        absent=("use_sliding_window",),
        experts=ExpertLayers(dense="steps", shared="shared_expert", shared_gate=True),
    ),
    "qwen3": Family(absent=("attention_bias",), windows="layer"),
    "qwen3_moe": Family(
        absent=("attention_bias",),
        windows="layer",
        experts=ExpertLayers(dense="steps"),
    ),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, windows="layer", softcap=True, norms_after=True),
    "gemma3_text": replace(
        _GEMMA, windows="layer", positions_by_kind=True, norms_after=True
    ),
    "deepseek_v2": Family(
        absent=_BIASES,
        latent=True,
        experts=ExpertLayers(
            dense="first",
            normalized="never",
            scaled=True,
            best_of_group=1,
            group_method="group_limited_greedy",
            float32_logits=True,
            shared="shared_experts",
        ),
    ),
    "deepseek_v3": Family(
        absent=("attention_bias",),
        needed=("rope_interleave",),
        latent=True,
        experts=_BALANCED_BY_BIASES,
    ),
    "glm4_moe": Family(experts=_BALANCED_BY_BIASES),
}
"""The families by the value of model_type."""

_ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Types of rotary positions whose frequencies do not depend on the rows of a batch."""

_LEARNED_ACTIVATIONS = ("prelu", "xielu")
"""Values of hidden_act that have weights."""


def has_normalized_weights(experts: ExpertLayers, norm_topk_prob: object) -> bool:
    """Return whether the weights of a token's experts are scaled to a sum of 1."""
    if experts.normalized == "setting":
        return bool(norm_topk_prob)
    return experts.normalized == "always"


# ----------------------------------------------------------------------------- refusals


def unsupported_settings(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the reasons why megatron-core cannot compute the model of a directory.

    Args:
        path: The directory, for messages.
        settings: The contents of its config.json.

    Yields:
        The reason, and what the configuration could choose instead; an empty text if
        there is no such alternative.
    """
    name = settings.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        yield (
            f"{path} is a {name!r} model, which has no map to megatron-core's",
            f"a model of {either(FAMILIES)}",
        )
        return

    for setting in family.absent:
        if settings.get(setting):
            yield (
                f"{path} sets {setting}, for which megatron-core's model has no place",
                "",
            )
    for setting in family.needed:
        if settings.get(setting) is False:
            yield (
                f"{path} sets {setting}=false, and this backend computes it as true",
                "",
            )

    activation = settings.get("hidden_activation", settings.get("hidden_act"))
    if activation in _LEARNED_ACTIVATIONS:
        yield f"{path} sets hidden_act={activation}, whose weights have no place", ""

    for kind in sorted(rotary_types(settings).difference(_ROTARY_TYPES)):
        yield (
            f"{path} has rotary positions of type {kind}, and this backend computes"
            f" {either(_ROTARY_TYPES)}",
            "",
        )

    # A factor of queries and keys is a factor of scores if all of a head is rotated.
    if _has_part(settings) and "yarn" in rotary_types(settings):
        yield f"{path} has YaRN on a part of each head, which has no place", ""

    # The weight of the only chosen expert is normalized to 1, a constant.
    is_normalized = family.experts is not None and has_normalized_weights(
        family.experts, settings.get("norm_topk_prob")
    )
    if is_normalized and settings.get("num_experts_per_tok") == 1:
        yield (
            f"{path} sets num_experts_per_tok=1 and its weights add up to 1: routers"
            " would never learn",
            "",
        )


def _has_part(settings: Settings) -> bool:
    """Return whether rotary positions are those of a part of each head."""
    parameters = settings.get("rope_parameters")
    sections = [settings, parameters if isinstance(parameters, dict) else {}]
    factors = (section.get("partial_rotary_factor") for section in sections)
    return any(factor not in (None, 1) for factor in factors)


# -------------------------------------------------------------------------------- sizes


def sizes_of(settings: Settings) -> ModelSizes | None:
    """Return the sizes of a model from its config.json.

    Returns:
        None if a size is missing, or if the family is not supported.
    """
    family = FAMILIES.get(str(settings.get("model_type")))
    numbers = _numbers(
        settings,
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
    )
    if numbers is None or family is None:
        return None

    layers, heads, vocabulary, intermediate = numbers
    (key_heads,) = _numbers(settings, "num_key_value_heads") or (heads,)
    if family.latent:
        key_heads = heads
    dense = ModelSizes(
        layers, heads, key_heads, vocabulary, intermediate, latent=family.latent
    )
    kind = family.experts
    if kind is None:
        return dense
    layers_with_experts = _count_layers_with_experts(kind, settings, layers)
    if not layers_with_experts:
        return dense

    # transformers writes the number of experts under one name, and reads others.
    counts = (_numbers(settings, name) for name in EXPERT_COUNTS)
    experts = next((count for count in counts if count is not None), None)
    inner = _numbers(settings, kind.inner)
    if experts is None or inner is None:
        return None

    if layers_with_experts == layers:
        dense = replace(dense, intermediate=None)
    return replace(
        dense,
        experts=experts[0],
        expert_intermediate=inner[0],
        shared_intermediate=_shared_size(kind, settings, inner[0]),
    )


def _shared_size(kind: ExpertLayers, settings: Settings, inner: int) -> int:
    """Return the inner size of what every token goes through beside its experts."""
    if kind.shared is None:
        return 0
    sizes = _numbers(settings, "shared_expert_intermediate_size")
    if sizes is not None:
        return sizes[0]
    (number,) = _numbers(settings, "n_shared_experts") or (1,)
    return number * inner


def _count_layers_with_experts(
    kind: ExpertLayers, settings: Settings, layers: int
) -> int:
    """Return how many layers have experts."""
    if kind.dense == "none":
        return layers
    if kind.dense == "first":
        (dense,) = _numbers(settings, "first_k_dense_replace") or (0,)
        return max(0, layers - dense)

    # Every `decoder_sparse_step`-th layer has experts, except for those that
    # `mlp_only_layers` names by their indices.
    (step,) = _numbers(settings, "decoder_sparse_step") or (1,)
    named = settings.get("mlp_only_layers")
    without_experts = named if isinstance(named, list) else ()
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
