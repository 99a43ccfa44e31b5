"""The ways out of a model: a manifest of its tensors, and a Hugging Face directory.

Invariant: the manifest is the same on every rank, and over all ranks the owned parts
cover each tensor exactly once. While a directory is written, at most one tensor is held
at any time. A file appears under its name once it is complete, and the index of several
files is written last. The format is that of safetensors (a length, a JSON header with
the type, shape and offsets of every tensor, then the bytes); the library itself writes
it only from a dictionary of all tensors.

Every check of a written model compares with the outputs of plain transformers, which
alone reads it, for fixed rows that depend on nothing but the size of the vocabulary.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import Float32, Rows
from verl_ray.data.tokenizers import (
    TEMPLATE_FILE,
    configured_ends,
    end_tokens,
    has_vocabulary,
    load_tokenizer,
)
from verl_ray.hub.model_folders import code_files, json_object
from verl_ray.models.lora import adapter_name
from verl_ray.models.names import (
    TYPE_NAMES,
    Box,
    CheckpointTensor,
    is_adapter,
)
from verl_ray.models.parts import read_config, whole_model_class
from verl_ray.models.role_model import RoleModel
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.weights import is_first_copy, own_box, saved_buffers
from verl_ray.profiling.progress import advance
from verl_ray.settings.config_json import has_other_parts, text_name
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice

# ----------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class TensorOrigin:
    """Where a tensor of the manifest is in the model."""

    parameter: str
    """The name of the module's parameter."""

    tensor: CheckpointTensor
    """The tensor's box in the parameter."""


def build_manifest(model: RoleModel) -> tuple[Manifest, dict[str, TensorOrigin]]:
    """List the tensors of a model, with the origin of each.

    Parameters of an adapter are not in the manifest, but they have an origin.
    """
    # The first name of each parameter; a tied parameter has several.
    first_name: dict[int, str] = {}
    parameters = []
    origins = {}

    values = dict(model.hf.named_parameters(remove_duplicate=False))
    for name, value in (values | saved_buffers(model.hf)).items():
        for tensor in model.names.tensors(name, value.shape):
            tied_to = None
            if tensor.shape == value.shape:
                holder = first_name.setdefault(id(value), tensor.name)
                if holder != tensor.name:
                    tied_to = holder
            parameters.append(
                describe_parameter(tensor.name, value, tensor.shape, tied_to)
            )
            origins[tensor.name] = TensorOrigin(name, tensor)

        if is_adapter(name):
            shape = tuple(value.shape)
            tensor = CheckpointTensor(
                adapter_name(name), (0,) * len(shape), sides=shape, shape=shape
            )
            origins[tensor.name] = TensorOrigin(name, tensor)

    return Manifest(tuple(parameters)), origins


def describe_parameter(
    name: str,
    value: Tensor,
    shape: Sequence[int] | None = None,
    tied_to: str | None = None,
    *,
    adapter: bool = False,
) -> Parameter:
    """Return the manifest's entry for a tensor.

    Args:
        name: The name of the tensor.
        value: The parameter that the tensor is in.
        shape: The shape of the tensor; None if it is the whole parameter.
        tied_to: The name of the tensor that it is identical to.
        adapter: Whether the tensor belongs to an adapter.
    """
    if shape is None:
        shape = value.shape
    dtype = str(value.dtype).removeprefix("torch.")
    return Parameter(name, tuple(shape), dtype, tied_to, adapter)


def owned_part(
    value: Tensor, tensor: CheckpointTensor, rank: int
) -> tuple[Box, Slice] | None:
    """Return the part of a tensor that this rank owns, or None if it owns nothing.

    Args:
        value: The parameter, which may be sharded.
        tensor: The tensor within the parameter.
        rank: This rank.

    Returns:
        The owned part's box within this rank's part of the parameter, and its slice of
        the tensor.
    """
    # Of ranks with equal data, the first one is the owner.
    if isinstance(value, DTensor):
        is_owner = is_first_copy(value)
    else:
        is_owner = rank == 0

    within_rank, within_tensor = tensor.overlap(own_box(value))
    start = tuple(side.start for side in within_tensor)
    shape = tuple(side.stop - side.start for side in within_tensor)
    if not is_owner or not all(shape):
        return None
    return within_rank, Slice(tensor.name, start, shape)


# ---------------------------------------------------------------------------- directory

MAX_FILE_BYTES = 5 << 30

COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "added_tokens.json",
    "*processor_config.json",
)
"""Patterns of the files that an exported directory takes over from its model's."""

_HEADER_ALIGNMENT = 8
"""Bytes. The first tensor begins at a multiple of this."""

_TYPE_NAMES = {dtype: name for name, dtype in TYPE_NAMES.items()}


