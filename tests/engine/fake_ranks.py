"""One process that plays a rank of several in torch's fake process group.

The collectives of that group move nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """Play a rank in the block.

    DTensor caches facts about a mesh, as if a process had only one rank; the cache is
    cleared.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
