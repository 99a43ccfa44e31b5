"""The `fsdp` backend: parameters, gradients and optimizer state sharded over ranks by torch's FSDP2.

Invariant: what is computed is the plain engine's; sharding decides only who holds what, and when it is gathered.
Deliberately not here: what torch has (meshes, gathering, reduction), and reading weights (`models/weights.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_ray.backends.fsdp import FsdpBackend
from verl_ray.data.stages import Rows
from verl_ray.engine.base import ForwardResult
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.engine.offload import Held
from verl_ray.errors import EngineError
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import RankZeroReader, TensorSource
from verl_ray.ops.outputs import Outputs
from verl_ray.parallel.sharding_manager import ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


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
        reshards = backend.sharding in ("full", "hybrid")
        head = model.hf.get_output_embeddings()
        for unit in [*model.layers, *apart, model]:
            # What computes last is what the backward pass begins with: resharded, it would be gathered again at once.
            # After a pass without gradients `forward` reshards it.
            computes_last = unit is model or unit is head
            sharded = fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=home,
                reshard_after_forward=reshards and not computes_last,
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
        self._reshard()
        return found

    def before_offload(self) -> None:
        self.refuse_pending_gradients()

    def held_weights(self) -> list[Held]:
        self._reshard()
        names = {id(value): name for name, value in self.model.named_parameters()}
        groups = (unit._get_fsdp_state()._fsdp_param_group for unit in self._units())
        shards = [shard for group in groups if group is not None for shard in group.fsdp_params]
        with torch.no_grad():
            for shard in shards:
                shard.reset_sharded_param()  # else FSDP2 notices only in the first pass that a shard was given memory
        return [_shard_held(names[id(shard.sharded_param)], shard) for shard in shards]

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def _reshard(self) -> None:
        for unit in self._units():
            unit.reshard()

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


def _shard_held(name: str, shard: FSDPParam) -> Held:
    """This rank's shard of a parameter, with the rows that pad it to the size of the largest one.

    FSDP2 looks into this memory in two places: `_sharded_param_data`, flat and padded, is what it gathers;
    `sharded_param`, a DTensor without the padding, is what the optimizer, the state and the weight sync read.
    """

    def take(memory: Tensor) -> None:
        parameter: Any = shard.sharded_param  # a DTensor, which its type does not say
        rows = parameter._local_tensor.size(0) if parameter._local_tensor.numel() else 0
        local = memory.view(shard.padded_sharded_param_size).narrow(0, 0, rows)
        shard._sharded_param_data = memory
        moved = nn.Parameter(DTensor(local, parameter._spec, requires_grad=False), parameter.requires_grad)
        # as `module.to` does it: the parameter stays the object that the module and the optimizer know
        torch.utils.swap_tensors(parameter, moved)

    return Held(name, lambda: shard._sharded_param_data, take)
