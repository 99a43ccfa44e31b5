"""A tensor of a state of which a rank holds any number of boxes, as torch's distributed checkpoint saves and loads it.

Invariant: what is saved says where in the whole tensor it stands, so any other cut of it can be read from there.
Deliberately not here: which rank holds what, and the tensors' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[slice, ...]


class Slices(Tensor):
    """A tensor without memory of its own; torch's checkpoint asks it for its parts."""

    parts: tuple[tuple[Box, Tensor], ...]
    saved: bool

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Box, Tensor]], *, saved: bool = True
    ) -> Slices:
        """`parts`: disjoint boxes and what stands there, each of the box's shape. `saved`: whether this rank writes
        them; another one holds the same otherwise, and all read."""
        made: Slices = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made.parts, made.saved = tuple(parts), saved
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func}: slices of a tensor are only saved and loaded")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size()),
            )
            for chunk, (_, part) in zip(self.__create_chunk_list__(), self.parts if self.saved else (), strict=False)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size(side.start for side in box), torch.Size(side.stop - side.start for side in box)
            )
            for box, _ in self.parts
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        found = [part for box, part in self.parts if torch.Size(side.start for side in box) == index.offset]
        assert found, f"{index.fqn} has no part at {index.offset}"
        return found[0]
