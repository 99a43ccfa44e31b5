"""A model without memory, and its optimizer, turned into megatron-fsdp's sharded form.

Invariant: while a model is built, no rank has more memory than its own buffers and one
bucket. Gradients are summed over ranks, never averaged. The optimizer has its parameter
groups, and has taken no step. No file of NVIDIA's package is edited. The project
imports it only from here, so that these corrections always apply:

- If megatron-core 0.16.1 can be imported, megatron-fsdp 0.6.1 takes its class of
  settings instead of its own. That class lacks settings which the package then passes.
  So the package is imported while megatron-core is hidden, and uses its own class.
- A bucket is cut into shards at multiples of a unit. A matrix smaller than the unit may
  lie across such a cut, which then goes through one of its rows: the shard has no
  shape. Such a matrix is moved to a unit of its own.
- The package's own `fully_shard` puts all parameters into one group of the optimizer,
  so that norms decay like matrices. It also takes a step with gradients of 0, which
  decays the weights and leaves Adam one step ahead. Here the optimizer is made from the
  sharded parameters, in its own groups, and that step is taken at a rate of 0 and not
  counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.engine.optimizer import build_adamw
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import materialize

# -------------------------------------------------------------------------- the package

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


# ----------------------------------------------------------------------------- sharding

STRATEGIES = {
    "none": "no_shard",
    "optimizer": "optim",
    "optimizer_gradients": "optim_grads",
    "all": "optim_grads_params",
}
"""The package's name of each choice of `sharding`."""


def fully_shard(
    model: RoleModel,
    optimizer: OptimizerConfig | None,
    backend: MegatronFsdpBackend,
    device: torch.device,
) -> tuple[MegatronFSDP, torch.optim.AdamW | None]:
    """Return the sharded module, and the optimizer of the parameters that learn.

    The module's parameters have memory on the device, but no values yet.

    Args:
        model: The model on the meta device, in the type of the computation.
        optimizer: The settings of the optimizer; None for a model that does not learn.
        backend: The settings of the sharding.
        device: The device of the shards.
    """
    is_sharded = backend.sharding != "none"
    if not is_sharded:
        materialize(model.hf, device)
        model.hf.tie_weights()

    # Only with sharding=all a layer is gathered for its own computation alone.
    units: list[type[nn.Module]] = []
    if backend.sharding == "all":
        units = list({type(layer) for layer in model.layers})

    dtype = next(model.parameters()).dtype
    with _left_empty(model) if is_sharded else contextlib.nullcontext():
        module = MegatronFSDP(
            model,
            _rank_groups(backend, device.type),
            _communication_settings(backend),
            _precision_settings(backend, dtype),
            fsdp_unit_modules=units,
            device=device,
            # Gradients are summed: the weights of a loss hold the global denominators.
            calculate_per_token_loss=True,
            init_model_with_meta_device=is_sharded,
        )

    if optimizer is None:
        return module, None
    return module, shard_optimizer(build_adamw(model.parameters(), optimizer))


def _communication_settings(
    backend: MegatronFsdpBackend,
) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[backend.sharding],
        outer_dp_sharding_strategy=STRATEGIES[backend.outer_sharding],
        # Otherwise the package sums gradients twice: in its hooks, and again when it is
        # told to finish. The engine implements the setting: it disables the hooks.
        overlap_grad_reduce=True,
        overlap_param_gather=backend.overlap_param_gather,
        bucket_size=backend.bucket_size,
        suggested_communication_unit_size=backend.bucket_size,
        fsdp_double_buffer=backend.double_buffer,
    )


def _precision_settings(
    backend: MegatronFsdpBackend, dtype: torch.dtype
) -> MixedPrecisionPolicy:
    # None: the weights that compute are also the main weights.
    main_dtype = None if dtype == torch.float32 else torch.float32
    return MixedPrecisionPolicy(
        main_params_dtype=main_dtype,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=None if backend.reduce_in_float32 else torch.bfloat16,
    )


def shard_optimizer(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """Replace the methods of a sharded module's optimizer by the package's.

    From now on a step also installs the weights that it has computed. The groups, rates
    and states of the optimizer remain as they were.
    """
    rates = [group["lr"] for group in optimizer.param_groups]

    # The package takes a step. At a rate of 0 it changes nothing but the counters.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)

    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


# ------------------------------------------------------------------------------- ranks


def _rank_groups(
    backend: MegatronFsdpBackend, device_type: str
) -> FSDPDistributedIndex:
    """Return the groups of ranks that share, and of those that hold copies.

    The package looks for the mesh of experts by its name; here it is the same.
    """
    world_size = dist.get_world_size()
    group_size = backend.shard_size or world_size
    mesh, all_ranks = _device_mesh(device_type, world_size // group_size, group_size)

    hybrid: Mapping[str, Any] = {}
    if group_size < world_size:
        hybrid = {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": all_ranks,
            "hybrid_fsdp_expt_group": all_ranks,
        }
    return FSDPDistributedIndex(
        mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        hsdp_outer_dp_shard=backend.outer_sharding != "none",
        expt_device_mesh=mesh,
        **hybrid,
    )


@functools.cache
def _device_mesh(
    device_type: str, num_groups: int, group_size: int
) -> tuple[DeviceMesh, Any]:
    """Return the mesh of the ranks, and the group of all ranks.

    The package requires a dimension of tensor-parallel ranks, here of size 1. With one
    group the second result is None.
    """
    if num_groups == 1:
        mesh = init_device_mesh(
            device_type, (group_size, 1), mesh_dim_names=("shard", "tp")
        )
        return mesh, None

    mesh = init_device_mesh(
        device_type,
        (num_groups, group_size, 1),
        mesh_dim_names=("outer", "shard", "tp"),
    )
    all_ranks = mesh["outer", "shard"]._flatten("all").get_group()
    return mesh, all_ranks


# --------------------------------------------------------- building without values


@dataclass(frozen=True)
class _Attribute:
    """An attribute of a module that holds a parameter."""

    module: nn.Module
    name: str


@contextlib.contextmanager
def _left_empty(model: nn.Module) -> Iterator[None]:
    """Let the package allocate one bucket after the other, without setting values.

    The package calls `reset_parameters` of each module whose bucket it has allocated.
    Within the context that method sets no values. It only restores what the allocation
    undoes: ties between parameters, and computed buffers.
    """
    holders: dict[int, list[_Attribute]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append(_Attribute(module, name))
    modules = {
        holder.module for attributes in holders.values() for holder in attributes
    }

    for module in modules:
        ties = {
            name: [
                holder
                for holder in holders[id(parameter)]
                if holder.module is not module
            ]
            for name, parameter in module.named_parameters(recurse=False)
        }
        buffers = {
            name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)
        }
        reset = functools.partial(_restore, module, ties, buffers)
        module.reset_parameters = reset  # type: ignore[assignment]

    try:
        yield
    finally:
        for module in modules:
            del module.reset_parameters


def _restore(
    module: nn.Module,
    ties: Mapping[str, list[_Attribute]],
    buffers: Mapping[str, Tensor],
) -> None:
    """Restore a module's ties and buffers after the allocation of its parameters.

    Args:
        module: The module.
        ties: For each of its parameters, the attributes of other modules that hold it.
        buffers: The values of its buffers.
    """
    for name, holders in ties.items():
        for holder in holders:
            setattr(holder.module, holder.name, getattr(module, name))
    for name, values in buffers.items():
        getattr(module, name).copy_(values)
