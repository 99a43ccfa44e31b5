"""Facts about models, their sizes too, from the files of their directories.

These are the JSON files and the headers of the tensors. A model that the run will make
has the same facts and size as it will have on disk.

Invariant: no tensor is read but for a digest, and torch is not needed. A missing or
damaged file yields nothing, no parameters and no shape, rather than an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.agents import calculations
from verl_ray.backends.base import ParameterCounts
from verl_ray.config.preparation import PrepareConfig, TinyModelConfig
from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config
from verl_ray.data.arithmetic import ALPHABET, WORD_VOCABULARY
from verl_ray.data.tokenizers import VOCABULARY_FILES
from verl_ray.hub.model_folders import INDEX, absent_weights, json_object, missing_files
from verl_ray.profiling.flops import ModelShape
from verl_ray.settings.config_json import (
    EMBEDDINGS,
    LANGUAGE_HEAD,
    VALUE_HEAD,
    chooses_experts,
    described_tensors,
    has_other_parts,
    text_name,
    text_part,
    wrong_value,
)

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind


_ENDS_BYTES = 2**20
"""Bytes of either end of a file of weights that its digest reads."""


def digest_of_weights(folder: str) -> str:
    """Return a digest of the files of a model's weights.

    It is of their names and sizes, and of the first and the last MiB of each: weights
    that were trained differ everywhere.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()


def made_vocabulary(preparation: PrepareConfig) -> int:
    """Return the number of tokens of a model that a run makes."""
    if preparation.problems == "word_problems":
        return WORD_VOCABULARY
    if preparation.problems == "calculator":
        return calculations.VOCABULARY
    # Padding and the end of a text come on top.
    return len(ALPHABET) + 2


def made_model(path: str, config: Config) -> TinyModelConfig | None:
    """Return the model that the run makes in this directory; None if it makes none."""
    preparation = config.preparation
    if preparation is None or path != config.model.folder:
        return None
    return preparation.model


def settings_of(path: str, config: Config) -> dict[str, object]:
    """Return the config.json of a model, or what the run will write into it."""
    model = made_model(path, config)
    if model is None or config.preparation is None:
        return config_json(path)

    return {
        "model_type": "qwen3",
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "hidden_size": model.hidden_size,
        "head_dim": model.head_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.intermediate_size,
        "vocab_size": made_vocabulary(config.preparation),
    }


def shapes_of(path: str, config: Config) -> dict[str, list[int]]:
    """Return the shape of every tensor of a model by its name.

    Of a model that the run makes, these are the matrices of its first layer and its
    language head.
    """
    model = made_model(path, config)
    if model is None:
        return tensor_shapes(path)

    # All layers are alike, so the first one stands for them.
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.num_heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    matrices = {
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }

    shapes = {
        f"model.layers.0.{name}.weight": shape for name, shape in matrices.items()
    }
    if not model.tie_embeddings:
        shapes[LANGUAGE_HEAD] = [0, hidden]
    return shapes


def tensor_shapes(path: str) -> dict[str, list[int]]:
    """Return the shape of every tensor in a directory's safetensors by its name.

    Without weights, or without all of them, they are those that config.json describes.
    Of a model that sees images as well, they are those of the text.
    """
    if absent_weights(path):
        return _described_shapes(config_json(path))
    shapes = {name: tensor["shape"] for name, tensor in _tensors(path)}
    if not has_other_parts(json_object(Path(path) / "config.json")):
        return shapes
    names = {name: text_name(name) for name in shapes}
    return {text: shapes[name] for name, text in names.items() if text is not None}


def _described_shapes(settings: Mapping[str, object]) -> dict[str, list[int]]:
    """Return the shape of every tensor that a config.json describes."""
    shapes = dict(described_tensors(settings))
    # A head for scores takes the place of a language head.
    if "ForSequenceClassification" in str(settings.get("architectures")):
        shapes.pop(LANGUAGE_HEAD, None)
        labels = settings.get("id2label")
        number = len(labels) if isinstance(labels, dict) else 2
        shapes[VALUE_HEAD] = [number, *shapes.get(EMBEDDINGS, [0, 0])[1:]]
    return shapes


def has_tokenizer(path: str) -> bool:
    """Return whether a directory has the vocabulary of a tokenizer."""
    return any((Path(path) / name).is_file() for name in VOCABULARY_FILES)


def tensor_types(path: str) -> set[str]:
    """Return the types of the tensors of a directory, by their names in safetensors."""
    return {tensor["dtype"] for _, tensor in _tensors(path)}


