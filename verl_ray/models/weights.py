"""Reading of a Hugging Face checkpoint into a module, tensor by tensor.

The directory is read by every rank, or by rank 0 alone.

Invariant: every parameter of the module is filled. Its values come from the checkpoint
or, for parameters that a checkpoint of another kind lacks (a new value head, an
adapter), from a seed that is derived from the parameter's name; so they depend neither
on the number of ranks nor on the order of loading. No rank holds more than its own
shard and one slice more, or one tensor where rank 0 reads for all. A checkpoint that
does not fit is a ModelError that names the tensors.
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
from verl_ray.models.names import INDEX, TYPE_NAMES, Box, checkpoint_tensors
from verl_ray.profiling.progress import advance

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules in the block whose parameters have no memory.

    Their buffers, which are computed, are real.
    """
    register = nn.Module.register_parameter

    def register_on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate the module's parameters, or this rank's shards of them.

    The parameters are not filled; buffers keep their values. Ties between parameters
    are undone: tie them again.
    """
    # `to_empty` allocates buffers anew as well, so their values are saved.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def own_box(value: Tensor) -> Box:
    """Return the box of the whole tensor that this rank holds."""
    shape: Sequence[int] = tuple(value.shape)
    start: Sequence[int] = (0,) * value.dim()
    if isinstance(value, DTensor):
        # A tensor that is not sharded evenly, as torch does it, has its own chunk list.
        (chunk,) = value.__create_chunk_list__()
        shape = chunk.sizes
        start = chunk.offsets
    return tuple(
        slice(first, first + size) for first, size in zip(start, shape, strict=True)
    )


def is_first_copy(value: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same slice."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    return all(
        not placement.is_replicate() or index == 0
        for placement, index in zip(value.placements, coordinate, strict=True)
    )


def fill(
    module: nn.Module,
    checkpoint: TensorSource,
    *,
    new: Mapping[str, float],
    unused: frozenset[str],
    seed: int,
) -> None:
    """Copy a checkpoint into the parameters and persistent buffers of a module.

    Args:
        module: The module, whose parameters may be sharded.
        checkpoint: The source of the values.
        new: Standard deviations of parameters that the checkpoint may lack, by name.
            They are sampled from N(0, std^2) with a seed derived from their name.
        unused: Names of the checkpoint that the module may lack.
        seed: The seed of new parameters.

    Raises:
        ModelError: Anything else is missing, unexpected or of another shape.
    """
    check_fit(module, checkpoint, new=new, unused=unused)
    for name, target in _tensors_to_fill(module).items():
        local = target.to_local() if isinstance(target, DTensor) else target
        fill_box(
            local, own_box(target), name, target.shape, checkpoint, new=new, seed=seed
        )


def check_fit(
    module: nn.Module,
    checkpoint: TensorSource,
    *,
    new: Mapping[str, float],
    unused: frozenset[str],
) -> None:
    """Raise ModelError if the module and the checkpoint have different names.

    `new` and `unused` are the exceptions, as in `fill`.
    """
    targets = _tensors_to_fill(module)
    known = {
        tensor.name
        for name, target in targets.items()
        for tensor in checkpoint_tensors(name, target.shape)
    }
    # The state dict also has the second names of tied parameters, and a checkpoint may
    # contain them.
    tied = {
        tensor.name
        for name in module.state_dict().keys() - targets.keys()
        for tensor in checkpoint_tensors(name, ())
    }

    missing = sorted(known - set(checkpoint) - new.keys())
    unexpected = sorted(set(checkpoint) - known - unused - tied)
    if missing or unexpected:
        raise ModelError(
            f"model.path: the checkpoint does not fit {type(module).__name__}: "
            f"missing {missing[:5] or 'none'}, unexpected {unexpected[:5] or 'none'}"
        )


def _tensors_to_fill(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers, tied ones under one name."""
    persistent = module.state_dict().keys()
    buffers = {
        name: buffer for name, buffer in module.named_buffers() if name in persistent
    }
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
    """Copy a box of one parameter into `local`, as `fill` does.

    Args:
        local: A tensor of the shape of the box.
        box: The box of the parameter.
        name: The parameter's name in the module.
        shape: The shape of the whole parameter.
        checkpoint: The source of the values.
        new: Standard deviations of parameters that the checkpoint may lack, by name.
        seed: The seed of new parameters.

    Raises:
        ModelError: The checkpoint has a tensor of another shape.
    """
    if name in new and name not in checkpoint:
        # The whole parameter is sampled, so its values do not depend on the box.
        whole = torch.empty(tuple(shape))
        whole.normal_(0, new[name], generator=_generator(seed, name))
        local.copy_(whole[box])
        return

    # From other sources all ranks read the same tensors together, those too of which
    # this rank needs nothing.
    reads_alone = isinstance(checkpoint, CheckpointReader)
    for tensor in checkpoint_tensors(name, shape, box if reads_alone else None):
        checkpoint_shape = checkpoint.shape(tensor.name)
        if checkpoint_shape != tensor.shape:
            raise ModelError(
                f"model.path: {tensor.name} has shape {checkpoint_shape}, expected"
                f" {tensor.shape}"
            )

        within_box, within_tensor = tensor.overlap(box)
        part = local[within_box]
        if part.numel() or not reads_alone:
            # Nothing may hold the tensor while the next one is read.
            part.copy_(checkpoint.read(tensor.name, within_tensor).view(part.shape))


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator whose seed depends on the parameter's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


