"""Sizes of models, from the headers and config.json of their directories.

A model that the run will make has a size before it exists.

Invariant: no tensor is read. A directory without readable files yields no parameters
and no shape.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.backends.base import ParameterCounts
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config
from verl_ray.models.families import LANGUAGE_HEAD
from verl_ray.preflight.model_files import (
    made_model,
    made_vocabulary,
    settings_of,
    tensor_shapes,
)
from verl_ray.profiling.flops import ModelShape

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelSize(ParameterCounts):
    """Numbers of parameters of a model, and the sizes that activations depend on."""

    adapter: int
    """Parameters of an adapter of rank 1 on the adapted linear layers."""

    shape: ModelShape | None
    """None if config.json does not contain it, or if layers differ."""

    tied: bool
    """Whether the language head is the embedding."""


_remembered: ContextVar[dict[tuple[object, ...], ModelSize] | None] = ContextVar(
    "_remembered", default=None
)


@contextlib.contextmanager
def remembered_sizes() -> Iterator[None]:
    """Let `size_of` read each directory only once inside this context.

    Inside, no directory may change, and no configuration may make a model. A context
    inside of another one shares its sizes.
    """
    outer = _remembered.get()
    token = _remembered.set({} if outer is None else outer)
    try:
        yield
    finally:
        _remembered.reset(token)


def size_of(
    path: str, config: Config, head: HeadKind, adapted: Collection[str] = ()
) -> ModelSize:
    """Return the size of the model in a directory.

    Args:
        path: Directory of the model.
        config: Configuration of the run, which may make the model.
        head: Head that the model has in its role, in place of its own.
        adapted: Names of the linear layers that get an adapter.
    """
    sizes = _remembered.get()
    if sizes is None:
        return _read_size(path, config, head, adapted)

    key = (path, head, *sorted(adapted))
    if key not in sizes:
        sizes[key] = _read_size(path, config, head, adapted)
    return sizes[key]


def _read_size(
    path: str, config: Config, head: HeadKind, adapted: Collection[str]
) -> ModelSize:
    """Return the size of the model in a directory, as its files are now."""
    shape = ModelShape.of(settings_of(path, config), head)
    made = made_model(path, config)
    if made is not None and config.preparation is not None:
        tokens = made_vocabulary(config.preparation)
        return _made_size(made, tokens, head, shape, adapted)

    shapes = tensor_shapes(path)
    is_tied = LANGUAGE_HEAD not in shapes
    if head == "value":
        shapes.pop(LANGUAGE_HEAD, None)

    sizes = {name: math.prod(sides) for name, sides in shapes.items()}
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name)

    # The name of a tensor has the number of its layer: model.layers.0 and so on.
    layers = Counter[str]()
    for name, size in sizes.items():
        layer = _LAYER.search(name)
        if layer is not None:
            layers[layer[1]] += size

    # An adapter of rank 1 has a column for the outputs and a row for the inputs.
    adapter = sum(
        sum(sides) for name, sides in shapes.items() if _linear_layer(name) in adapted
    )

    return ModelSize(
        parameters=sum(sizes.values()),
        in_experts=in_experts,
        in_layers=layers.total(),
        largest_layer=max(layers.values(), default=0),
        adapter=adapter,
        shape=shape,
        tied=is_tied,
    )


def _linear_layer(tensor: str) -> str | None:
    """Return the name of the layer whose weight a tensor may be."""
    path = tensor.split(".")
    if path[-1] != "weight" or len(path) < 2:
        return None
    return path[-2]


def _made_size(
    made: TinyModelConfig,
    tokens: int,
    head: HeadKind,
    shape: ModelShape | None,
    adapted: Collection[str],
) -> ModelSize:
    """Return the size of a model that `verl_ray.models.tiny` will make.

    It is a Qwen3 model for arithmetic, with norms on queries and keys.

    Args:
        tokens: Number of tokens in its vocabulary.
    """
    hidden = made.hidden_size
    inner = made.intermediate_size
    queries = made.head_size * made.num_heads
    keys = made.head_size * made.num_kv_heads

    attention = 2 * hidden * (queries + keys)
    query_norms = 2 * made.head_size
    feed_forward = 3 * hidden * inner
    layer_norms = 2 * hidden
    layer = attention + query_norms + feed_forward + layer_norms
    in_layers = made.num_layers * layer

    # The embedding, and a language head unless it is the same tensor. A value head is
    # not counted.
    vocabulary_matrices = 2
    if made.tie_embeddings or head == "value":
        vocabulary_matrices = 1
    vocabulary = tokens * hidden * vocabulary_matrices
    last_norm = hidden

    # Inputs and outputs of each linear layer, together.
    linear_layers = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": hidden + queries,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": hidden + inner,
    }
    adapter_of_layer = sum(
        sides for name, sides in linear_layers.items() if name in adapted
    )

    return ModelSize(
        parameters=in_layers + last_norm + vocabulary,
        in_experts=0,
        in_layers=in_layers,
        largest_layer=layer,
        adapter=made.num_layers * adapter_of_layer,
        shape=shape,
        tied=made.tie_embeddings,
    )


def model_size(name: str, role: ModelRole, config: Config) -> ModelSize:
    """Return the size of a role's model, with the head that it has in this role."""
    adapted_layers = role.adapter.targets if role.adapter is not None else ()
    return size_of(role.model.folder, config, config.head_of(name), adapted_layers)
