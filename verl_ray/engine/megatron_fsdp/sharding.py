"""`fully_shard`: a model without memory, and its optimizer, become what megatron-fsdp holds and drives.

Invariant: no rank has more memory than its own buffers and one bucket while it is built; gradients are summed over
ranks, never averaged; the optimizer has its groups, and has taken no step. Deliberately not here: values (the engine
fills the shards), and when what is gathered and reduced (the package's hooks, and the engine for the rest).

The package's own `fully_shard` puts all parameters into one group of the optimizer, so that norms decay like matrices,
and takes a step with gradients of 0, which decays the weights and leaves Adam one step ahead. Here the optimizer is
made from the sharded parameters, in its own groups, and that step is taken at a rate of 0 and not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.roles import OptimizerConfig
from verl_ray.engine.megatron_fsdp.package import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
)
from verl_ray.engine.module_engine import adam
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import materialize

STRATEGIES = {
    "none": "no_shard", "optimizer": "optim", "optimizer_gradients": "optim_grads", "all": "optim_grads_params",
}  # fmt: skip
"""What the package calls them."""


def fully_shard(
    model: RoleModel, optimizer: OptimizerConfig | None, backend: MegatronFsdpBackend, device: torch.device
) -> tuple[MegatronFSDP, torch.optim.AdamW | None]:
    """The module to call, whose parameters have memory on `device` but no values yet, and the optimizer of those that
    learn. `model`'s parameters are on the meta device, in the type of the computation."""
    alone = backend.sharding == "none"
    if alone:
        materialize(model.hf, device)
        model.hf.tie_weights()
    dtype = next(model.parameters()).dtype
    with contextlib.nullcontext() if alone else _left_empty(model):
        module = MegatronFSDP(
            model,
            _ranks(backend, device.type),
            DistributedDataParallelConfig(
                data_parallel_sharding_strategy=STRATEGIES[backend.sharding],
                outer_dp_sharding_strategy=STRATEGIES[backend.outer_sharding],
                # Without it the package sums gradients twice: in its hooks, and again when it is asked to finish. What
                # the setting means, the engine does: it keeps the hooks from it.
                overlap_grad_reduce=True,
                overlap_param_gather=backend.overlap_param_gather,
                bucket_size=backend.bucket_size,
                suggested_communication_unit_size=backend.bucket_size,
                fsdp_double_buffer=backend.double_buffer,
            ),
            MixedPrecisionPolicy(
                main_params_dtype=None if dtype == torch.float32 else torch.float32,  # None: those that compute
                main_grads_dtype=torch.float32,
                grad_comm_dtype=None if backend.reduce_in_float32 else torch.bfloat16,
            ),
            fsdp_unit_modules=list({type(layer) for layer in model.layers}) if backend.sharding == "all" else [],
            device=device,
            calculate_per_token_loss=True,  # sums: the weights of a loss hold the global denominators
            init_model_with_meta_device=not alone,
        )
    if optimizer is None:
        return module, None
    return module, shard_optimizer(adam(model.parameters(), optimizer))


def shard_optimizer(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """The optimizer of a sharded module's parameters, which from now on installs what it steps; as it was, but for its
    methods."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def _ranks(backend: MegatronFsdpBackend, device_type: str) -> FSDPDistributedIndex:
    """Groups of ranks. Experts are nobody's in particular: the package looks for theirs by the name."""
    world = dist.get_world_size()
    inner = backend.shard_size or world
    mesh, whole = _mesh(device_type, world // inner, inner)
    hybrid: Mapping[str, Any] = {}
    if inner < world:
        hybrid = {"dp_outer_dim": "outer", "hybrid_fsdp_group": whole, "hybrid_fsdp_expt_group": whole}
    return FSDPDistributedIndex(
        mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        hsdp_outer_dp_shard=backend.outer_sharding != "none",
        expt_device_mesh=mesh,
        **hybrid,
    )


@functools.cache
def _mesh(device_type: str, outer: int, inner: int) -> tuple[DeviceMesh, Any]:
    """The package wants a dim of tensor-parallel ranks. And the group of all ranks, where there are groups of them."""
    if outer == 1:
        return init_device_mesh(device_type, (inner, 1), mesh_dim_names=("shard", "tp")), None
    mesh = init_device_mesh(device_type, (outer, inner, 1), mesh_dim_names=("outer", "shard", "tp"))
    return mesh, mesh["outer", "shard"]._flatten("all").get_group()


@contextlib.contextmanager
def _left_empty(model: nn.Module) -> Iterator[None]:
    """The package gives memory to one bucket after the other, and asks each module to set its parameters anew then.
    They stay as they are; what the package undoes, ties between parameters and computed buffers, is restored."""
    holders: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append((module, name))
    modules = {module for held in holders.values() for module, _ in held}

    def restore(module: nn.Module, places: list[tuple[nn.Module, str, str]], buffers: dict[str, Tensor]) -> None:
        for other, other_name, name in places:
            setattr(other, other_name, getattr(module, name))
        for name, value in buffers.items():
            getattr(module, name).copy_(value)

    for module in modules:
        places = [
            (other, other_name, name)
            for name, parameter in module.named_parameters(recurse=False)
            for other, other_name in holders[id(parameter)]
            if other is not module
        ]
        kept = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        module.reset_parameters = functools.partial(restore, module, places, kept)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            del module.reset_parameters
