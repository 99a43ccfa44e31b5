"""Storages that several tensors share, moved between device and host.

Invariant: tensors that share a storage share it after a move, at the same positions,
so megatron-fsdp's buffers and the shards that are views of them stay together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from verl_ray.engine.offload import OffloadableTensor


def offloadable_storages(
    tensors: Iterable[tuple[str, Tensor]],
) -> list[OffloadableTensor]:
    """Return the storages of these tensors; storages without memory are left out.

    Args:
        tensors: All tensors that are views of the storages, each with a name. A storage
            gets the name of its first tensor.
    """
    views: dict[int, list[Tensor]] = defaultdict(list)
    names: dict[int, str] = {}
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        address = storage.data_ptr()
        views[address].append(tensor)
        names.setdefault(address, name)

    return [_offloadable_storage(names[address], views[address]) for address in views]


def _offloadable_storage(name: str, views: list[Tensor]) -> OffloadableTensor:
    """Return a storage that all of these tensors are views of."""

    def memory() -> Tensor:
        first = views[0]
        empty = torch.empty(0, dtype=torch.uint8, device=first.device)
        return empty.set_(first.untyped_storage())

    def take(memory: Tensor) -> None:
        for tensor in views:
            empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            tensor.data = empty.set_(
                memory.untyped_storage(),
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )

    return OffloadableTensor(name, memory, take)


@torch.no_grad()
def release_memory(tensors: Iterable[Tensor]) -> None:
    """Release the memory of tensors that are all zeros, until `renew_memory`."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@torch.no_grad()
def renew_memory(tensors: Iterable[Tensor]) -> None:
    """Allocate the memory of released tensors again, all zeros; idempotent.

    Args:
        tensors: Tensors each of which is all of its storage.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()
