"""The sources of tensors: files of a checkpoint, or rank 0 that reads them.

Invariant: only the requested part of a tensor is read, or one whole tensor at a time
where rank 0 reads for all. A directory that cannot be read is a ModelError on every
rank that needs it.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from verl_ray.errors import ModelError
from verl_ray.hub.model_folders import INDEX, json_object
from verl_ray.models.names import TYPE_NAMES, Box
from verl_ray.models.parts import read_config, text_config
from verl_ray.profiling.progress import reach
from verl_ray.settings.config_json import has_other_parts, text_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


class _Read:
    """Counts as progress how much of a model a rank has read, any part of a tensor."""

    def __init__(self, header: Header) -> None:
        self._sizes = {
            name: math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in header.items()
        }
        self._total = sum(self._sizes.values())
        self._done = 0

    def note(self, name: str) -> None:
        """Note that a tensor, or a part of it, was read; only the first time counts."""
        self._done += self._sizes.pop(name, 0)
        reach(self._done, self._total, "bytes")


class CheckpointReader(TensorSource):
    """A model directory that every rank reads by itself.

    The files are memory-mapped, and only the requested part of a tensor is read. Of a
    model that sees images as well, the text part is read, under the names of a model
    that is all text.
    """

    def __init__(
        self, path: str, *, all_parts: bool = False, trusts_code: bool = False
    ) -> None:
        """Open the files.

        Args:
            path: The directory.
            all_parts: Whether all tensors are meant, under the names of the files.
            trusts_code: Whether the directory's code may run.
        """
        files = _safetensors_files(path)
        settings = json_object(Path(path, "config.json"))
        renames = has_other_parts(settings) and not all_parts
        self._path = path
        self._trusts_code = trusts_code
        self._slices = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            for published in opened.keys():  # noqa: SIM118 - not a mapping
                name = text_name(published) if renames else published
                if name is not None:
                    self._slices[name] = opened.get_slice(published)

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
        # Whoever takes all parts to copy them counts what is written.
        self._read = None if all_parts else _Read(header)

    def config(self, **settings: Any) -> PretrainedConfig:
        config = text_config(read_config(self._path, trusts_code=self._trusts_code))
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        box = box or tuple(slice(0, side) for side in shape)

        # An empty box needs no read.
        if any(side.start == side.stop for side in box):
            return torch.empty([side.stop - side.start for side in box], dtype=dtype)

        # The box of a scalar is empty, and `...` is all of it.
        part: Tensor = self._slices[name][box or ...]
        if self._read is not None:
            self._read.note(name)
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

    def __init__(
        self, path: str, device: torch.device, *, trusts_code: bool = False
    ) -> None:
        """Open the directory.

        Args:
            path: The directory.
            trusts_code: Whether its code may run. Every rank reads its configuration
                then, since a class of its own is known where the code has run.
            device: The device on which tensors travel. It selects one of the process
                group's backends.
        """
        self._device = device
        self._path = path
        self._trusts_code = trusts_code

        # The reader of rank 0; None on other ranks.
        self._reader: CheckpointReader | None = None
        self.header = self._from_rank_zero(lambda: self._open(path))
        self._read = _Read(self.header)

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
        def of_reader() -> PretrainedConfig:
            assert self._reader is not None, "this is rank 0"
            return self._reader.config(**settings)

        if self._trusts_code:
            reader = CheckpointReader(self._path, trusts_code=True)
            return reader.config(**settings)
        return self._from_rank_zero(of_reader)

    def read(self, name: str, box: Box) -> Tensor:
        shape, dtype = self.header[name]
        if self._reader is None:
            whole = torch.empty(shape, dtype=dtype)
        else:
            whole = self._reader[name]

        whole = whole.to(self._device)
        dist.broadcast(whole, src=0)
        self._read.note(name)
        return whole[box or ...]
