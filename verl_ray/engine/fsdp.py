"""The `fsdp` backend: state sharded over ranks by torch's FSDP2.

Parameters, gradients and optimizer state are sharded.

Invariant: what is computed is what the plain engine computes. Sharding only decides
which rank holds what, and when it is gathered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from verl_ray.backends.fsdp import FsdpBackend
from verl_ray.columns.stages import Rows
from verl_ray.engine.base import ForwardResult
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.engine.offload import OffloadableTensor
from verl_ray.errors import EngineError
from verl_ray.models.role_model import RoleModel
from verl_ray.models.tensor_sources import RankZeroReader, TensorSource
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.parallel.sharding import ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class FsdpEngine(ModuleEngine):
    """An engine whose model is sharded by FSDP2."""

    forward_is_collective = True

    @property
    def backend(self) -> FsdpBackend:
        """The settings of this engine."""
        assert isinstance(self.spec.backend, FsdpBackend)
        return self.spec.backend

    # ------------------------------------------------------------------------- building

    def shard(self, model: RoleModel) -> None:
        mesh = self._mesh()
        precision = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32
        )
        offload_policy = OffloadPolicy()
        if self.backend.host_parameters:
            offload_policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

        # These are given bfloat16, as by transformers; their code makes it float32.
        exact = dataclasses.replace(
            precision, param_dtype=torch.float32, cast_forward_inputs=False
        )
        precise_units: list[nn.Module] = []
        if self.dtype != torch.float32:
            precise_units = model.precise_units
        inner_units = [*precise_units, *model.layers, *self._embedding_units(model)]

        # FSDP2 gathers one unit at a time, and wants inner ones first. The model itself
        # is the unit of all parameters that are in no other unit.
        reshards = self.backend.sharding in ("full", "hybrid")
        head = model.hf.get_output_embeddings()
        for module in [*inner_units, model]:
            # The backward pass begins with what computes last. Resharded, it would be
            # gathered again at once. After a pass without gradients, `forward` reshards
            # it.
            computes_last = module is model or module is head
            unit = fully_shard(
                module,
                mesh=mesh,
                mp_policy=exact if module in precise_units else precision,
                offload_policy=offload_policy,
                reshard_after_forward=reshards and not computes_last,
            )

            # Gradients are summed, not averaged, since the weights of a loss contain
            # the global denominators. gloo has no other reduction.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

        layers = [unit for unit in model.layers if isinstance(unit, FSDPModule)]
        self._set_prefetching(layers)

    def _embedding_units(self, model: RoleModel) -> list[nn.Module]:
        """Return the embeddings that are units of their own, as configured."""
        if not self.backend.embedding_units:
            return []
        modules = model.embedding_units
        if not modules:
            raise EngineError(
                f"{self.spec.role}.backend.embedding_units: {self.spec.model_path}"
                " ties its embeddings, which are one parameter then; set it to"
                " false"
            )
        return modules

    def _set_prefetching(self, layers: Sequence[FSDPModule]) -> None:
        """Let each layer gather the next layers while it computes."""
        count = self.backend.prefetch_layers
        if not count:
            return
        for i, layer in enumerate(layers):
            following = layers[i + 1 : i + 1 + count]
            preceding = layers[max(0, i - count) : i]
            layer.set_modules_to_forward_prefetch(list(following))
            # The backward pass visits the layers in reverse order.
            layer.set_modules_to_backward_prefetch(list(preceding[::-1]))

    def tensor_source(self) -> TensorSource:
        if self.backend.read_weights == "rank_zero":
            return RankZeroReader(
                self.spec.model_path,
                self.parameter_device,
                trusts_code=self.spec.trusts_code,
            )
        return super().tensor_source()

    def sharding_manager(self) -> ShardingManager:
        if self.peers == 1:
            return ShardingManager()
        groups = [
            list(range(first, first + self.peers))
            for first in range(0, self.world_size, self.peers)
        ]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert group is not None, "every rank is in one of them"
        return UlyssesManager(group)

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of ranks that shard the parameters.

        For hybrid sharding the mesh has two dimensions: the first one has the ranks
        with copies of the same shard.
        """
        backend = self.backend
        device_type = self.device.type
        if backend.sharding in ("full", "grad_op"):
            return init_device_mesh(
                device_type, (self.world_size,), mesh_dim_names=("fsdp",)
            )

        shard_size = backend.shard_size
        if shard_size is None:
            shard_size = 1
        num_copies = self.world_size // shard_size
        return init_device_mesh(
            device_type, (num_copies, shard_size), mesh_dim_names=("dp", "fsdp")
        )

    @property
    def parameter_device(self) -> torch.device:
        if self.backend.host_parameters:
            return torch.device("cpu")
        return self.device

    # ---------------------------------------------------------------------- computation

    def forward(self, rows: Rows, outputs: RequestedOutputs) -> ForwardResult:
        result = super().forward(rows, outputs)
        # Without a backward pass, which reshards them, parameters may stay gathered in
        # the dtype of the computation. The optimizer, the state and the weight sync
        # read the sharded ones.
        self._reshard()
        return result

    @contextlib.contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(
            last or resolved(self.backend.accumulate) == "sharded"
        )
        yield

    @contextlib.contextmanager
    def computation_context(self) -> Iterator[None]:
        if not self.backend.activation_offload:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._to_host, self._from_host):
            yield

    def _to_host(self, saved: Tensor) -> tuple[Tensor, torch.device | None]:
        """Copy an activation to the host until the backward pass.

        Parameters are returned as they are, with None for a device: they are gathered
        again for the backward pass.
        """
        owner = saved if saved._base is None else saved._base
        if isinstance(owner, nn.Parameter):
            return saved, None

        pinned = self.device.type == "cuda"
        host_copy = torch.empty(
            saved.size(), dtype=saved.dtype, layout=saved.layout, pin_memory=pinned
        )
        host_copy.copy_(saved, non_blocking=pinned)
        return host_copy, saved.device

    @staticmethod
    def _from_host(stored: tuple[Tensor, torch.device | None]) -> Tensor:
        saved, device = stored
        if device is None:
            return saved
        return saved.to(device, non_blocking=True)

    # -------------------------------------------------------------------------- offload

    def before_offload(self) -> None:
        self.refuse_pending_gradients()

    def offloadable_weights(self) -> list[OffloadableTensor]:
        self._reshard()
        names = {id(value): name for name, value in self.model.named_parameters()}

        shards: list[FSDPParam] = []
        for unit in self._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                shards.extend(group.fsdp_params)

        # FSDP2 would otherwise notice only in its first pass that a shard has been
        # allocated.
        with torch.no_grad():
            for shard in shards:
                shard.reset_sharded_param()

        return [
            _offloadable_shard(names[id(shard.sharded_param)], shard)
            for shard in shards
        ]

    def _units(self) -> Iterator[FSDPModule]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module

    def _reshard(self) -> None:
        for unit in self._units():
            unit.reshard()


def _offloadable_shard(name: str, shard: FSDPParam) -> OffloadableTensor:
    """Return this rank's shard of a parameter, with its padding.

    Shards are padded to the number of rows of the largest one. FSDP2 refers to the
    memory in two places. `_sharded_param_data`, flat and padded, is what it gathers.
    `sharded_param`, a DTensor without the padding, is what the optimizer, the state and
    the weight sync read.
    """

    def replace_memory(memory: Tensor) -> None:
        # A DTensor, though its declared type is more general.
        parameter: Any = shard.sharded_param
        rows = 0
        if parameter._local_tensor.numel():
            rows = parameter._local_tensor.size(0)
        local = memory.view(shard.padded_sharded_param_size).narrow(0, 0, rows)

        shard._sharded_param_data = memory
        moved = nn.Parameter(
            DTensor(local, parameter._spec, requires_grad=False),
            parameter.requires_grad,
        )
        # `Module.to` does the same: the parameter remains the object that the module
        # and the optimizer refer to.
        torch.utils.swap_tensors(parameter, moved)

    return OffloadableTensor(name, lambda: shard._sharded_param_data, replace_memory)
