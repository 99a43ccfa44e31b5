"""The `megatron_fsdp` backend: parameters, gradients and optimizer state in the sharded buffers of megatron-fsdp.

Invariant: what is computed is the plain engine's; the package's hooks gather parameters before a module computes,
release them behind it, and sum and scatter gradients; between computations this rank's shards are DTensors that are cut
between rows, unevenly, and say where. Deliberately not here: building them (`sharding.py`), and the package's import
(`package.py`).
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
from verl_ray.config.roles import OptimizerConfig
from verl_ray.engine.megatron_fsdp import residence
from verl_ray.engine.megatron_fsdp.package import uneven_dtensor
from verl_ray.engine.megatron_fsdp.sharding import fully_shard
from verl_ray.engine.micro_batches import Loss, MicroBatches
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.engine.offload import Held
from verl_ray.models import lora
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import TensorSource, fill, own_box
from verl_ray.ops.outputs import Outputs
from verl_ray.weight_sync.manifest import Manifest

MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronFsdpEngine(ModuleEngine):
    forward_is_collective = True

    @property
    def backend(self) -> MegatronFsdpBackend:
        """The settings of this engine, which `build_engine` chose by their kind."""
        assert isinstance(self.spec.backend, MegatronFsdpBackend)
        return self.spec.backend

    # ----------------------------------------------------------------------------------------------- building

    def shard(self, model: RoleModel) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self._sharded, self._adam = fully_shard(model, self.spec.optimizer, self.backend, self.device)
        held = self._sharded.param_and_grad_buffer.optimizer_named_parameters
        self._parameters: dict[str, DTensor] = {name.removeprefix("hf."): value for name, value in held}
        for value in self._parameters.values():
            uneven_dtensor.update_uneven_dtensor_chunk_metadata(value)
        self._manifest = self._in_their_types(self._manifest)

    @torch.no_grad()
    def fill(self, source: TensorSource) -> None:
        new, unused = self.model.heads_of_others
        new = new | lora.initial_scales(self.model.hf)
        fill(self.model.hf, source, new=new, unused=unused, seed=self.spec.seed)
        self._install()

    def wrap(self, model: RoleModel) -> nn.Module:
        return self._sharded

    def learner(self, config: OptimizerConfig) -> torch.optim.AdamW:
        assert self._adam is not None
        return self._adam

    def _in_their_types(self, manifest: Manifest) -> Manifest:
        """What learns, or is merged with what learns, is sent in float32; the rest in the type that it computes in."""
        exact = {name for name, value in self._parameters.items() if value.requires_grad}
        exact |= {name for name in self._parameters if name.endswith(lora.BASE_WEIGHT)}

        def typed(name: str) -> str:
            return "float32" if self._places[name][0] in exact else self.spec.backend.dtype

        return Manifest(
            tuple(dataclasses.replace(one, dtype=typed(one.tied_to or one.name)) for one in manifest.parameters)
        )

    # --------------------------------------------------------------------------------------------- computation

    def _accumulate(self, batches: MicroBatches, outputs: Outputs, loss: Loss) -> None:
        for i, batch in enumerate(batches):
            with self.summing(last=i == len(batches) - 1):
                value = loss(batch, self._run(batch, outputs))
                # the package would find these two moments by itself if what the model returns were a tensor
                self._sharded.pre_backward()
                value.backward()
                self._sharded.post_backward()

    @contextlib.contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        """The hooks sum what is shared out in every micro-batch; the rest, and over groups of ranks, in the last."""
        self._sharded.is_last_microbatch = last and self.backend.overlap_grad_reduce
        yield

    def _norm(self) -> float:
        sharded, ranks = self._sharded, self._sharded.dist_index
        if not self.backend.overlap_grad_reduce:
            raw = [value for value in sharded.raw_param.values() if value.requires_grad]
            sharded.grad_reduce_pipeline.reduce_gradients(raw, outer_fsdp_group_grad_reduce=ranks.use_hybrid_fsdp)
        sharded.finish_grad_sync()
        norm = torch.nn.utils.get_total_norm([gradient for _, gradient in self._gradients() if gradient is not None])
        squares = norm.to(self.device) ** 2
        if self.backend.sharding != "none":
            shared_out_to_all = self.backend.outer_sharding != "none"
            dist.all_reduce(squares, group=ranks.get_dp_group() if shared_out_to_all else ranks.get_fsdp_group())
        return float(squares.sqrt())

    def _step(self, norm: float, rate: float) -> None:
        assert self.optimizer is not None and self.spec.optimizer is not None
        limit = self.spec.optimizer.max_grad_norm
        if limit is not None:
            found = [gradient for _, gradient in self._gradients() if gradient is not None]
            if found:  # a rank may hold nothing of what learns
                torch._foreach_mul_(found, min(1.0, limit / (norm + 1e-6)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step(sync_grad_before_optimizer_step=False)  # type: ignore[call-arg]
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                self.optimizer.state[parameter]["step"] += 1  # this rank holds nothing of it, and counts as the others
        self._install()

    def _install(self) -> None:
        """From now on, what is in the shards computes."""
        self._sharded.install_optimized_model_weights()
        self._sharded.synchronize_param_gather()
        if not self.backend.overlap_param_gather:
            self._sharded.start_param_sync(force_sync=True)

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            yield name, gradient.to_local() if isinstance(gradient, DTensor) else None

    # -------------------------------------------------------------------------------------------- weights, state

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def whole(self, value: Tensor) -> Tensor:
        found: Tensor = uneven_dtensor.uneven_dtensor_to_full_tensor(value)
        return found

    def _leaving(self, name: str, parameters: Mapping[str, Tensor], *, merges: bool) -> Tensor:
        """Collective where there is an adapter: a weight and its B are cut apart, so B comes whole, as A does."""
        local = self._own(self._parameters[name])
        prefix = name.removesuffix(lora.BASE_WEIGHT)
        if merges and self.spec.lora is not None and prefix != name:
            a, b = (self.whole(self._parameters[f"{prefix}.lora_{side}.{lora.ADAPTER}.weight"]) for side in "AB")
            rows, scale = own_box(self._parameters[name])[0], self.spec.lora.alpha / self.spec.lora.rank
            local = torch.addmm(local.float(), b[rows], a, alpha=scale)
        return self._cut_alike(name, local)

    @staticmethod
    def _own(value: DTensor) -> Tensor:
        """This rank's part."""
        return value._local_tensor.detach()

    def _cut_alike(self, name: str, local: Tensor) -> DTensor:
        """A DTensor of the parameter's shape, cut as it is, of which this rank holds `local`."""
        of = self._parameters[name]
        made = DTensor(local, of._spec, requires_grad=False)  # from_local would bring it to the mesh's device
        for says in ("__create_chunk_list__", "__create_write_items__"):
            setattr(made._local_tensor, says, getattr(of._local_tensor, says))
        return made

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, self._rng_key: self._rng}
        if self.optimizer is None:
            return state
        learned = {name: value for name, value in self._parameters.items() if value.requires_grad}
        model = {f"hf.{name}": self._cut_alike(name, self._own(value)) for name, value in learned.items()}
        for parameter in self._manifest.parameters:
            if f"hf.{parameter.tied_to}" in model:
                model[f"hf.{parameter.name}"] = model[f"hf.{parameter.tied_to}"]
        of_optimizer = {}
        for name, value in learned.items():
            held = self.optimizer.state[value]
            moments = {kind: self._cut_alike(name, self._own(held[kind])) for kind in MOMENTS}
            of_optimizer[f"hf.{name}"] = {"step": held["step"], **moments}
        names = {id(value): f"hf.{name}" for name, value in learned.items()}
        groups = [
            group | {"params": [names[id(value)] for value in group["params"]]} for group in self.optimizer.param_groups
        ]
        return state | {"model": model, "optimizer": {"state": of_optimizer, "param_groups": groups}}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """The tensors of `state` are this engine's own, so they are here already."""
        self.steps = int(state["steps"])
        self._load_rng(state)
        if self.optimizer is not None:
            self._install()

    def before_offload(self) -> None:
        if self.backend.sharding != "none":
            self._sharded.all_gather_pipeline.reset(preserve_non_fsdp_units=False)  # what is gathered
        residence.release(self._gradient_buffers())

    def held_weights(self) -> list[Held]:
        buffer = self._sharded.param_and_grad_buffer
        held = [(name, value._local_tensor) for name, value in self._parameters.items()]
        for number, group in enumerate(buffer.parameter_groups):
            for kind in ("model_weight_buffer", "main_weight_buffer", "hfsdp_helper_wbuf"):
                one = getattr(group, kind)
                if one is not None:
                    held.append((f"{kind} {number}", one.data))
        known = {tensor.untyped_storage().data_ptr() for _, tensor in held}
        # the parameters that compute look into a buffer unless that is gathered first
        raw = (value for value in buffer.params if value.untyped_storage().data_ptr() in known)
        return residence.held_together([*held, *(("", value) for value in raw)])

    def held_moments(self) -> list[Held]:
        if self.optimizer is None:
            return []
        names = {id(value): name for name, value in self._parameters.items()}
        moments = [
            (f"{kind} of {names[id(parameter)]}", state[kind]._local_tensor)
            for parameter, state in self.optimizer.state.items()
            for kind in MOMENTS
        ]
        return residence.held_together(moments)

    def after_reload(self) -> None:
        residence.renew(self._gradient_buffers())
        self._install()

    def _gradient_buffers(self) -> list[Tensor]:
        return [whole for whole in self._sharded.param_and_grad_buffer.buffer.values() if whole.numel()]
