"""A model cut to the size of a proof: a few layers of each kind, random weights.

Invariant: what is cut is a number of equal things (layers, words, experts, heads, inner
units, tokens of a window), never what a layer computes. No weight is 0 or 1 all over,
since a weight that is left out would then change nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_ray.errors import ModelError
from verl_ray.models.parts import (
    backbone_of,
    blocks_of,
    runs_own_code,
    whole_model_class,
)
from verl_ray.models.weights import saved_tensors
from verl_ray.settings.config_json import EXPERT_COUNTS, is_dropout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 256
WINDOW = 8
EXPERTS = 8
INNER = 256
KEY_HEADS = 2

NARROW = 256
"""Numbers in a row of a matrix up to which all get weights of one size."""

LAYERS_PER_KIND = 2
"""How many layers of a kind a cut model has, unless they are too many."""

MOST_PARAMETERS = 1_000_000_000
"""Parameters that a machine with 24 GiB can hold five times in float32."""

_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "index_topk",
)
"""Numbers of tokens above which a layer computes otherwise; rows are longer here."""

_IDENTITIES = "zero_expert_num"
"""The number of experts of LongCat-Flash that compute nothing."""

_INNER_SIZES = ("intermediate_size", "ffn_hidden_size")
"""How the names of numbers of inner units end, one or a list for the layers."""

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def cut_model(
    config: PretrainedConfig, seed: int
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return a model with two layers of each kind, and random weights.

    Its sizes are as small as its family builds and computes. Where two layers of each
    kind are too many, it has one of each.

    Raises:
        ModelError: transformers does not build a cut model, or it is too large.
    """
    kinds = _kinds_of_model(config)
    for per_kind in (LAYERS_PER_KIND, 1):
        chosen = _chosen_layers(config, kinds, per_kind)
        try:
            return _smallest(config, _with_layers(config, kinds, chosen), seed)
        except Exception as error:  # any of a family's own checks
            failure = error

    raise ModelError(
        f"a {config.model_type} model with {len(chosen)} of its {len(kinds)} layers"
        f" cannot be built: {type(failure).__name__}: {failure}"
    ) from failure


def _kinds_of_model(config: PretrainedConfig) -> list[Hashable]:
    """Return the kind of each layer of a model.

    Raises:
        ModelError: It is no decoder of transformers.
    """
    try:
        return _kinds_of(config)
    except Exception as error:  # any of a family's own checks
        raise ModelError(
            f"transformers builds no causal language model of a {config.model_type}"
            f" configuration: {type(error).__name__}: {error}"
        ) from error


def _chosen_layers(
    config: PretrainedConfig, kinds: Sequence[Hashable], per_kind: int
) -> Sequence[int]:
    """Return the indices of the first layers of each kind.

    Where no list says which layer is of which kind, as in families with periods, they
    are all layers up to the last of these.
    """
    seen: Counter[Hashable] = Counter()
    chosen = []
    for index, kind in enumerate(kinds):
        if seen[kind] < per_kind:
            chosen.append(index)
        seen[kind] += 1

    first = range(chosen[-1] + 1)
    if chosen == [*first]:
        return first
    try:
        cut = type(config)(**_with_layers(config, kinds, chosen))
        follows = _kinds_of(cut) == [kinds[index] for index in chosen]
    except Exception:  # any of a family's own checks
        follows = False
    return chosen if follows else first


def _with_layers(
    config: PretrainedConfig, kinds: Sequence[Hashable], chosen: Sequence[int]
) -> dict[str, Any]:
    """Return the settings of a model with some of its layers alone."""
    settings = {
        name: [value[index] for index in chosen]
        if isinstance(value, list) and len(value) == len(kinds)
        else value
        for name, value in config.to_dict().items()
    }
    # Two count as one block in some families.
    per_block = config.num_hidden_layers // len(kinds)
    return settings | {"num_hidden_layers": len(chosen) * per_block}