@dataclass(frozen=True)
class _File:
    name: str
    parameters: tuple[Parameter, ...]


Configure = Callable[[Path], object]
"""Writes a model's configuration into a directory."""


def write_directory(
    folder: Path,
    configure: Configure,
    parameters: Sequence[Parameter],
    tensors: Iterable[Tensor],
    *,
    stem: str,
    tokenizer_from: Path,
    chat_template: str | None = None,
    with_code: bool = False,
) -> None:
    """Write a model directory: configuration, tokenizer and safetensors.

    Args:
        folder: The directory, which is created if necessary.
        configure: Writes the configuration into the directory.
        parameters: Describes the tensors.
        tensors: The tensors, in the order of `parameters`.
        stem: Name of the safetensors file without its ending.
        tokenizer_from: The model directory whose tokenizer files are copied.
        chat_template: Text of the chat template that replaces the one in these files.
        with_code: Whether the code in that directory is copied as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configure(folder)
    for file in code_files(tokenizer_from) if with_code else ():
        copy = folder / file.relative_to(tokenizer_from)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)

    for pattern in COPIED_FILES:
        for file in tokenizer_from.glob(pattern):
            shutil.copy(file, folder / file.name)
    if has_vocabulary(tokenizer_from):
        _write_turns(folder, tokenizer_from, chat_template)

    write_tensors(folder, parameters, tensors, stem=stem)


def with_other_parts(
    source: Path,
    configure: Configure,
    parameters: Sequence[Parameter],
    tensors: Iterator[Tensor],
) -> tuple[Configure, Sequence[Parameter], Iterator[Tensor]]:
    """Complete a text part by the other parts of its model, such as a vision tower.

    They stay as they are in the model's directory, as do the names of all tensors and
    the configuration. A model that is all text is complete.

    Args:
        source: The directory of the model.
        configure: Writes the configuration of the text part.
        parameters: Describes the tensors of the text part.
        tensors: The tensors, in the order of `parameters`.

    Returns:
        The arguments of the whole model.
    """
    settings_file = source / "config.json"
    if not has_other_parts(json_object(settings_file)):
        return configure, parameters, tensors

    reader = CheckpointReader(str(source), all_parts=True)
    published = {text_name(name): name for name in reader}
    others = [
        Parameter(name, shape, str(dtype).removeprefix("torch."), None)
        for name, (shape, dtype) in reader.header.items()
        if text_name(name) is None
    ]
    return (
        lambda folder: shutil.copyfile(settings_file, folder / settings_file.name),
        [
            *(replace(each, name=published[each.name]) for each in parameters),
            *others,
        ],
        itertools.chain(tensors, (reader[each.name] for each in others)),
    )


def _write_turns(folder: Path, tokenizer_from: Path, chat_template: str | None) -> None:
    """Give an exported directory the chat template of the run, and its end tokens.

    Args:
        tokenizer_from: The model's directory, whose files have been copied.
        chat_template: Text of the template; None if the copied one stays.
    """
    tokenizer = load_tokenizer(tokenizer_from, chat_template)
    if chat_template is not None:
        for file in folder.glob("chat_template*"):
            file.unlink()
        template = str(tokenizer.chat_template)
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")

        # A template in there would contradict the file.
        settings_file = folder / "tokenizer_config.json"
        if settings_file.is_file():
            _change_json(settings_file, chat_template=None)

    # Other programs that generate with the model end a response by these alone.
    ends = end_tokens(tokenizer)
    if not set(ends) <= configured_ends(tokenizer):
        _change_json(folder / "generation_config.json", eos_token_id=list(ends))


def _change_json(path: Path, **changes: object) -> None:
    """Change settings in a JSON file, which may be absent; None takes one out."""
    settings = json.loads(path.read_text()) if path.is_file() else {}
    settings |= changes
    present = {name: value for name, value in settings.items() if value is not None}
    path.write_text(json.dumps(present, indent=2, ensure_ascii=False))


def write_tensors(
    folder: Path,
    parameters: Sequence[Parameter],
    tensors: Iterable[Tensor],
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    stem: str = "model",
) -> None:
    """Write tensors as `stem`.safetensors, or as several files with an index.

    There are several files if the tensors take more than `max_file_bytes`. The tensors
    come in the order of `parameters`.
    """
    files = _plan(parameters, max_file_bytes, stem)
    total_bytes = sum(_nbytes(parameter) for parameter in parameters)
    remaining = iter(tensors)

    for file in files:
        # No reader ever finds an incomplete file under its final name.
        partial = folder / f"{file.name}.partial"
        with partial.open("wb") as stream:
            _write(stream, file.parameters, remaining, total_bytes)
        partial.rename(folder / file.name)

    if len(files) > 1:
        _write_index(folder / f"{stem}.safetensors.index.json", files)


def _write_index(path: Path, files: Sequence[_File]) -> None:
    total_size = 0
    weight_map = {}
    for file in files:
        for parameter in file.parameters:
            total_size += _nbytes(parameter)
            weight_map[parameter.name] = file.name

    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=1))


def _write(
    stream: BinaryIO,
    parameters: Sequence[Parameter],
    tensors: Iterator[Tensor],
    total_bytes: int,
) -> None:
    """Write one safetensors file, and consume its tensors.

    Args:
        stream: The file.
        parameters: Its parameters.
        tensors: The tensors of these and of later files.
        total_bytes: Bytes of the tensors of all files, for who watches.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for parameter in parameters:
        end = offset + _nbytes(parameter)
        header[parameter.name] = {
            "dtype": _TYPE_NAMES[parameter.dtype],
            "shape": list(parameter.shape),
            "data_offsets": [offset, end],
        }
        offset = end

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)

    for parameter in parameters:
        tensor = next(tensors).detach()
        tensor = tensor.to(getattr(torch, parameter.dtype)).cpu().contiguous()
        shape = tuple(tensor.shape)
        assert shape == parameter.shape, f"{parameter.name}: {shape}"

        # As bytes, since NumPy has no bfloat16.
        stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
        advance(tensor.nbytes, "bytes", total_bytes)


