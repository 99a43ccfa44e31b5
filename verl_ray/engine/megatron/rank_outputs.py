"""Assembly of whole tensors on rank 0 from the slices that the ranks own.

Invariant: tensors are assembled one at a time, and their bits are exactly the
owners' bits. Collective: every rank iterates over the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.weight_sync.manifest import (
    Entry,
    Parameter,
    Slice,
    aligned_bytes,
)
from verl_ray.weight_sync.transport import parameter_view

Shards = Callable[[Iterable[str]], Iterator[tuple[Slice, Tensor]]]
"""A function with the signature of `Engine.shards`."""


def collect_whole(
    parameters: Sequence[Parameter], shards: Shards, device: torch.device
) -> Iterator[Tensor]:
    """Yield each parameter, whole on rank 0. Other ranks get undefined values."""
    for parameter in parameters:
        flat = torch.zeros(aligned_bytes(parameter), dtype=torch.uint8, device=device)
        whole = parameter_view(flat, Entry(parameter, 0))

        for part, value in shards([parameter.name]):
            box = tuple(
                slice(start, start + size)
                for start, size in zip(part.start, part.shape, strict=True)
            )
            whole[box] = value

        # Slices do not overlap and all other bytes are 0, so adding up the bytes of all
        # ranks reproduces every owner's bits. Integers are added exactly.
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.reduce(flat.view(torch.int64), dst=0)

        yield whole
