"""Bringing what megatron-fsdp holds to another device and back.

Invariant: tensors that share memory share it afterwards, at the same places, so the package's buffers and the shards
that look into them stay one; and what was left behind is free. Deliberately not here: when (`engine.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Everything that these look into goes to `device`, in place; these must be all that look into it. The device is
    not waited for."""
    sharing: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.device != device and tensor.untyped_storage().nbytes():
            sharing[tensor.untyped_storage().data_ptr()].append(tensor)
    for together in sharing.values():
        there = together[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=together[0].device).set_(there)
        here = whole.to(device, copy=True, non_blocking=True).untyped_storage()
        for tensor in together:
            at = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(here, *at)


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
