"""Values of a config.json: which are of the right type, which are computed here, and
which tensors they describe.

Invariant: a value that is refused here would be refused while a model is loaded, and
neither torch nor transformers is needed to say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ray.suggest import either

FAMILIES = ("gemma", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of model_type whose tensors are described here.

A model of another family is computed where its proof holds.
"""

_WITH_EXPERTS = ("qwen3_moe",)
"""Families whose layers choose among experts."""

_WITH_QUERY_NORM = ("qwen3", "qwen3_moe")
"""Families that normalize the queries and keys of each head."""

EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)
"""The names that families give to the number of experts of a layer."""

BALANCE_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""The names that families give to the weight of the balance loss of their experts."""

SELECTION_BIASES = ("score_correction_bias", "expert_bias")
"""How the names of biases end that take part in the choice of experts alone."""

EMBEDDINGS = "model.embed_tokens.weight"

VALUE_HEAD = "score.weight"
"""The name of the head in Hugging Face's sequence-classification models."""

LANGUAGE_HEAD = "lm_head.weight"
"""The name of the language-model head. A checkpoint with tied embeddings lacks it."""

LANGUAGE_HEAD_BIAS = "lm_head.bias"
"""The name of its bias, which few families have."""


Settings = Mapping[str, object]
"""The contents of a config.json."""

_LANGUAGE_MODEL = re.compile(r"(model\.)?language_model\.(model\.)?")
"""What the names of a text part's tensors begin with, beside other parts of a model."""

_WHOLE_MODEL = (
    *("architectures", "tie_word_embeddings", "quantization_config"),
    "transformers_version",
)
"""Values that a config.json has for all parts of a model at once."""


PLAIN_FAMILIES = {"qwen3_vl_text": "qwen3"}
"""Families of text parts that are plain ones where there is nothing but text.

A token of an image has three positions. Those of a word are equal, so that it does not
matter which of them turns which part of a query.
"""

_POSITIONS_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def plain_text(text: Settings) -> dict[str, object]:
    """Return a text part as one of its plain family, if it has such a family."""
    family = PLAIN_FAMILIES.get(str(text.get("model_type")))
    if family is None:
        return dict(text)
    plain = dict(text) | {"model_type": family}
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if isinstance(section, dict):
            plain[key] = {
                name: value
                for name, value in section.items()
                if name not in _POSITIONS_OF_IMAGES
            }
    return plain


def has_other_parts(settings: Settings) -> bool:
    """Return whether a model sees images or hears, too: it has a text part."""
    return isinstance(settings.get("text_config"), dict)


def text_part(settings: Settings) -> Settings:
    """Return what a config.json says of the text, which may be all of it."""
    text = settings.get("text_config")
    if not isinstance(text, dict):
        return settings
    shared = {name: settings[name] for name in _WHOLE_MODEL if name in settings}
    return plain_text(text) | shared


def text_name(name: str) -> str | None:
    """Return the name that a tensor of a model with several parts has in its text part.

    None if it belongs to another part.
    """
    prefix = _LANGUAGE_MODEL.match(name)
    rest = name if prefix is None else name[prefix.end() :]
    if rest in (LANGUAGE_HEAD, LANGUAGE_HEAD_BIAS, VALUE_HEAD):
        return rest
    return None if prefix is None else f"model.{rest}"


