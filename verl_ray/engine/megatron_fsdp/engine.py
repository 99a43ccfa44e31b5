"""The `megatron_fsdp` backend: parameters, gradients and optimizer state in the sharded
buffers of megatron-fsdp.

Invariant: what is computed is what the plain engine computes. The package's hooks
gather parameters before a module computes, release them afterwards, and sum and scatter
gradients. Between computations this rank's shards are DTensors that are cut between
rows, unevenly, and carry their positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.engine.megatron_fsdp.sharding import fully_shard, uneven_dtensor
from verl_ray.engine.micro_batches import Loss, MicroBatches
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.engine.offload import OffloadableTensor
from verl_ray.engine.shared_storages import (
    offloadable_storages,
    release_memory,
    renew_memory,
)
from verl_ray.models import lora
from verl_ray.models.role_model import RoleModel
from verl_ray.models.tensor_sources import TensorSource
from verl_ray.models.weights import fill, own_box
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.weight_sync.manifest import Manifest

_WEIGHT_BUFFERS = ("model_weight_buffer", "main_weight_buffer", "hfsdp_helper_wbuf")
"""The attributes of the package's groups of parameters that may hold weights."""


class MegatronFsdpEngine(ModuleEngine):
    """An engine whose model is sharded by megatron-fsdp."""

    forward_is_collective = True

    @property
    def backend(self) -> MegatronFsdpBackend:
        """The settings of this engine, which `build_engine` chose by their kind."""
        assert isinstance(self.spec.backend, MegatronFsdpBackend)
        return self.spec.backend

    # ------------------------------------------------------------------------- building

    def shard(self, model: RoleModel) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)

        self._sharded, self._adamw = fully_shard(
            model, self.spec.optimizer, self.backend, self.device
        )
        named_shards = self._sharded.param_and_grad_buffer.optimizer_named_parameters
        self._parameters: dict[str, DTensor] = {
            name.removeprefix("hf."): value for name, value in named_shards
        }
        for value in self._parameters.values():
            uneven_dtensor.update_uneven_dtensor_chunk_metadata(value)

        self._manifest = self._in_sent_types(self._manifest)

    @torch.no_grad()
    def fill(self, source: TensorSource) -> None:
        new, unused = self.model.head_differences
        new = new | lora.initial_scales(self.model.hf)
        fill(
            self.model.hf,
            source,
            names=self.model.names,
            new=new,
            unused=unused,
            seed=self.spec.seed,
        )
        self._install_weights()

    def wrap(self, model: RoleModel) -> nn.Module:
        return self._sharded

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.AdamW:
        assert self._adamw is not None
        return self._adamw

    def _in_sent_types(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the types in which tensors are sent.

        A parameter that learns, or that an adapter is merged into, is sent in float32;
        any other in the type in which it computes.
        """
        exact = {
            name
            for name, value in self._parameters.items()
            if value.requires_grad or name.endswith(lora.BASE_WEIGHT)
        }

        parameters = []
        for parameter in manifest.parameters:
            origin = self._origins[parameter.tied_to or parameter.name]
            dtype: str = self.spec.backend.compute_dtype
            if origin.parameter in exact:
                dtype = "float32"
            parameters.append(dataclasses.replace(parameter, dtype=dtype))
        return Manifest(tuple(parameters))

    # ---------------------------------------------------------------------- computation

    def _accumulate_gradients(
        self, batches: MicroBatches, outputs: RequestedOutputs, loss: Loss
    ) -> None:
        last = len(batches) - 1
        for i, batch in enumerate(batches):
            with self.gradient_sync(last=i == last):
                value = loss(batch, self._run(batch, outputs))
                # The package recognizes these two moments by itself only if the output
                # of the model is a tensor.
                self._sharded.pre_backward()
                value.backward()
                self._sharded.post_backward()

    @contextlib.contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        # The hooks sum sharded gradients in every micro-batch. Other gradients, and
        # sums over groups of ranks, wait for the last one.
        self._sharded.is_last_microbatch = last and self.backend.overlap_grad_reduce
        yield

    def _gradient_norm(self) -> float:
        sharded = self._sharded
        ranks = sharded.dist_index

        if not self.backend.overlap_grad_reduce:
            # No hook has summed them.
            learning = [
                value for value in sharded.raw_param.values() if value.requires_grad
            ]
            sharded.grad_reduce_pipeline.reduce_gradients(
                learning, outer_fsdp_group_grad_reduce=ranks.use_hybrid_fsdp
            )
        sharded.finish_grad_sync()

        norm = torch.nn.utils.get_total_norm(self._own_gradients())
        squared_norm = norm.to(self.device) ** 2
        if self.backend.sharding != "none":
            # The ranks that hold the other shards.
            group = ranks.get_fsdp_group()
            if self.backend.outer_sharding != "none":
                group = ranks.get_dp_group()
            dist.all_reduce(squared_norm, group=group)
        return float(squared_norm.sqrt())

    def _clip_and_step(self, norm: float, rate: float) -> None:
        assert self._adamw is not None and self.spec.optimizer is not None

        limit = self.spec.optimizer.max_grad_norm
        gradients = self._own_gradients()
        # A rank may hold no part of any parameter that learns.
        if limit is not None and gradients:
            torch._foreach_mul_(gradients, min(1.0, limit / (norm + 1e-6)))

        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step(sync_grad_before_optimizer_step=False)  # type: ignore[call-arg]
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                # This rank holds no part of the parameter, and so has not stepped it.
                self._adamw.state[parameter]["step"] += 1
        self._install_weights()

    def _install_weights(self) -> None:
        """Make the weights that compute those of the shards."""
        self._sharded.install_optimized_model_weights()
        self._sharded.synchronize_param_gather()
        if not self.backend.overlap_param_gather:
            self._sharded.start_param_sync(force_sync=True)

    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                yield name, gradient.to_local()
            else:
                yield name, None

    def _named_weights(self) -> Iterator[tuple[str, Tensor, bool]]:
        for name, value in self._parameters.items():
            yield name, _local_part(value), value.requires_grad

    def _own_gradients(self) -> list[Tensor]:
        """Return this rank's parts of all gradients that it has a part of."""
        return [
            gradient for _, gradient in self._named_gradients() if gradient is not None
        ]

    # -------------------------------------------------------------------------- weights

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def gather(self, value: Tensor) -> Tensor:
        whole: Tensor = uneven_dtensor.uneven_dtensor_to_full_tensor(value)
        return whole

    def _outgoing_value(
        self, name: str, parameters: Mapping[str, Tensor], *, merge_adapter: bool
    ) -> Tensor:
        # Collective if there is an adapter.
        weight = self._parameters[name]
        local = _local_part(weight)
        prefix = name.removesuffix(lora.BASE_WEIGHT)
        is_adapted = prefix != name

        config = self.spec.lora
        if merge_adapter and config is not None and is_adapted:
            # A weight and its B are cut at different rows, so both A and B are
            # gathered.
            a = self._gathered_factor(prefix, "A")
            b = self._gathered_factor(prefix, "B")
            rows = own_box(weight)[0]
            scale = config.alpha / config.rank
            local = torch.addmm(local.float(), b[rows], a, alpha=scale)
        return self._sharded_like(name, local)

    def _gathered_factor(self, prefix: str, letter: str) -> Tensor:
        """Return a factor of an adapter, A or B, of the weight with this prefix."""
        name = f"{prefix}.lora_{letter}.{lora.ADAPTER}.weight"
        return self.gather(self._parameters[name])

    def _sharded_like(self, name: str, local: Tensor) -> DTensor:
        """Return a DTensor that is cut like a parameter.

        Args:
            name: The parameter.
            local: This rank's part of the DTensor.
        """
        parameter = self._parameters[name]
        # `DTensor.from_local` would move it to the device of the mesh.
        sharded = DTensor(local, parameter._spec, requires_grad=False)
        # The package puts functions that return the positions on the local tensor.
        for function in ("__create_chunk_list__", "__create_write_items__"):
            positions = getattr(parameter._local_tensor, function)
            setattr(sharded._local_tensor, function, positions)
        return sharded

    # ---------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        learning = {
            name: value
            for name, value in self._parameters.items()
            if self.adapter is None or f"hf.{name}" in self.adapter
        }
        model = {
            f"hf.{name}": self._sharded_like(name, _local_part(value))
            for name, value in learning.items()
        }
        for parameter in self._manifest.parameters:
            source = f"hf.{parameter.tied_to}"
            if source in model:
                model[f"hf.{parameter.name}"] = model[source]

        stream = self.random_stream
        state: dict[str, Any] = {"steps": self.steps, stream.key: stream.state}
        state["model"] = model
        if self._adamw is not None:
            state["optimizer"] = {
                "state": self._optimizer_state(self._adamw, learning),
                "param_groups": _named_groups(self._adamw, learning),
            }
        return state

    def _optimizer_state(
        self, optimizer: torch.optim.AdamW, learning: Mapping[str, DTensor]
    ) -> dict[str, dict[str, Any]]:
        """Return the step counter and moments of every parameter that learns."""
        states: dict[str, dict[str, Any]] = {}
        for name, value in learning.items():
            own = optimizer.state[value]
            states[f"hf.{name}"] = {
                kind: value
                if kind == "step"
                else self._sharded_like(name, _local_part(value))
                for kind, value in own.items()
            }
        return states

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        # The tensors of `state` are this engine's own, so their values are in place.
        self.steps = int(state["steps"])
        self.random_stream.restore(state, self.steps)
        self._install_weights()

    # -------------------------------------------------------------------------- offload

    def before_offload(self) -> None:
        if self.backend.sharding != "none":
            # Release the parameters that are gathered.
            self._sharded.all_gather_pipeline.reset(preserve_non_fsdp_units=False)
        release_memory(self._gradient_buffers())

    def offloadable_weights(self) -> list[OffloadableTensor]:
        buffer = self._sharded.param_and_grad_buffer
        tensors: list[tuple[str, Tensor]] = [
            (name, value._local_tensor) for name, value in self._parameters.items()
        ]
        for number, group in enumerate(buffer.parameter_groups):
            for kind in _WEIGHT_BUFFERS:
                weights = getattr(group, kind)
                if weights is not None:
                    tensors.append((f"{kind} {number}", weights.data))

        # Parameters that compute are views of these storages, unless they have to be
        # gathered first.
        addresses = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
        for parameter in buffer.params:
            if parameter.untyped_storage().data_ptr() in addresses:
                tensors.append(("", parameter))
        return offloadable_storages(tensors)

    def offloadable_moments(self) -> list[OffloadableTensor]:
        if self._adamw is None:
            return []

        names = {id(value): name for name, value in self._parameters.items()}
        moments = [
            (f"{kind} of {names[id(parameter)]}", state[kind]._local_tensor)
            for parameter, state in self._adamw.state.items()
            for kind in state
            if kind != "step"
        ]
        return offloadable_storages(moments)

    def after_reload(self) -> None:
        renew_memory(self._gradient_buffers())
        self._install_weights()

    def _gradient_buffers(self) -> list[Tensor]:
        buffers = self._sharded.param_and_grad_buffer.buffer.values()
        return [buffer for buffer in buffers if buffer.numel()]


def _local_part(value: DTensor) -> Tensor:
    """Return this rank's part of a sharded tensor, detached."""
    return value._local_tensor.detach()


def _named_groups(
    optimizer: torch.optim.AdamW, learning: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names in place of parameters."""
    names = {id(value): f"hf.{name}" for name, value in learning.items()}
    groups = []
    for group in optimizer.param_groups:
        parameters = [names[id(value)] for value in group["params"]]
        groups.append(group | {"params": parameters})
    return groups