def _smallest(
    config: PretrainedConfig, settings: Mapping[str, Any], seed: int
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return the first model that its family computes, of smaller sizes first.

    Raises:
        Exception: It computes none. This is why it does not compute the smallest.
    """
    fewer = _fewer(settings)
    narrow = _narrower(fewer)
    failure: Exception | None = None
    for candidate in (_with_fewer_heads(narrow), narrow, fewer):
        try:
            cut = type(config)(**candidate)
            _require_small(cut)
            model = random_model(cut, seed)
            with torch.no_grad():
                model(input_ids=torch.ones(1, 2, dtype=torch.int64), use_cache=False)
        except Exception as error:  # any of a family's own checks
            failure = failure or error
        else:
            return cut, model
    assert failure is not None
    raise failure


def _require_small(config: PretrainedConfig) -> None:
    """Raise ModelError for a model that a machine could not hold several times."""
    parameters = sum(value.numel() for value in model_on_meta(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ModelError(
            f"it has {parameters / 1e9:.1f} billion parameters, and a proof takes up to"
            f" {MOST_PARAMETERS / 1e9:.1f} billion"
        )


def _narrower(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with fewer inner units of feed-forward layers and experts."""
    narrower = dict(settings)
    for name, value in settings.items():
        if not name.endswith(_INNER_SIZES):
            continue
        if isinstance(value, int):
            narrower[name] = min(value, INNER)
        elif isinstance(value, list):
            narrower[name] = [min(size, INNER) for size in value]
    return narrower


def _with_fewer_heads(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with fewer attention heads of the same size and grouping."""
    heads = settings.get("num_attention_heads")
    key_heads = settings.get("num_key_value_heads") or heads
    if not isinstance(key_heads, int) or not isinstance(heads, int) or not heads:
        return dict(settings)

    fewer = min(key_heads, KEY_HEADS)
    changes = {
        "num_attention_heads": heads // key_heads * fewer,
        "num_key_value_heads": fewer,
        # Otherwise it would follow from the number of heads.
        "head_dim": settings.get("head_dim") or settings["hidden_size"] // heads,
    }
    latent = "kv_lora_rank" in settings
    return dict(settings) | {
        name: value
        for name, value in changes.items()
        if name in settings and not (latent and name == "head_dim")
    }


def _fewer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with fewer experts and tokens of a window, and 256 words.

    A model of fewer words gets more, which compute the same.
    """
    fewer: dict[str, Any] = copy.deepcopy(dict(settings))
    groups = settings.get("n_group") or 1
    chosen = settings.get("num_experts_per_tok") or settings.get("moe_topk") or 1
    experts = -(-max(EXPERTS, 2 * chosen) // groups) * groups

    for name, value in settings.items():
        if is_dropout(name) and isinstance(value, float):
            fewer[name] = 0.0
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "vocab_size" in name and value:
            fewer[name] = VOCABULARY
        elif name in (*EXPERT_COUNTS, _IDENTITIES):
            fewer[name] = min(value, experts)
        elif name in _WINDOWS:
            fewer[name] = min(value, WINDOW)

    for number, name in enumerate(_TOKENS):
        if name in fewer:
            fewer[name] = number
    return fewer


def _kinds_of(config: PretrainedConfig) -> list[Hashable]:
    return [_kind(block) for block in blocks_of(backbone_of(model_on_meta(config)))]


def _kind(block: nn.Module) -> Hashable:
    """Return what tells layers of different kinds apart: modules, shapes, settings."""
    shapes = tuple(
        (name, tuple(value.shape)) for name, value in block.named_parameters()
    )
    settings = []
    for name, module in block.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str | None) and "layer_idx" not in key
        )
        settings.append((name, type(module).__name__, plain))
    return shapes, tuple(settings)


def model_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Build a language model whose parameters have no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = whole_model_class(config).from_config(
            config, trust_remote_code=runs_own_code(config)
        )
    return model


def random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Build a language model with random weights, in float32.

    It computes attention as its family's code does, without any kernel.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model: PreTrainedModel = whole_model_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=runs_own_code(config),
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in saved_tensors(model).items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                if tensor.dim() < 2 or "bias" in name:
                    tensor.add_(noise, alpha=0.1)
                else:
                    # What wide matrices compute is no larger, nor is its rounding.
                    width = tensor.shape[-1] / NARROW
                    tensor.add_(noise, alpha=0.04 / max(1.0, width**0.5))
    return model.eval()
