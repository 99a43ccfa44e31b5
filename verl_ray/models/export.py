"""Writing of a Hugging Face model directory, one tensor after another.

Invariant: at most one tensor is held at any time. A file appears under its name once it
is complete, and the index of several files is written last. The format is that of
safetensors (a length, a JSON header with the type, shape and offsets of every tensor,
then the bytes); the library itself writes it only from a dictionary of all tensors.

Deliberately not here: where the tensors come from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from verl_ray.data.tokenizers import (
    TEMPLATE_FILE,
    configured_ends,
    end_tokens,
    has_vocabulary,
    load_tokenizer,
)
from verl_ray.models.names import TYPE_NAMES
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.manifest import Parameter

MAX_FILE_BYTES = 5 << 30

COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "added_tokens.json",
)
"""Patterns of the files that an exported directory takes over from its model's."""

_HEADER_ALIGNMENT = 8
"""Bytes. The first tensor begins at a multiple of this."""

_TYPE_NAMES = {dtype: name for name, dtype in TYPE_NAMES.items()}


@dataclass(frozen=True)
class _File:
    name: str
    parameters: tuple[Parameter, ...]


def write_directory(
    folder: Path,
    configure: Callable[[Path], None],
    parameters: Sequence[Parameter],
    tensors: Iterable[Tensor],
    *,
    stem: str,
    tokenizer_from: Path,
    chat_template: str | None = None,
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
    """
    folder.mkdir(parents=True, exist_ok=True)
    configure(folder)

    for pattern in COPIED_FILES:
        for file in tokenizer_from.glob(pattern):
            shutil.copy(file, folder / file.name)
    if has_vocabulary(tokenizer_from):
        _write_turns(folder, tokenizer_from, chat_template)

    write_tensors(folder, parameters, tensors, stem=stem)


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
    remaining = iter(tensors)

    for file in files:
        # No reader ever finds an incomplete file under its final name.
        partial = folder / f"{file.name}.partial"
        with partial.open("wb") as stream:
            _write(stream, file.parameters, remaining)
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
    stream: BinaryIO, parameters: Sequence[Parameter], tensors: Iterator[Tensor]
) -> None:
    """Write one safetensors file, and consume its tensors."""
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
        advance(tensor.nbytes, "bytes")


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
