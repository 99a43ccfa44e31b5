"""Whole tensors on rank 0, put together from the slices that the ranks own, one at a time.

Invariant: the bits are the owners' own. Collective. Deliberately not here: which slices those are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.weight_sync.buckets import Entry, aligned_bytes
from verl_ray.weight_sync.manifest import Parameter, Slice
from verl_ray.weight_sync.slots import add_up, view

Shards = Callable[[Iterable[str]], Iterator[tuple[Slice, Tensor]]]


def collected(parameters: Sequence[Parameter], shards: Shards, device: torch.device) -> Iterator[Tensor]:
    """Each parameter, whole on rank 0; what other ranks get has no meaning."""
    for parameter in parameters:
        flat = torch.zeros(aligned_bytes(parameter), dtype=torch.uint8, device=device)
        whole = view(flat, Entry(parameter, 0))
        for place, value in shards([parameter.name]):
            box = tuple(slice(start, start + size) for start, size in zip(place.start, place.shape, strict=True))
            whole[box] = value
        if dist.is_initialized() and dist.get_world_size() > 1:
            add_up(flat)
        yield whole
