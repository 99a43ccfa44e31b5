"""Whole tensors on rank 0, put together from the slices that the ranks own, one at a time.

Invariant: the bits are the owners' own: they are added up as integers, of which all but one are 0. Collective.
Deliberately not here: which slices those are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.weight_sync.manifest import Parameter, Slice

Shards = Callable[[Iterable[str]], Iterator[tuple[Slice, Tensor]]]


def collected(parameters: Sequence[Parameter], shards: Shards, device: torch.device) -> Iterator[Tensor]:
    """Each parameter, whole on rank 0; what other ranks get has no meaning."""
    for parameter in parameters:
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        whole = torch.zeros(parameter.shape, dtype=bits, device=device)
        for place, value in shards([parameter.name]):
            box = tuple(slice(start, start + size) for start, size in zip(place.start, place.shape, strict=True))
            whole[box] = value.contiguous().view(bits)
        whole = whole.int()  # no backend adds up 16 bits
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.reduce(whole, dst=0)
        yield whole.to(bits).view(dtype)
