"""The `fsdp` backend: parameters, gradients and optimizer state sharded over all ranks by torch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl_ray.config.schema import FsdpBackend
from verl_ray.data.stages import Rows
from verl_ray.engine.base import ForwardResult
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.models.role_model import Outputs, RoleModel


class FsdpEngine(ModuleEngine):
    forward_is_collective = True

    def wrap(self, model: RoleModel) -> nn.Module:
        backend = self.spec.backend
        assert isinstance(backend, FsdpBackend)
        mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("fsdp",))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for unit in [*model.layers, model]:
            sharded = fully_shard(
                unit, mesh=mesh, mp_policy=precision, reshard_after_forward=backend.reshard_after_forward
            )
            # summed, not averaged: the weights of a loss hold the global denominators; gloo has no other reduction
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        return model

    def forward(self, rows: Rows, outputs: Outputs) -> ForwardResult:
        found = super().forward(rows, outputs)
        # Without a backward pass that does it, parameters may stay gathered, in the type of the computation; the
        # optimizer, the state and the weight sync read the sharded ones.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    @contextlib.contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        yield
