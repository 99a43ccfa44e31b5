"""Writing the tensors of a Hugging Face checkpoint one after another.

Invariant: at no time is more than one tensor held; a file appears under its name once it is whole, and the index last.
The format is safetensors' (a length, a JSON header with every tensor's type, shape and place, then the bytes), which
the library itself writes only from a dictionary of all tensors. Deliberately not here: where the tensors come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from verl_ray.models.weights import TYPES
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.manifest import Parameter

MAX_FILE_BYTES = 5 << 30
_TYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class _File:
    name: str
    parameters: tuple[Parameter, ...]


def write_tensors(
    folder: Path,
    parameters: Sequence[Parameter],
    tensors: Iterable[Tensor],
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    stem: str = "model",
) -> None:
    """Write `tensors`, which come in the order of `parameters`, as `stem`.safetensors, or as several files with an
    index when they are more than `max_file_bytes`."""
    files = _plan(parameters, max_file_bytes, stem)
    arriving = iter(tensors)
    for file in files:
        partial = folder / f"{file.name}.partial"
        with partial.open("wb") as stream:
            _write(stream, file.parameters, arriving)
        partial.rename(folder / file.name)
    if len(files) > 1:
        where = {parameter.name: file.name for file in files for parameter in file.parameters}
        total = {"total_size": sum(_nbytes(parameter) for parameter in parameters)}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps({"metadata": total, "weight_map": where}, indent=1)
        )


def _write(stream: BinaryIO, parameters: Sequence[Parameter], tensors: Iterator[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for parameter in parameters:
        end = place + _nbytes(parameter)
        header[parameter.name] = {
            "dtype": _TYPE_NAMES[parameter.dtype], "shape": list(parameter.shape), "data_offsets": [place, end],
        }  # fmt: skip
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    stream.write(len(text).to_bytes(8, "little") + text)
    for parameter in parameters:
        tensor = next(tensors).detach().to(getattr(torch, parameter.dtype)).cpu().contiguous()
        assert tuple(tensor.shape) == parameter.shape, f"{parameter.name}: {tuple(tensor.shape)}"
        stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
        advance(tensor.nbytes, "bytes")


def _plan(parameters: Sequence[Parameter], max_file_bytes: int, stem: str) -> list[_File]:
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
    width: int = getattr(torch, parameter.dtype).itemsize
    return parameter.numel * width
