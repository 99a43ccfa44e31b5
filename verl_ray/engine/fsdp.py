"""The `fsdp` backend: parameters, gradients and optimizer state sharded over ranks by torch's FSDP2.

Invariant: what is computed is the plain engine's; sharding decides only who holds what, and when it is gathered.
Deliberately not here: what torch has (meshes, gathering, reduction), and reading weights (`models/weights.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl_ray.config.schema import FsdpBackend
from verl_ray.data.stages import Rows
from verl_ray.engine.base import ForwardResult
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.models.role_model import Outputs, RoleModel
from verl_ray.parallel.sharding_manager import ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager


class FsdpEngine(ModuleEngine):
    forward_is_collective = True

    def shard(self, model: RoleModel) -> None:
        backend = self.spec.backend
        assert isinstance(backend, FsdpBackend)
        mesh = self._mesh(backend)
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for unit in [*model.layers, model]:
            sharded = fully_shard(
                unit, mesh=mesh, mp_policy=precision, reshard_after_forward=backend.sharding in ("full", "hybrid")
            )
            # summed, not averaged: the weights of a loss hold the global denominators; gloo has no other reduction
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def sharding_manager(self) -> ShardingManager:
        if self.peers == 1:
            return ShardingManager()
        groups = [list(range(first, first + self.peers)) for first in range(0, self.world_size, self.peers)]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert group is not None, "every rank is in one of them"
        return UlyssesManager(group)

    def _mesh(self, backend: FsdpBackend) -> DeviceMesh:
        """Ranks that shard, and ranks that hold copies: of two dims, the first is the copies'."""
        if backend.sharding in ("full", "grad_op"):
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("fsdp",))
        size = 1 if backend.shard_size is None else backend.shard_size
        return init_device_mesh(self.device.type, (self.world_size // size, size), mesh_dim_names=("dp", "fsdp"))

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
