"""The engines with one torch module per rank: building, optimizer, state and slices.

Invariant: what is computed is defined by `packed_engine.py`. A subclass only shards or
wraps the module, and defines how gradients are summed over ranks.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_ray.backends.base import ModuleBackend
from verl_ray.columns.packing import Topology
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.micro_batches import Loss, MicroBatch, MicroBatches
from verl_ray.engine.offload import (
    Offload,
    OffloadableTensor,
    offloadable,
    offloadable_entry,
)
from verl_ray.engine.optimizer import build_optimizer
from verl_ray.engine.packed_engine import PackedEngine, RandomStream
from verl_ray.engine.training_state import (
    learning_names,
    load_training_state,
    training_state,
)
from verl_ray.engine.weight_average import Stepped, begin_average
from verl_ray.errors import EngineError
from verl_ray.models.export import (
    build_manifest,
    describe_parameter,
    owned_part,
)
from verl_ray.models.lora import adapter_name, file_name, merged, write_config
from verl_ray.models.names import Box, is_adapter
from verl_ray.models.role_model import RoleModel, build_role_model, fill_role_model
from verl_ray.models.state_kernels import require_kernels
from verl_ray.models.tensor_sources import CheckpointReader, TensorSource
from verl_ray.models.weights import own_box
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import ShardingManager
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice


class ModuleEngine(PackedEngine):
    """An engine around one torch module per rank."""

    def __init__(
        self, spec: EngineSpec, *, device: torch.device, rank: int, world_size: int
    ) -> None:
        assert isinstance(spec.backend, ModuleBackend)
        self.spec = spec
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.dtype = getattr(torch, spec.backend.compute_dtype)
        self.peers = spec.backend.peers
        self.sharding = self.sharding_manager()
        self.topology = Topology(
            dp_rank=rank // self.peers,
            dp_size=world_size // self.peers,
            returns_results=rank % self.peers == 0,
        )

        require_kernels(spec.kernels, device=device.type, path=spec.model_path)
        # The model has no memory until it is sharded and filled.
        source = self.tensor_source()
        self.model = build_role_model(
            source,
            spec.model_path,
            spec.head,
            new_head=spec.new_head,
            adapter=spec.lora,
        )
        self._manifest, self._origins = build_manifest(self.model)
        self.describe(self.model)
        if spec.backend.activation_partition().recompute:
            self.model.hf.gradient_checkpointing_enable(
                # Nothing in a layer is random, since dropout is refused.
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        self.adapter = learning_names(self.model) if spec.lora is not None else None
        if spec.optimizer is None:
            self.model.requires_grad_(False)
        self.shard(self.model)
        self.fill(source)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        self.module = self.wrap(self.model)

        self.steps = 0
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optimizer is not None:
            self.optimizer = self.build_optimizer(spec.optimizer)
            if spec.average_decay is not None:
                begin_average(self._stepped())
        self.offload = Offload(device)
        self.random_stream = RandomStream(device, rank, spec.seed)

        # This rank's part of each outgoing tensor. It never changes.
        self._owned_parts: dict[str, tuple[Box, Slice] | None] = {}

    # ----------------------------------------------------------- what a backend defines

    def tensor_source(self) -> TensorSource:
        """Return the source of the model's weights."""
        return CheckpointReader(self.spec.model_path, trusts_code=self.spec.trusts_code)

    def shard(self, model: RoleModel) -> None:
        """Replace the parameters, which have no memory yet, by this rank's shards."""

    def fill(self, source: TensorSource) -> None:
        """Fill the parameters, or this rank's shards of them."""
        fill_role_model(
            self.model, source, seed=self.spec.seed, device=self.parameter_device
        )

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that learn."""
        return build_optimizer(self.model, config)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return what this rank holds between computations of each parameter.

        Names are those of the module of transformers.
        """
        return dict(self.model.hf.named_parameters())

    def gather(self, value: Tensor) -> Tensor:
        """Gather a parameter from all ranks. Collective."""
        return _full_tensor(value)

    def wrap(self, model: RoleModel) -> nn.Module:
        """Return the module to call."""
        return model

    @property
    def parameter_device(self) -> torch.device:
        """The device of this rank's parameters between computations."""
        return self.device

    def sharding_manager(self) -> ShardingManager:
        """Return the partition of a micro-batch's tokens over the peers."""
        return ShardingManager()

    @abstractmethod
    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward pass of a micro-batch.

        Gradients are summed over ranks in the last micro-batch of a call.
        """

    def computation_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for every pass, which sets the precision."""
        return contextlib.nullcontext()

    # ---------------------------------------------------------------------- computation

    def _compute_outputs(
        self, batches: MicroBatches, outputs: RequestedOutputs
    ) -> list[TokenOutputs]:
        return [self._run(batch, outputs) for batch in batches]

    def _accumulate_gradients(
        self, batches: MicroBatches, outputs: RequestedOutputs, loss: Loss
    ) -> None:
        last = len(batches) - 1
        for i, batch in enumerate(batches):
            with self.gradient_sync(last=i == last):
                loss(batch, self._run(batch, outputs)).backward()

    def _run(self, batch: MicroBatch, outputs: RequestedOutputs) -> TokenOutputs:
        """Pass a micro-batch through the module, and complete the peers' outputs."""
        with self.computation_context():
            own_outputs: TokenOutputs = self.module(batch.packed, outputs)
        return self.sharding.postprocess(own_outputs)

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(_full_tensor(norm))

    def _clip_and_step(self, norm: float, rate: float) -> None:
        assert self.optimizer is not None and self.spec.optimizer is not None
        limit = self.spec.optimizer.max_grad_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), limit, torch.tensor(norm)
            )

        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _stepped(self) -> Stepped:
        assert self.optimizer is not None
        yield from self.optimizer.state.items()

    def _zero_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.model.hf.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            yield name, gradient

    def _named_weights(self) -> Iterator[tuple[str, Tensor, bool]]:
        for name, value in self.parameters().items():
            local = value.to_local() if isinstance(value, DTensor) else value
            yield name, local, value.requires_grad

    # -------------------------------------------------------------------------- weights

    def manifest(self, *, separate_adapter: bool = False) -> Manifest:
        if not separate_adapter:
            return self._manifest
        adapter = [
            describe_parameter(adapter_name(name), value, adapter=True)
            for name, value in self.parameters().items()
            if is_adapter(name)
        ]
        return Manifest((*self._manifest.parameters, *adapter))

    @torch.no_grad()
    def shards(
        self, names: Iterable[str], *, separate_adapter: bool = False
    ) -> Iterator[tuple[Slice, Tensor]]:
        parameters = self.parameters()

        # The tensors of a parameter are adjacent, so its outgoing value is computed
        # once and only one is held.
        current: str | None = None
        value: Tensor
        for name in names:
            origin = self._origins[name]
            if origin.parameter != current:
                current = origin.parameter
                value = self._saved_value(
                    current, parameters, merge_adapter=not separate_adapter
                )

            if name not in self._owned_parts:
                self._owned_parts[name] = owned_part(value, origin.tensor, self.rank)
            owned = self._owned_parts[name]
            if owned is not None:
                box, part = owned
                local = value.to_local() if isinstance(value, DTensor) else value
                yield part, local[box].view(part.shape)

    def _saved_value(
        self, name: str, parameters: Mapping[str, Tensor], *, merge_adapter: bool
    ) -> Tensor:
        """Return a parameter as it leaves this engine, or a buffer, which is whole."""
        if name in parameters:
            return self._outgoing_value(name, parameters, merge_adapter=merge_adapter)
        return self.model.hf.get_buffer(name)

    def _outgoing_value(
        self, name: str, parameters: Mapping[str, Tensor], *, merge_adapter: bool
    ) -> Tensor:
        """Return a parameter as it leaves this engine, with or without its adapter."""
        lora = self.spec.lora
        if merge_adapter and lora is not None:
            return merged(name, parameters, lora)
        return parameters[name].detach()

    @torch.no_grad()
    def export(self, path: str, *, adapter: bool = False) -> None:
        lora = self.spec.lora
        if not adapter or lora is None:
            super().export(path, adapter=adapter)
            return

        parameters, tensors = self._adapter_tensors()
        configure = functools.partial(
            write_config, config=lora, base=self.spec.model_path, kind=self.head
        )
        self._write(Path(path), configure, parameters, tensors, stem="adapter_model")

    def _gathered_parameters(self) -> Iterator[Tensor]:
        parameters = self.parameters()
        origins = [self._origins[parameter.name] for parameter in self._manifest.sent]

        # Each parameter is gathered once, also if it consists of several tensors.
        for name in dict.fromkeys(origin.parameter for origin in origins):
            # The shard has no name of its own, so that its memory is free after this.
            value = self._saved_value(name, parameters, merge_adapter=True)
            whole = self.gather(value) if name in parameters else value
            del value
            for tensor in self.model.names.tensors(name, whole.shape):
                box, _ = tensor.overlap(own_box(whole))
                yield whole[box].view(tensor.shape)

    def _adapter_tensors(self) -> tuple[tuple[Parameter, ...], Iterator[Tensor]]:
        """Return the entries of an adapter's file, and its tensors.

        The tensors are gathered one at a time.
        """
        learning = {
            name: value
            for name, value in self.parameters().items()
            if value.requires_grad
        }
        parameters = tuple(
            describe_parameter(file_name(name, self.spec.model_path), value)
            for name, value in learning.items()
        )
        return parameters, (self.gather(value) for value in learning.values())

    # ---------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        stream = self.random_stream
        own: dict[str, Any] = {"steps": self.steps, stream.key: stream.state}
        return own | training_state(self.model, self.optimizer, self.adapter)

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.random_stream.restore(state, self.steps)
        load_training_state(self.model, self.optimizer, state, self.adapter)

    # -------------------------------------------------------------------------- offload

    def _move_state(self, params: torch.device, optimizer: torch.device) -> None:
        if self.parameter_device.type == "cpu":
            # The backend keeps everything on the host between computations.
            return

        offload_weights = params.type == "cpu"
        offload_moments = optimizer.type == "cpu"
        can_step = not (offload_weights or offload_moments)
        if offload_weights:
            self.before_offload()
        if not can_step:
            self.release_gradients()

        leaving: list[OffloadableTensor] = []
        returning: list[OffloadableTensor] = []
        weights = self.offloadable_weights()
        moments = self.offloadable_moments()
        (leaving if offload_weights else returning).extend(weights)
        (leaving if offload_moments else returning).extend(moments)
        # Tensors leave before others return, so that there is memory for those.
        self.offload.to_host(leaving)
        self.offload.to_device(returning)

        if not offload_weights:
            self.after_reload()
        if can_step:
            self.renew_gradients()

    def before_offload(self) -> None:
        """Free copies of the weights that can be made again from them."""

    def after_reload(self) -> None:
        """Make again what `before_offload` freed. Idempotent."""

    def release_gradients(self) -> None:
        """Free gradient buffers, which are not needed until the next step."""

    def renew_gradients(self) -> None:
        """Allocate again what `release_gradients` freed. Idempotent."""

    def refuse_pending_gradients(self) -> None:
        """Raise EngineError if a parameter has a gradient that no step has used."""
        for name, value in self.model.named_parameters():
            if value.grad is not None:
                raise EngineError(
                    f"place: {name} has a gradient that no step has used; call"
                    " optimizer_step before the weights move"
                )

    def offloadable_weights(self) -> list[OffloadableTensor]:
        """Return this rank's weights.

        Buffers, a few KiB of rotary frequencies, stay on the device.
        """
        return [
            offloadable(name, value) for name, value in self.model.named_parameters()
        ]

    def offloadable_moments(self) -> list[OffloadableTensor]:
        """Return this rank's part of the optimizer's state."""
        if self.optimizer is None:
            return []

        names = {id(value): name for name, value in self.model.named_parameters()}
        return [
            offloadable_entry(f"{kind} of {names[id(parameter)]}", state, kind)
            for parameter, state in self.optimizer.state.items()
            for kind in state
            if kind != "step"
        ]


def _full_tensor(value: Tensor) -> Tensor:
    """Gather a sharded tensor; return any other as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value
