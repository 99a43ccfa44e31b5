"""The `fsdp` backend: parameters, gradients and optimizer state sharded over ranks by torch's FSDP2.

Invariant: what is computed is the plain engine's; sharding decides only who holds what, and when it is gathered.
Deliberately not here: what torch has (meshes, gathering, reduction), and reading weights (`models/weights.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl_ray.config.backends import FsdpBackend
from verl_ray.data.stages import Rows
from verl_ray.engine.base import ForwardResult
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.errors import EngineError
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import RankZeroReader, TensorSource
from verl_ray.ops.outputs import Outputs
from verl_ray.parallel.sharding_manager import ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager


class FsdpEngine(ModuleEngine):
    forward_is_collective = True

    @property
    def backend(self) -> FsdpBackend:
        """The settings of this engine, which `BACKENDS` chose by their kind."""
        assert isinstance(self.spec.backend, FsdpBackend)
        return self.spec.backend

    def shard(self, model: RoleModel) -> None:
        backend = self.backend
        mesh = self._mesh()
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        home = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if backend.host_parameters else OffloadPolicy()
        apart: list[nn.Module] = []
        if backend.embedding_units:
            apart = model.embedding_units
            if not apart:
                raise EngineError(
                    f"{self.spec.role}.backend.embedding_units: {self.spec.model_path} ties its embeddings, which are "
                    f"one parameter then; set it to false"
                )
        units = []
        for unit in [*model.layers, *apart, model]:
            sharded = fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=home,
                reshard_after_forward=backend.sharding in ("full", "hybrid"),
            )
            units.append(sharded)
            # summed, not averaged: the weights of a loss hold the global denominators; gloo has no other reduction
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        if ahead := backend.prefetch_layers:
            layers = units[: len(model.layers)]
            for i, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
                layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])

    def source(self) -> TensorSource:
        if self.backend.read_weights == "rank_zero":
            return RankZeroReader(self.spec.model_path, self.home)
        return super().source()

    def sharding_manager(self) -> ShardingManager:
        if self.peers == 1:
            return ShardingManager()
        groups = [list(range(first, first + self.peers)) for first in range(0, self.world_size, self.peers)]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert group is not None, "every rank is in one of them"
        return UlyssesManager(group)

    def _mesh(self) -> DeviceMesh:
        """Ranks that shard, and ranks that hold copies: of two dims, the first is the copies'."""
        backend = self.backend
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

    @property
    def home(self) -> torch.device:
        return torch.device("cpu") if self.backend.host_parameters else self.device

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        if not self.backend.activation_offload:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._to_host, self._from_host):
            yield

    def _to_host(self, saved: Tensor) -> tuple[Tensor, torch.device | None]:
        """A copy on the host, but of parameters, which are gathered again for the backward pass."""
        of = saved if saved._base is None else saved._base
        if isinstance(of, nn.Parameter):
            return saved, None
        pinned = self.device.type == "cuda"
        kept = torch.empty(saved.size(), dtype=saved.dtype, layout=saved.layout, pin_memory=pinned)
        return kept.copy_(saved, non_blocking=pinned), saved.device

    @staticmethod
    def _from_host(kept: tuple[Tensor, torch.device | None]) -> Tensor:
        saved, device = kept
        return saved if device is None else saved.to(device, non_blocking=True)

    @contextlib.contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last or self.backend.accumulate == "sharded")
        yield
