"""How large a model is, from the headers and config.json of its directory, or of the one that the run will make.

Invariant: no tensor is read; a directory that says nothing has no parameters and no shape. Deliberately not here: how
ranks share a model out (`footprints.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.backends.base import ParameterCounts
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.schema import Config
from verl_ray.models.families import LANGUAGE_HEAD
from verl_ray.preflight.model_directories import MADE_VOCABULARY, made_model, settings_of, tensor_shapes
from verl_ray.profiling.flops import ModelShape

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelSize(ParameterCounts):
    """With the sizes that activations depend on."""

    adapter: int
    """Parameters of an adapter of rank 1 on the linear layers that were asked about."""
    shape: ModelShape | None
    """None where config.json does not say, or layers differ."""
    tied: bool
    """Whether the language head is the embedding."""


def size_of(path: str, config: Config, head: HeadKind, adapted: Collection[str] = ()) -> ModelSize:
    """Of the model in a directory with this head, in place of which it may have another; `adapted`: names of the linear
    layers that get an adapter."""
    settings = settings_of(path, config)
    shape = ModelShape.of(settings, head)
    made = made_model(path, config)
    if made is not None:
        return _made_size(made, head, shape, adapted)
    shapes = tensor_shapes(path)
    tied = LANGUAGE_HEAD not in shapes
    if head == "value":
        shapes.pop(LANGUAGE_HEAD, None)
    sizes = {name: math.prod(sides) for name, sides in shapes.items()}
    layers = Counter[str]()
    for name, size in sizes.items():
        if found := _LAYER.search(name):
            layers[found[1]] += size
    return ModelSize(
        parameters=sum(sizes.values()),
        of_experts=sum(size for name, size in sizes.items() if ".experts." in name),
        in_layers=layers.total(),
        largest_layer=max(layers.values(), default=0),
        adapter=sum(sum(sides) for name, sides in shapes.items() if _linear_layer(name) in adapted),
        shape=shape,
        tied=tied,
    )


def _linear_layer(tensor: str) -> str | None:
    """The name of the layer whose weight this may be."""
    path = tensor.split(".")
    return path[-2] if path[-1] == "weight" and len(path) > 1 else None


def _made_size(made: TinyModelConfig, head: HeadKind, shape: ModelShape | None, adapted: Collection[str]) -> ModelSize:
    """As `verl_ray.models.tiny` makes it for arithmetic (Qwen3: norms on queries and keys)."""
    hidden, size = made.hidden_size, made.head_size
    queries, keys, inner = size * made.num_heads, size * made.num_kv_heads, made.intermediate_size
    layer = 2 * hidden * (queries + keys) + 2 * size + 3 * hidden * inner + 2 * hidden
    heads = 1 if made.tie_embeddings or head == "value" else 2
    linear = {
        "q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": hidden + queries,
        "gate_proj": hidden + inner, "up_proj": hidden + inner, "down_proj": hidden + inner,
    }  # fmt: skip
    in_layers = made.num_layers * layer
    return ModelSize(
        parameters=in_layers + hidden + MADE_VOCABULARY * hidden * heads,
        of_experts=0,
        in_layers=in_layers,
        largest_layer=layer,
        adapter=made.num_layers * sum(sides for name, sides in linear.items() if name in adapted),
        shape=shape,
        tied=made.tie_embeddings,
    )