# ------------------------------------------------------------------------------ sources

# Invariant: only the requested part of a tensor is read, or one whole tensor at a time
# where rank 0 reads for all. A directory that cannot be read is a ModelError on every
# rank that needs it.

T = TypeVar("T")

TYPES = {name: getattr(torch, dtype) for name, dtype in TYPE_NAMES.items()}
"""The types of parameters by their names in safetensors."""

Header = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor."""


class TensorSource(Collection[str]):
    """The configuration of a model directory, and its tensors by name."""

    header: Header

    @abstractmethod
    def config(self, **settings: Any) -> PretrainedConfig:
        """Return the model's configuration, with these settings overridden."""

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """Return the part of a tensor in the box, or all of it for an empty box."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
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
    """A model directory that every rank reads by itself.

    The files are memory-mapped, and only the requested part of a tensor is read.
    """

    def __init__(self, path: str) -> None:
        files = _safetensors_files(path)
        self._path = path
        self._slices = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._slices[name] = opened.get_slice(name)

        header = {}
        for name, part in self._slices.items():
            type_name = part.get_dtype()
            if type_name not in TYPES:
                raise ModelError(
                    f"model.path: {name} in {path!r} is of type {type_name}; weights of"
                    f" {', '.join(TYPES)} are read"
                )
            header[name] = (tuple(part.get_shape()), TYPES[type_name])
        self.header = header

    def config(self, **settings: Any) -> PretrainedConfig:
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(
            self._path, local_files_only=True, **settings
        )
        return config

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        box = box or tuple(slice(0, side) for side in shape)

        # An empty box needs no read.
        if any(side.start == side.stop for side in box):
            return torch.empty([side.stop - side.start for side in box], dtype=dtype)

        # The box of a scalar is empty, and `...` is all of it.
        part: Tensor = self._slices[name][box or ...]
        advance(part.nbytes, "bytes")
        return part


def _safetensors_files(path: str) -> list[Path]:
    """Return the files of a model directory, those in its index if there is one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"model.path: there is no directory {path!r}; models are local first,"
            " none is downloaded"
        )

    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(folder / name for name in set(weight_map.values()))
    else:
        files = sorted(folder.glob("*.safetensors"))

    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        lacking = ", ".join(missing) or "any .safetensors file"
        raise ModelError(f"model.path: {path!r} lacks {lacking}")
    return files


class RankZeroReader(TensorSource):
    """A model directory that only rank 0 reads.

    Rank 0 reads one whole tensor at a time and sends it to all ranks. Collective: the
    ranks read the same tensors in the same order, each the part that it needs. A
    directory that rank 0 cannot open is an error on all ranks.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        """Open the directory.

        Args:
            path: The directory.
            device: The device on which tensors travel. It selects one of the process
                group's backends.
        """
        self._device = device

        # The reader of rank 0; None on other ranks.
        self._reader: CheckpointReader | None = None
        self.header = self._from_rank_zero(lambda: self._open(path))

    def _open(self, path: str) -> Header:
        self._reader = CheckpointReader(path)
        return self._reader.header

    def _from_rank_zero(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on every rank. Collective."""
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                message = [function()]
            # Every rank raises it, instead of waiting for a result that never comes.
            except Exception as error:
                message = [error]

        # The message is pickled on the host, so gloo carries it.
        dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if isinstance(message[0], Exception):
            raise message[0]
        result: T = message[0]
        return result

    def config(self, **settings: Any) -> PretrainedConfig:
        def read_config() -> PretrainedConfig:
            assert self._reader is not None, "this is rank 0"
            return self._reader.config(**settings)

        return self._from_rank_zero(read_config)

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        if self._reader is None:
            whole = torch.empty(shape, dtype=dtype)
        else:
            whole = self._reader[name]

        whole = whole.to(self._device)
        dist.broadcast(whole, src=0)
        advance(whole.nbytes, "bytes")
        return whole[box or ...]
