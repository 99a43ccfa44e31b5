"""Reading a Hugging Face checkpoint into a module, tensor by tensor, and of each tensor only this rank's slice.

Invariant: every parameter of the module is filled, from the checkpoint or, if it is one that a checkpoint of another
kind lacks (a new value head, an adapter), from a seed of its own name; so the values do not depend on rank count or on
the order of loading. No rank holds more than its own shard and one slice more, or one tensor where rank 0 reads for
all. A checkpoint that does not fit is a ModelError that names the tensors. Deliberately not here: building the module,
sharding it, and any download.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_ray.errors import ModelError
from verl_ray.models.names import Box, pieces
from verl_ray.profiling.progress import advance

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")

INDEX = "model.safetensors.index.json"
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors calls the types of parameters."""


Header = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor."""


class TensorSource(Collection[str]):
    """The tensors of a model directory by name, and its configuration."""

    header: Header

    @abstractmethod
    def config(self, **settings: Any) -> PretrainedConfig:
        """The model's configuration, with these settings in place of its own."""

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """The part of a tensor that lies in the box; all of it for an empty box."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self.header[name][0]

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, ())

    def __contains__(self, name: object) -> bool:
        return name in self.header

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


class CheckpointReader(TensorSource):
    """From the directory itself: memory-mapped, and of a tensor only the part that is asked for."""

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
        self._path = path
        self._slices = {
            name: file.get_slice(name)
            for file in (safe_open(file, framework="pt") for file in files)
            for name in file.keys()  # noqa: SIM118 - not a mapping
        }
        foreign = {name: one.get_dtype() for name, one in self._slices.items() if one.get_dtype() not in TYPES}
        if foreign:
            name, found = next(iter(foreign.items()))
            raise ModelError(
                f"model.path: {name} in {path!r} is of type {found}; weights of {', '.join(TYPES)} are read"
            )
        self.header = {name: (tuple(one.get_shape()), TYPES[one.get_dtype()]) for name, one in self._slices.items()}

    def config(self, **settings: Any) -> PretrainedConfig:
        from transformers import AutoConfig

        found: PretrainedConfig = AutoConfig.from_pretrained(self._path, local_files_only=True, **settings)
        return found

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        box = box or tuple(slice(0, side) for side in shape)
        if any(side.start == side.stop for side in box):
            return torch.empty([side.stop - side.start for side in box], dtype=dtype)
        part: Tensor = self._slices[name][box or ...]
        advance(part.nbytes, "bytes")
        return part


class RankZeroReader(TensorSource):
    """From the directory that only rank 0 looks into: it reads a tensor whole and sends it to all, one at a time.

    Collective: the ranks read the same tensors in the same order, each the part that it wants. A directory that rank 0
    cannot open is an error on all of them.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        """`device`: where tensors travel; of the process group's backends it chooses one."""
        self._device = device
        self._reader: CheckpointReader | None = None
        self.header = self._from_rank_zero(lambda: self._open(path))

    def _open(self, path: str) -> Header:
        self._reader = CheckpointReader(path)
        return self._reader.header

    def _from_rank_zero(self, call: Callable[[], T]) -> T:
        said: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                said = [call()]
            except Exception as error:  # every rank raises it, instead of waiting for what does not come
                said = [error]
        dist.broadcast_object_list(said, src=0, device=torch.device("cpu"))
        if isinstance(said[0], Exception):
            raise said[0]
        found: T = said[0]
        return found

    def config(self, **settings: Any) -> PretrainedConfig:
        def read() -> PretrainedConfig:
            assert self._reader is not None, "this is rank 0"
            return self._reader.config(**settings)

        return self._from_rank_zero(read)

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        whole = torch.empty(shape, dtype=dtype) if self._reader is None else self._reader[name]
        whole = whole.to(self._device)
        dist.broadcast(whole, src=0)
        advance(whole.nbytes, "bytes")
        return whole[box or ...]


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


def own_box(value: Tensor) -> Box:
    """The part of the whole tensor that this rank holds. A sharded one that is cut in a way of its own says how."""
    shape, start = tuple(value.shape), (0,) * value.dim()
    if isinstance(value, DTensor):
        (chunk,) = value.__create_chunk_list__()
        shape, start = chunk.sizes, chunk.offsets
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def is_first_copy(value: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same slice."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    return all(
        not placement.is_replicate() or at == 0 for placement, at in zip(value.placements, coordinate, strict=True)
    )


def fill(
    module: nn.Module,
    checkpoint: TensorSource,
    *,
    new: Mapping[str, float],
    unused: frozenset[str],
    seed: int,
) -> None:
    """Copy a checkpoint into the parameters and persistent buffers of `module`.

    `new`: names of parameters that the checkpoint may lack, with a standard deviation each; drawn from N(0, std^2)
    with a seed of their own name. `unused`: names of the checkpoint that the module may lack. Raises ModelError for
    anything else missing, unexpected or of another shape.
    """
    check_fit(module, checkpoint, new=new, unused=unused)
    for name, target in _wanted(module).items():
        local = target.to_local() if isinstance(target, DTensor) else target
        fill_box(local, own_box(target), name, target.shape, checkpoint, new=new, seed=seed)


def check_fit(module: nn.Module, checkpoint: TensorSource, *, new: Mapping[str, float], unused: frozenset[str]) -> None:
    """Raise ModelError, as `fill` does, for names of which only one has a tensor."""
    wanted = _wanted(module)
    known = {piece.name for name, target in wanted.items() for piece in pieces(name, target.shape)}
    tied = {piece.name for name in module.state_dict().keys() - wanted.keys() for piece in pieces(name, ())}
    missing = sorted(known - set(checkpoint) - new.keys())
    unexpected = sorted(set(checkpoint) - known - unused - tied)
    if missing or unexpected:
        raise ModelError(
            f"model.path: the checkpoint does not fit {type(module).__name__}: "
            f"missing {missing[:5] or 'none'}, unexpected {unexpected[:5] or 'none'}"
        )


def _wanted(module: nn.Module) -> dict[str, Tensor]:
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return dict(module.named_parameters()) | buffers


@torch.no_grad()
def fill_box(
    local: Tensor,
    box: Box,
    name: str,
    shape: Sequence[int],
    checkpoint: TensorSource,
    *,
    new: Mapping[str, float],
    seed: int,
) -> None:
    """Copy a box of a module's parameter `name`, which is of this shape, into `local`, which is of the box's; as
    `fill` does it."""
    if name in new and name not in checkpoint:
        local.copy_(torch.empty(tuple(shape)).normal_(0, new[name], generator=_generator(seed, name))[box])
        return
    alone = isinstance(checkpoint, CheckpointReader)  # else all ranks read the same together
    for piece in pieces(name, shape, box if alone else None):
        if checkpoint.shape(piece.name) != piece.shape:
            found = checkpoint.shape(piece.name)
            raise ModelError(f"model.path: {piece.name} has shape {found}, expected {piece.shape}")
        here, there = piece.overlap(box)
        part = local[here]
        if part.numel() or not alone:
            part.copy_(checkpoint.read(piece.name, there).view(part.shape))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
