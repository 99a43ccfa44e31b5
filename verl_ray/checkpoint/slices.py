"""A tensor of which a rank holds any number of boxes.

torch's distributed checkpoint saves and loads such tensors.

Invariant: every saved part has its place in the whole tensor, so a tensor that is cut
in any other way can be read from it.

Deliberately not here: which rank holds which part, and the meaning of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

Box = tuple[slice, ...]
"""Part of a tensor: a range of indices per dimension."""


class Slices(Tensor):
    """A tensor without memory, from which torch's checkpoint requests its parts.

    The methods with double underscores are the interface that torch expects.
    """

    parts: tuple[tuple[Box, Tensor], ...]
    saved: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[tuple[Box, Tensor]],
        *,
        saved: bool = True,
    ) -> Slices:
        """Create a tensor from its parts.

        Args:
            shape: Shape of the whole tensor.
            dtype: Type of its elements.
            parts: Disjoint boxes and their values, which have the box's shape.
            saved: Whether this rank writes the parts. If not, another rank holds the
                same parts. Every rank reads them.
        """
        tensor: Slices = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype
        )
        tensor.parts = tuple(parts)
        tensor.saved = saved
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func}: slices of a tensor are only saved and loaded")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        # Another rank writes the same parts.
        if not self.saved:
            return []

        items = []
        chunks = self.__create_chunk_list__()
        for chunk, (_box, part) in zip(chunks, self.parts, strict=True):
            properties = TensorProperties.create_from_tensor(part)
            data = TensorWriteData(chunk, properties, self.size())
            item = WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=data,
            )
            items.append(item)
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for box, _part in self.parts:
            sizes = torch.Size(side.stop - side.start for side in box)
            chunks.append(ChunkStorageMetadata(_offsets(box), sizes))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, part in self.parts:
            if _offsets(box) == index.offset:
                return part
        raise AssertionError(f"{index.fqn} has no part at {index.offset}")


def _offsets(box: Box) -> torch.Size:
    """Return the first index of a box in each dimension."""
    return torch.Size(side.start for side in box)