def damaged_weights(path: str) -> str | None:
    """Return what is wrong with the weights in a directory; None if nothing is.

    Only the headers and the sizes of the files are read.
    """
    directory = Path(path)
    missing = missing_files(directory)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"{INDEX} names {missing[0]}{others}, which is not there"

    for file in sorted(directory.glob("*.safetensors")):
        damage = _damage(file)
        if damage is not None:
            return f"{file.name} {damage}"
    return None


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, as the end of a sentence."""
    try:
        length, tensors = _read_header(file)
    except (OSError, ValueError):
        return "has no readable header"

    ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
    expected = 8 + length + max(ends, default=0)
    actual = file.stat().st_size
    if actual != expected:
        return f"has {actual} bytes, and its header describes {expected}"
    return None


def _tensors(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the description of every tensor in a directory's safetensors.

    Only the headers of the files are read.
    """
    for file in Path(path).glob("*.safetensors"):
        try:
            _, tensors = _read_header(file)
        except (OSError, ValueError):
            continue
        yield from tensors.items()


def _read_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the length of the header of a safetensors file, and its tensors by name.

    The file begins with the length of its header in 8 bytes. The header is a JSON
    object with an entry for every tensor.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no such header.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # A file of another kind begins with any number.
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        try:
            header = json.loads(stream.read(length))
        except RecursionError:
            raise ValueError("the header is nested too deeply") from None

    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    header.pop("__metadata__", None)
    if not all(_describes_tensor(entry) for entry in header.values()):
        raise ValueError("an entry of the header describes no tensor")
    return length, header


def _describes_tensor(entry: object) -> bool:
    """Return whether an entry of a header has the type, the shape and the place."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, place = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(place, list) or len(place) != 2:
        return False
    return all(type(number) is int and number >= 0 for number in [*shape, *place])


def config_json(path: str) -> dict[str, object]:
    """Return the config.json of a model directory, with values of the right types.

    It is empty if it cannot be read, or if one of its values is wrong.
    """
    settings = raw_config_json(path)
    return {} if wrong_value(settings) else settings


def raw_config_json(path: str) -> dict[str, object]:
    """Return the config.json of a model directory, whatever its values are.

    It is empty if it cannot be read. Of a model that sees images as well, it is what
    the file says of the text.
    """
    return dict(text_part(json_object(Path(path) / "config.json")))


def has_experts(path: str) -> bool:
    """Return whether the model in a directory has experts."""
    return chooses_experts(config_json(path))


def token_ids(path: str) -> dict[str, int]:
    """Return the number of every token in a directory's tokenizer.json.

    The dictionary is empty if the file does not contain them.
    """
    tokenizer = json_object(Path(path) / "tokenizer.json")
    ids: dict[str, int] = {}

    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    # A damaged file is reported when the tokenizer is loaded.
    try:
        if isinstance(vocabulary, dict):
            ids |= {str(token): int(number) for token, number in vocabulary.items()}
        elif isinstance(vocabulary, list):
            # A unigram model has pairs of a token and its score, in order.
            ids |= {entry[0]: number for number, entry in enumerate(vocabulary)}

        # Special tokens, which may extend or replace entries of the vocabulary.
        added_tokens = tokenizer.get("added_tokens")
        if isinstance(added_tokens, list):
            ids |= {token["content"]: int(token["id"]) for token in added_tokens}
    except (LookupError, TypeError, ValueError):
        return {}
    return ids


# -------------------------------------------------------------------------------- sizes

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelSize(ParameterCounts):
    """Numbers of parameters of a model, and the sizes that activations depend on."""

    adapter: int
    """Parameters of an adapter of rank 1 on the adapted linear layers."""

    factors: int
    """Rows and columns of all matrices, and elements of all vectors."""

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
        factors=sum(_factors(sides) for sides in shapes.values()),
        shape=shape,
        tied=is_tied,
    )


def _factors(sides: Sequence[int]) -> int:
    """Return the rows and columns of a tensor's matrices, or the size of a vector."""
    matrices = math.prod(sides[:-2])
    return matrices * sum(sides[-2:])


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
    feed_forward = 3 * hidden * inner
    norms = 2 * made.head_size + 2 * hidden
    layer = attention + feed_forward + norms
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
    factors = made.num_layers * (sum(linear_layers.values()) + norms)

    return ModelSize(
        parameters=in_layers + last_norm + vocabulary,
        in_experts=0,
        in_layers=in_layers,
        largest_layer=layer,
        adapter=made.num_layers * adapter_of_layer,
        factors=factors + last_norm + (tokens + hidden) * vocabulary_matrices,
        shape=shape,
        tied=made.tie_embeddings,
    )


def model_size(name: str, role: ModelRole, config: Config) -> ModelSize:
    """Return the size of a role's model, with the head that it has in this role."""
    adapted_layers = role.adapter.targets if role.adapter is not None else ()
    return size_of(role.model.folder, config, config.head_of(name), adapted_layers)