DENSE_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Sizes from which the tensors of a model without experts follow."""

_SIZES = (
    *DENSE_SIZES,
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "decoder_sparse_step",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_COUNTS = ("num_experts", "num_local_experts")
_LISTS = ("layer_types", "mlp_only_layers")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")

ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
    *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu"),
    *("linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid"),
    *("silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
"""Values of hidden_act that transformers computes."""

ROTARY_TYPES = (
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "proportional",
)
"""Types of rotary positions that transformers computes."""

_DROPOUTS_OF_HEADS = ("summary_first_dropout", "classifier_dropout")
"""Dropouts of heads that are not computed here."""

_LONGROPE = ("longrope", "su")
_YARN = ("yarn", "telechat3-yarn", "deepseek_yarn", "deepseek_llama_scaling")


def wrong_value(settings: Settings) -> str | None:
    """Return the first value that no model can have, as the end of a sentence.

    None if there is none. A size that is left out has the default of its family. Those
    of a family that is not described here are judged by transformers and the proof.
    """
    family = settings.get("model_type")
    if not isinstance(family, str):
        return "it has no model_type"

    sizes = _SIZES if family in FAMILIES else ()
    for name, value in settings.items():
        if value is None and name not in (*sizes, *_FLAGS):
            continue
        if name in (*sizes, *_OPTIONAL_SIZES):
            # True is an int, too.
            if type(value) is not int or value < 1:
                return f"{name} is {value!r}, and would be a whole number above 0"
        elif name in _COUNTS and (type(value) is not int or value < 0):
            return f"{name} is {value!r}, and would be a whole number"
        elif name in _LISTS and not _is_plain_list(value):
            return f"{name} is {value!r}, and would be a list of names or of numbers"
        elif name in _FLAGS and not isinstance(value, bool):
            return f"{name} is {value!r}, and would be true or false"
    return _uneven_heads(settings) if sizes else None


def _is_plain_list(value: object) -> bool:
    """Return whether a value is a list of texts and numbers."""
    return isinstance(value, list) and all(
        isinstance(part, str | int) for part in value
    )


def _uneven_heads(settings: Settings) -> str | None:
    """Return how attention heads do not divide; None if they do."""
    heads = settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    key_heads = settings.get("num_key_value_heads")
    if not isinstance(heads, int):
        return None

    if isinstance(key_heads, int) and heads % key_heads:
        return (
            f"num_key_value_heads is {key_heads}, and would divide num_attention_heads"
            f" = {heads}"
        )
    if isinstance(hidden, int) and not settings.get("head_dim") and hidden % heads:
        return (
            f"num_attention_heads is {heads}, and would divide hidden_size = {hidden},"
            " or there would be a head_dim"
        )
    return None


def not_computed(settings: Settings) -> str | None:
    """Return what trainers do not compute of a model, as the end of a sentence.

    None if they compute all of it.
    """
    if settings.get("quantization_config") is not None:
        return (
            "quantization_config says that weights are quantized, and only a judge may"
            " have such weights (transformers loads mxfp4 and fp8 with dequantize=True,"
            " and save_pretrained then writes plain ones)"
        )

    activation = settings.get("hidden_act", ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        return f"hidden_act is {activation!r}, which is no activation of transformers"

    unknown = sorted(rotary_types(settings).difference(ROTARY_TYPES))
    if unknown:
        return (
            f"rope_type is {unknown[0]!r}, and would be one of {either(ROTARY_TYPES)}"
        )

    for name, value in settings.items():
        if name in _DROPOUTS_OF_HEADS or not is_dropout(name):
            continue
        if isinstance(value, int | float) and value > 0:
            return f"{name} is {value}, and would be 0, so that log-probs are certain"
    return None


def is_dropout(name: str) -> bool:
    """Return whether a value is the rate of a dropout."""
    return "dropout" in name or name.endswith("pdrop")


def rotary_types(settings: Settings) -> set[str]:
    """Return the types of rotary positions of the model, or of its kinds of layers."""
    return {_rotary_type(section) for section in _rotary_sections(settings)}


def positions_of(settings: Settings, *, trained: bool = True) -> int | None:
    """Return the longest row, in tokens, that trainers and vLLM both compute.

    None if the settings leave the number of positions to the family. Linear scaling
    multiplies `max_position_embeddings`. YaRN multiplies the positions from before the
    scaling, whether or not `max_position_embeddings` was raised. With llama3, longrope
    (su) or proportional it is raised already, and mrope scales nothing. With dynamic
    (ntk), transformers chooses frequencies by the longest row of a batch, and the table
    of vLLM (0.32) ends at it, so that nobody computes longer rows in the same way. With
    longrope, vLLM chooses them by the longest row that may come and transformers by the
    longest of a batch, which agree up to the positions from before the scaling.

    Args:
        trained: Whether trainers compute the model as well. False stands for a judge.
    """
    positions = settings.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None

    # A row passes through the layers of every kind.
    return min(
        (
            _scaled_positions(positions, section, settings, trained=trained)
            for section in _rotary_sections(settings)
        ),
        default=positions,
    )


def _scaled_positions(
    positions: int, section: Settings, settings: Settings, *, trained: bool
) -> int:
    """Return the positions of the layers that `section` describes."""
    rotary_type = _rotary_type(section)
    # Some families write it beside the section of all layers, and it goes before.
    name = "original_max_position_embeddings"
    is_flat = section in (settings.get("rope_scaling"), settings.get("rope_parameters"))
    original = (is_flat and settings.get(name)) or section.get(name)
    if not isinstance(original, int):
        original = positions

    if rotary_type in _LONGROPE:
        return min(positions, original) if trained else positions
    # Without a factor, YaRN computes it so that the product is `positions`.
    factor = section.get("factor")
    if not isinstance(factor, int | float):
        return positions

    if rotary_type == "linear":
        # Gemma 3 scales the layers that see all tokens, and has the product already.
        is_scaled = str(settings.get("model_type")).startswith("gemma3")
        return positions if is_scaled else int(positions * factor)
    return int(original * factor) if rotary_type in _YARN else positions


def _rotary_sections(settings: Settings) -> Sequence[Settings]:
    """Return what is said of rotary positions, for each kind of layers if they differ.

    Like transformers, it reads the old key before the new one.
    """
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters")
    if not isinstance(parameters, dict):
        return []

    # Models with several kinds of layers have a dictionary per kind.
    per_kind = [value for value in parameters.values() if isinstance(value, dict)]
    return per_kind or [parameters]


def _rotary_type(section: Settings) -> str:
    return str(section.get("rope_type") or section.get("type") or "default")


# ------------------------------------------------------------------------------ tensors

CheckedSettings = Mapping[str, Any]
"""The contents of a config.json without a `wrong_value`."""

NamedShape = tuple[str, list[int]]
"""Name and shape of a tensor."""


def described_tensors(settings: CheckedSettings) -> Iterator[NamedShape]:
    """Yield every tensor of a language model; none if its family or sizes are unknown.

    The tensors are those that a checkpoint of this model has, in the order of its
    layers. A head that is tied to the embeddings is no tensor of its own.
    """
    family = settings.get("model_type")
    sizes = [*DENSE_SIZES]
    if family != "llama":
        # Llama has as many heads of keys as of queries unless it says otherwise.
        sizes.append("num_key_value_heads")
    if family in _WITH_EXPERTS:
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


def _attention(settings: CheckedSettings, prefix: str) -> Iterator[NamedShape]:
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

    if family in _WITH_QUERY_NORM:
        yield f"{prefix}q_norm.weight", [head_size]
        yield f"{prefix}k_norm.weight", [head_size]


def _feed_forward(
    hidden: int, inner: int, prefix: str, *, biased: bool = False
) -> Iterator[NamedShape]:
    """Yield the tensors of a gated feed-forward layer, or of an expert."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = (hidden, inner) if name == "down_proj" else (inner, hidden)
        yield f"{prefix}{name}.weight", [rows, columns]
        if biased:
            yield f"{prefix}{name}.bias", [rows]


