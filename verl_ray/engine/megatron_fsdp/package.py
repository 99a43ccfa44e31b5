"""The package megatron-fsdp, imported so that megatron-core beside it does no harm, with buckets cut between rows.

Invariant: no file of NVIDIA's package is edited; the project imports it from here alone, so that it is always mended.
Deliberately not here: the mending of what `fully_shard` does to optimizers (`sharding.py`).

- Where megatron-core 0.16.1 can be imported, megatron-fsdp 0.6.1 takes that one's class of settings for its own, which
  lacks some that it then passes. So it is imported with megatron-core hidden, and uses the class that it brings.
- A matrix smaller than the unit in which a bucket is cut may lie across a cut, which then goes through one of its rows:
  such a shard has no shape. It is moved to a unit of its own.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

HIDDEN = "megatron.core"


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Inside, neither this package nor anything in it can be imported, even if it was before."""
    before: dict[str, Any] = {known: sys.modules[known] for known in sys.modules if f"{known}.".startswith(f"{name}.")}
    sys.modules.update(dict.fromkeys({name, *before}))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


with _hidden(HIDDEN):
    import megatron_fsdp
    from megatron_fsdp import (
        DistributedDataParallelConfig,
        FSDPDistributedIndex,
        MegatronFSDP,
        MixedPrecisionPolicy,
        fully_shard_optimizer,
        param_and_grad_buffer,
        uneven_dtensor,
    )

__all__ = [
    "DistributedDataParallelConfig", "FSDPDistributedIndex", "MegatronFSDP", "MixedPrecisionPolicy", "bucket_index",
    "fully_shard_optimizer", "megatron_fsdp", "param_and_grad_buffer", "uneven_dtensor",
]  # fmt: skip

_bucket_index = param_and_grad_buffer.build_data_parallel_buffer_index


def bucket_index(
    elements: Sequence[torch.Size],
    data_parallel_rank: int,
    data_parallel_world_size: int,
    is_data_distributed: bool,
    ddp_config: Any,
    bucket_id: int = 0,
    chunk_size_factor: int = 1,
) -> tuple[dict[int, Any], Any, Any]:
    """Where tensors of these shapes lie in a bucket, the bucket, and this rank's shard of it; a shard begins and ends
    between rows. As the package's own, but for what lies across a cut."""
    unit, ranks = chunk_size_factor, data_parallel_world_size
    items, bucket, shard = _bucket_index(
        elements, data_parallel_rank, ranks, is_data_distributed, ddp_config, bucket_id, unit
    )
    torn = [number for number, item in items.items() if _torn(item, unit)]
    if ddp_config.data_parallel_sharding_strategy == "no_shard" or not torn:
        return items, bucket, shard
    end = max((it.global_data_index + it.size for number, it in items.items() if number not in torn), default=0)
    for number in torn:
        start = math.ceil(end / unit) * unit
        items[number] = items[number]._replace(global_data_index=start)
        end = start + items[number].size
    size = math.ceil(end / (unit * ranks)) * unit * ranks
    bucket = bucket._replace(size=size, items=list(items.values()))
    cut = param_and_grad_buffer._get_dp_buffer_shard_bucket_index
    return items, bucket, cut(bucket, is_data_distributed, ranks, data_parallel_rank)


def _torn(item: Any, unit: int) -> bool:
    """Whether a cut, which can be at any multiple of the unit, may go through a row."""
    start, row = item.global_data_index, item.shape[1:].numel()
    first = (start // unit + 1) * unit
    return any((at - start) % row for at in range(first, start + item.size, unit))


param_and_grad_buffer.build_data_parallel_buffer_index = bucket_index
