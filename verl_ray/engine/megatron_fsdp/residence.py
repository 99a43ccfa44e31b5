"""What megatron-fsdp holds, as state that can be moved to the host and back.

Invariant: tensors that share memory share it after a move, at the same places, so the package's buffers and the shards
that look into them stay one. Deliberately not here: the move itself (`offload.py`), and when (`engine.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from verl_ray.engine.offload import Held


def held_together(tensors: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """What these tensors look into, by storage; they must be all that look into it. A storage has the name of the first
    of them."""
    sharing: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        if tensor.untyped_storage().nbytes():
            sharing[tensor.untyped_storage().data_ptr()].append((name, tensor))
    return [_held(together[0][0], [tensor for _, tensor in together]) for together in sharing.values()]


def _held(name: str, together: list[Tensor]) -> Held:
    def memory() -> Tensor:
        first = together[0]
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())

    def take(memory: Tensor) -> None:
        for tensor in together:
            at = tensor.storage_offset(), tensor.size(), tensor.stride()
            empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            tensor.data = empty.set_(memory.untyped_storage(), *at)

    return Held(name, memory, take)


@torch.no_grad()
def release(tensors: Iterable[Tensor]) -> None:
    """Their memory, until `renew`; for what is zero."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@torch.no_grad()
def renew(tensors: Iterable[Tensor]) -> None:
    """Memory again for what was released, all zeros; idempotent. A tensor is all of its memory."""
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() == 0:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()