def _has_experts(settings: CheckedSettings, layer: int) -> bool:
    """Return whether a layer chooses among experts."""
    if settings["model_type"] not in _WITH_EXPERTS or not _num_experts(settings):
        return False
    if layer in (settings.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (settings.get("decoder_sparse_step") or 1) == 0


def _num_experts(settings: CheckedSettings) -> int:
    # transformers writes the second name today.
    return settings.get("num_experts") or settings.get("num_local_experts") or 0


def has_windows(settings: Settings) -> bool:
    """Return whether attention of some layers sees the nearest tokens alone."""
    layers = settings.get("layer_types")
    if isinstance(layers, list) and "sliding_attention" in layers:
        return True
    return bool(settings.get("use_sliding_window") and settings.get("sliding_window"))


def chooses_experts(settings: Settings) -> bool:
    """Return whether layers of a model choose among experts."""
    return settings.get("model_type") in _WITH_EXPERTS or num_experts(settings) > 0


def num_experts(settings: Settings) -> int:
    """Return the number of experts of a layer, 0 for a model without."""
    counts = (settings.get(name) for name in EXPERT_COUNTS)
    return next((each for each in counts if isinstance(each, int) and each > 0), 0)


def balance_weight(settings: Settings) -> float:
    """Return the weight of the balance loss of experts, 0 for a family without one."""
    weights = (settings.get(name) for name in BALANCE_WEIGHTS)
    return next((float(each) for each in weights if isinstance(each, int | float)), 0.0)


def _experts(settings: CheckedSettings, prefix: str) -> Iterator[NamedShape]:
    """Yield the tensors of a layer's router and experts."""
    hidden = settings["hidden_size"]
    inner = settings["moe_intermediate_size"]
    experts = _num_experts(settings)
    yield f"{prefix}gate.weight", [experts, hidden]
    for expert in range(experts):
        yield from _feed_forward(hidden, inner, f"{prefix}experts.{expert}.")