def _plan(
    parameters: Sequence[Parameter], max_file_bytes: int, stem: str
) -> list[_File]:
    """Assign parameters to files, in their order, each file as full as possible."""
    groups: list[list[Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if groups[-1] and size + _nbytes(parameter) > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += _nbytes(parameter)

    if len(groups) == 1:
        return [_File(f"{stem}.safetensors", tuple(groups[0]))]
    return [
        _File(f"{stem}-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def _nbytes(parameter: Parameter) -> int:
    itemsize: int = getattr(torch, parameter.dtype).itemsize
    return parameter.numel * itemsize


# --------------------------------------------------------- the check of a written model

LENGTHS = (9, 5, 14)


def probe_rows(vocab_size: int, longest: int = max(LENGTHS)) -> Rows:
    """Return a few rows of tokens from all over the vocabulary.

    Each token but the first is under the response mask.

    Args:
        vocab_size: The size of the vocabulary.
        longest: The largest number of tokens of a row.
    """
    offsets = offsets_of(np.minimum(LENGTHS, longest))
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False

    generator = np.random.default_rng(vocab_size)
    tokens = generator.integers(0, vocab_size, len(mask)).astype(np.int32)
    return Rows(offsets=offsets, tokens=tokens, response_mask=mask)


@torch.no_grad()
def plain_outputs(
    path: str, rows: Rows, policy: bool, *, trusts_code: bool = False
) -> Float32:
    """Compute outputs with plain transformers, in float32 on the CPU, row by row.

    Args:
        path: The directory of a model, or of an adapter, which names its base model.
        rows: The rows.
        policy: Compute log-probs, else scores.
        trusts_code: Whether the code in the directory may run.

    Returns:
        Log-probs [tokens], 0 outside the response mask; or scores [rows].
    """
    model = _plain_model(path, policy, trusts_code)
    parts: list[Tensor] = []

    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        tokens = torch.from_numpy(rows.tokens[start:end].astype(np.int64))
        batch = tokens[None]
        if policy:
            logits = model(input_ids=batch).logits[0, :-1]
            log_p = torch.log_softmax(logits, -1)
            # Nothing predicts the first token.
            parts.append(torch.zeros(1))
            parts.append(log_p.gather(1, tokens[1:, None])[:, 0])
        else:
            hidden = model.base_model(input_ids=batch).last_hidden_state
            parts.append(model.score(hidden[0, -1]))

    outputs: Float32 = torch.cat(parts).numpy()
    return outputs


def _plain_model(path: str, policy: bool, trusts_code: bool) -> Any:
    """Load a model with transformers, and merge an adapter into its base."""
    if not (Path(path) / "adapter_config.json").is_file():
        return _load(path, policy, trusts_code)

    from peft import PeftConfig, PeftModel

    base_path = PeftConfig.from_pretrained(path).base_model_name_or_path
    base = _load(str(base_path), policy, trusts_code)
    return PeftModel.from_pretrained(base, path).merge_and_unload()


def _load(folder: str, policy: bool, trusts_code: bool) -> Any:
    from transformers import AutoModelForSequenceClassification

    settings: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": trusts_code,
        "dtype": torch.float32,
        # The other ways leave out caps and sinks without a word.
        "attn_implementation": "eager",
    }
    if policy:
        config = read_config(folder, trusts_code=trusts_code)
        return whole_model_class(config).from_pretrained(folder, **settings)
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, **settings
    )
