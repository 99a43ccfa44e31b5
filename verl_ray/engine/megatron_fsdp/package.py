"""The package megatron-fsdp, imported without megatron-core, and with corrected shards.

Invariant: no file of NVIDIA's package is edited. The project imports it only from here,
so that the corrections always apply.

- If megatron-core 0.16.1 can be imported, megatron-fsdp 0.6.1 takes its class of
  settings instead of its own. That class lacks settings which the package then passes.
  So the package is imported while megatron-core is hidden, and uses its own class.
- A bucket is cut into shards at multiples of a unit. A matrix smaller than the unit may
  lie across such a cut, which then goes through one of its rows: the shard has no
  shape. Such a matrix is moved to a unit of its own.
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
    """Prevent the import of a package within the context.

    Neither the package nor a module of it can be imported, even if it was before.
    """
    imported: dict[str, Any] = {
        module: sys.modules[module]
        for module in sys.modules
        if f"{module}.".startswith(f"{name}.")
    }
    # The import of a module whose entry is None fails.
    sys.modules.update(dict.fromkeys({name, *imported}))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(imported)


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
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "bucket_index",
    "fully_shard_optimizer",
    "megatron_fsdp",
    "param_and_grad_buffer",
    "uneven_dtensor",
]

_bucket_index = param_and_grad_buffer.build_data_parallel_buffer_index
_shard_of_bucket = param_and_grad_buffer._get_dp_buffer_shard_bucket_index


def bucket_index(
    elements: Sequence[torch.Size],
    data_parallel_rank: int,
    data_parallel_world_size: int,
    is_data_distributed: bool,
    ddp_config: Any,
    bucket_id: int = 0,
    chunk_size_factor: int = 1,
) -> tuple[dict[int, Any], Any, Any]:
    """Return the positions of tensors in a bucket whose shards begin between rows.

    It has the signature of the package's own function, and the same result unless a
    tensor would be cut within a row.

    Args:
        elements: The shapes of the tensors.
        data_parallel_rank: This rank.
        data_parallel_world_size: Number of ranks that share the bucket.
        is_data_distributed: True if the bucket is cut into shards.
        ddp_config: The package's settings.
        bucket_id: Number of the bucket.
        chunk_size_factor: The unit: shards begin at multiples of it.

    Returns:
        The positions of the tensors by their numbers, the bucket, and this rank's shard
        of it.
    """
    unit = chunk_size_factor
    ranks = data_parallel_world_size
    items, bucket, shard = _bucket_index(
        elements,
        data_parallel_rank,
        ranks,
        is_data_distributed,
        ddp_config,
        bucket_id,
        unit,
    )
    torn = [number for number, item in items.items() if _is_torn(item, unit)]
    if ddp_config.data_parallel_sharding_strategy == "no_shard" or not torn:
        return items, bucket, shard

    # Each torn tensor moves behind all others, to the beginning of a unit.
    end = 0
    for number, item in items.items():
        if number not in torn:
            end = max(end, item.global_data_index + item.size)
    for number in torn:
        start = math.ceil(end / unit) * unit
        items[number] = items[number]._replace(global_data_index=start)
        end = start + items[number].size

    # Every rank gets as many whole units.
    size = math.ceil(end / (unit * ranks)) * unit * ranks
    bucket = bucket._replace(size=size, items=list(items.values()))
    shard = _shard_of_bucket(bucket, is_data_distributed, ranks, data_parallel_rank)
    return items, bucket, shard


def _is_torn(item: Any, unit: int) -> bool:
    """Return whether a cut at a multiple of the unit would go through a row."""
    start = item.global_data_index
    row_size = item.shape[1:].numel()
    first_cut = (start // unit + 1) * unit
    cuts = range(first_cut, start + item.size, unit)
    return any((cut - start) % row_size for cut in cuts)


param_and_grad_buffer.build_data_parallel_buffer_index = bucket_index
