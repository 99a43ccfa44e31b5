"""One process that plays a rank of several, in torch's fake process group, whose collectives move nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is that rank. DTensor caches what it worked out for a mesh, as one rank has one."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
