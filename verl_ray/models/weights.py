"""Reading a Hugging Face checkpoint into a module, tensor by tensor, and of each tensor only this rank's slice.

Invariant: every parameter of the module is filled, from the checkpoint or, if it is one that a checkpoint of another
kind lacks (a new value head), from a seed of its own name; so the values do not depend on rank count or on the order
of loading. No rank holds more than its own shard and one slice more. A checkpoint that does not fit is a ModelError
that names the tensors. Deliberately not here: building the module, sharding it, and any download.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_ray.errors import ModelError

INDEX = "model.safetensors.index.json"


class CheckpointReader(Mapping[str, Tensor]):
    """The tensors of a model directory by name, memory-mapped and read one at a time."""

    def __init__(self, path: str) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"model.path: there is no directory {path!r}; models are local first, none is downloaded")
        if (folder / INDEX).is_file():
            listed = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            files = sorted(folder / name for name in listed)
        else:
            files = sorted(folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise ModelError(f"model.path: {path!r} lacks {', '.join(missing) or 'any .safetensors file'}")
        self._files = [safe_open(file, framework="pt") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header: nothing is read."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """The part of a tensor that lies in the box; nothing else of it is read into memory."""
        if not box:
            return self[name]
        part: Tensor = self._where[name].get_slice(name)[box]
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have parameters without memory; their buffers, which are computed, are real."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Memory for the module's parameters, or for this rank's shards of them, not yet filled; buffers keep their values.
    Ties between parameters are undone: tie them again."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(kept[name])


def own_box(value: Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank holds."""
    shape, start = tuple(value.shape), (0,) * value.dim()
    if isinstance(value, DTensor):
        shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def fill(
    module: nn.Module,
    checkpoint: CheckpointReader,
    *,
    new: frozenset[str],
    unused: frozenset[str],
    seed: int,
    init_std: float,
) -> None:
    """Copy a checkpoint into the parameters and persistent buffers of `module`.

    `new`: names that the checkpoint may lack; drawn from N(0, init_std^2) with a seed of their own name. `unused`:
    names of the checkpoint that the module may lack. Raises ModelError for anything else missing, unexpected or of
    another shape.
    """  # fmt: skip
    persistent = module.state_dict().keys()
    wanted = dict(module.named_parameters()) | {
        name: buffer for name, buffer in module.named_buffers() if name in persistent
    }
    tied = persistent - wanted.keys()
    missing = sorted(wanted.keys() - checkpoint.keys() - new)
    unexpected = sorted(set(checkpoint) - wanted.keys() - unused - tied)
    if missing or unexpected:
        raise ModelError(
            f"model.path: the checkpoint does not fit {type(module).__name__}: "
            f"missing {missing[:5] or 'none'}, unexpected {unexpected[:5] or 'none'}"
        )
    with torch.no_grad():
        for name, target in wanted.items():
            box = own_box(target)
            local = target.to_local() if isinstance(target, DTensor) else target
            if name not in checkpoint:
                drawn = torch.empty(target.shape).normal_(0, init_std, generator=_generator(seed, name))
                local.copy_(drawn[box])
                continue
            if checkpoint.shape(name) != tuple(target.shape):
                found = checkpoint.shape(name)
                raise ModelError(f"model.path: {name} has shape {found}, expected {tuple(target.shape)}")
            if local.numel():
                local.copy_(checkpoint.read(name, box))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
