"""The `megatron` backend: megatron-core computes, reduces, clips and steps; this module
drives it according to the contract.

Invariant: whatever the layout, results are those of the plain engine. Weights and state
enter and leave under the names of the model as transformers has it, so any layout and
any other backend can continue from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor, nn

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.checkpoint.sharded import random_key
from verl_ray.columns.stages import Rows, TrainingBatch
from verl_ray.engine.base import EngineSpec, ForwardResult, LossReport, StepReport
from verl_ray.engine.megatron.buffers import MegatronBuffers
from verl_ray.engine.megatron.expert_balance import ExpertBalance
from verl_ray.engine.megatron.layout import parallel_layout_of
from verl_ray.engine.megatron.model import Stage
from verl_ray.engine.megatron.model_config import (
    layers_with_experts,
    num_experts,
    transformer_config,
)
from verl_ray.engine.megatron.optimizer import (
    OptimizerShard,
    clip_and_step,
    make_optimizer,
    reload_optimizer,
    shards_of,
)
from verl_ray.engine.megatron.optimizer_state import (
    load_step_counters,
    model_state,
    optimizer_state,
    torch_param_groups,
)
from verl_ray.engine.megatron.rank_outputs import collect_whole
from verl_ray.engine.megatron.schedule import Schedule
from verl_ray.engine.megatron.support import require_complete, require_supported
from verl_ray.engine.megatron.weights import (
    BoxReader,
    computing_boxes,
    main_boxes,
    map_tensors,
    read_main_weights,
    read_slices,
    read_weights,
    slices_by_tensor,
    tensor_shapes,
)
from verl_ray.engine.micro_batches import Loss, MicroBatches
from verl_ray.engine.offload import Offload, offloadable
from verl_ray.engine.packed_engine import PackedEngine, RandomStream
from verl_ray.engine.weight_average import Stepped, begin_average
from verl_ray.learning.objectives import Objective
from verl_ray.models.export import build_manifest
from verl_ray.models.role_model import PackedRows, build_role_model
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.weights import saved_buffers
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import PackedTokens, ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager
from verl_ray.weight_sync.manifest import (
    Manifest,
    Parameter,
    Slice,
)


class MegatronEngine(PackedEngine):
    """An engine whose model is partitioned by megatron-core."""

    def __init__(
        self, spec: EngineSpec, *, device: torch.device, rank: int, world_size: int
    ) -> None:
        assert isinstance(spec.backend, MegatronBackend)
        self.spec = spec
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self._use_layout(spec.backend)

        source = CheckpointReader(spec.model_path)
        # The model as transformers has it, without values: the names and shapes of all
        # that enters and leaves.
        self._template = build_role_model(
            source, spec.model_path, spec.head, new_head=spec.new_head
        )
        require_supported(spec, self._template)
        manifest, _ = build_manifest(self._template)
        self._manifest = self._in_dtype(manifest, spec.backend.compute_dtype)
        self._shapes = tensor_shapes(self._template)
        self.describe(self._template)

        self._optimizer: Any = None
        with self.layout.installed():
            self._build_modules(spec.backend)
            reader = BoxReader(self._template, source, spec.seed)
            read_weights(self._mapped | self._mapped_buffers, reader)
            if spec.optimizer is not None:
                self._optimizer = make_optimizer(
                    spec.optimizer, self._modules, self.dtype
                )
        if self._optimizer is not None:
            # The memory of gradients is not initialized yet.
            self._zero_gradients()
            if self.dtype != torch.float32:
                read_main_weights(self._shards(), reader)
            if spec.average_decay is not None:
                begin_average(self._stepped())
        mapped = self._mapped | self._mapped_buffers
        require_complete(spec, self._shapes, mapped.values(), world_size)

        self.offload = Offload(device)
        wrapped_modules = self._modules if self._optimizer is not None else []
        self.buffers = MegatronBuffers(wrapped_modules, self.offload)
        sent_boxes = computing_boxes(mapped, self.layout, self.buffers)
        self._sent_slices = slices_by_tensor(
            sent_boxes, self._shapes, self._template.names
        )
        self._expert_balance = self._make_expert_balance()
        self._schedule = Schedule(
            self._stages,
            self._modules,
            sharding=self.sharding,
            token_multiple=self._token_multiple,
            balance=self._expert_balance,
        )
        self.steps = 0
        self.random_stream = RandomStream(device, rank, spec.seed)
        self._tracker_states = tensor_parallel.get_cuda_rng_tracker().get_states()

    # ------------------------------------------------------------------------- building

    def _use_layout(self, backend: MegatronBackend) -> None:
        """Set the attributes that follow from the layout. Collective."""
        layout = parallel_layout_of(backend)
        self.layout = layout
        self.topology = layout.topology
        self.peers = backend.peers
        self.dtype = getattr(torch, backend.compute_dtype)

        self.sharding = ShardingManager()
        if layout.cp.size > 1:
            self.sharding = UlyssesManager(layout.groups.cp)

        expert_ranks = backend.expert_parallel * backend.expert_tensor_parallel
        self.forward_is_collective = expert_ranks > 1
        if layout.chunks > 1:
            # The interleaved schedule requires it.
            self.micro_batch_multiple = layout.pp.size

        # The tokens of a micro-batch are cut into as many equal slices.
        self._token_multiple = layout.cp.size
        if backend.sequence_parallel:
            self._token_multiple *= layout.tp.size

    def _build_modules(self, backend: MegatronBackend) -> None:
        """Build this rank's chunks of the model, without values. Collective."""
        self._core_config = transformer_config(self._template, backend, self.dtype)
        self._stages = [
            Stage(self._template, self._core_config, self.layout, chunk).to(self.device)
            for chunk in range(self.layout.chunks)
        ]

        for name, own in self._named_parameters():
            if ".experts." in name:
                # megatron-core sets this mark only if experts are distributed. Without
                # it their gradients would be summed over the ranks that hold copies of
                # the other parameters, which are not those that hold copies of experts.
                setattr(own, "allreduce", False)  # noqa: B010

        self._modules: list[Any] = list(self._stages)
        if self.spec.optimizer is not None:
            config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True
            )
            self._modules = [
                DistributedDataParallel(self._core_config, config, stage)
                for stage in self._stages
            ]

        self._mapped, self._mapped_buffers = map_tensors(
            self._template, self._stages, self.layout
        )
        for parameter, mapped in self._mapped.items():
            # megatron-core sets this mark only on parameters that it initializes. The
            # gradient norm of ranks other than the first would leave out the others.
            setattr(parameter, "tensor_model_parallel", not mapped.replicated)  # noqa: B010

    def _make_expert_balance(self) -> ExpertBalance | None:
        """Return the balance of the experts; None in a model without."""
        if not self._routed:
            return None

        layers = [layer + 1 for layer in layers_with_experts(self._template)]
        if not layers:
            return None
        return ExpertBalance(
            self.layout,
            layers,
            num_experts(self._template),
            coefficient=self._balance_coefficient,
            metric=self._balance_metric,
            sliced_tokens=self._core_config.sequence_parallel,
        )

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters of this rank by names that differ between its stages."""
        for number, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters():
                yield f"stage {number}: {name}", parameter

    def _shards(self) -> Iterator[OptimizerShard]:
        """Yield what this rank's optimizer steps."""
        return shards_of(self._optimizer, self._mapped)

    # ---------------------------------------------------------------------- computation

    def forward(self, rows: Rows, outputs: RequestedOutputs) -> ForwardResult:
        with self.layout.installed():
            return super().forward(rows, outputs)

    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        with self.layout.installed():
            return super().forward_backward(rows, objective)

    def optimizer_step(self) -> StepReport:
        with self.layout.installed():
            return super().optimizer_step()

    def _compute_outputs(
        self, batches: MicroBatches, outputs: RequestedOutputs
    ) -> list[TokenOutputs]:
        return self._schedule.forward(batches, outputs)

    def _accumulate_gradients(
        self, batches: MicroBatches, outputs: RequestedOutputs, loss: Loss
    ) -> None:
        self._schedule.forward_backward(batches, outputs, loss, self.device)

    def _complete_report(self, report: LossReport) -> LossReport:
        if self._expert_balance is None:
            return report
        return self._expert_balance.complete(report)

    def _own_part(self, rows: PackedTokens) -> PackedRows:
        return super()._own_part(rows.padded_to_multiple(self._token_multiple))

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        # megatron-core's tracker has streams of its own.
        tracker = tensor_parallel.get_cuda_rng_tracker()
        previous = tracker.get_states()
        tracker.set_states(self._tracker_states)
        with super()._own_random_numbers():
            try:
                yield
            finally:
                self._tracker_states = tracker.get_states()
                tracker.set_states(previous)

    # ------------------------------------------------------------------------ gradients

    def _gradient_norm(self) -> float:
        # Sums over copies of the model, tied embeddings and slices of tokens.
        finalize_model_grads(self._modules)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _clip_and_step(self, norm: float, rate: float) -> None:
        assert self.spec.optimizer is not None
        clip_and_step(self._optimizer, norm, self.spec.optimizer.max_grad_norm, rate)

    def _stepped(self) -> Stepped:
        for shard in self._shards():
            yield shard.main, shard.state

    def _install_weights(self) -> None:
        with self.layout.installed():
            # The weights that compute follow the main weights.
            for part in self._optimizer.chained_optimizers:
                part._copy_main_params_to_model_params()
            for module in self._modules:
                module.start_param_sync(force_sync=True)

    def _zero_gradients(self) -> None:
        for module in self._modules:
            module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for parameter, mapped in self._mapped.items():
            yield mapped.regions[0].name, cast(Any, parameter).main_grad

    def _named_weights(self) -> Iterator[tuple[str, Tensor, bool]]:
        for parameter, mapped in self._mapped.items():
            yield mapped.regions[0].name, parameter, parameter.requires_grad

    # -------------------------------------------------------------------------- weights

    @torch.no_grad()
    def shards(
        self, names: Iterable[str], *, separate_adapter: bool = False
    ) -> Iterator[tuple[Slice, Tensor]]:
        return read_slices(self._sent_slices, names)

    def _in_dtype(self, manifest: Manifest, dtype: str) -> Manifest:
        """Return the manifest with parameters, but not buffers, in another type."""
        buffers = saved_buffers(self._template.hf)
        fixed = {
            tensor.name
            for name, value in buffers.items()
            for tensor in self._template.names.tensors(name, value.shape)
        }
        parameters = [
            parameter
            if parameter.name in fixed
            else dataclasses.replace(parameter, dtype=dtype)
            for parameter in manifest.parameters
        ]
        return Manifest(tuple(parameters))

    @property
    def _exported_parameters(self) -> Sequence[Parameter]:
        manifest = self._manifest
        if self._optimizer is not None:
            # The main weights are exported.
            manifest = self._in_dtype(manifest, "float32")
        return manifest.sent

    def _gathered_parameters(self) -> Iterator[Tensor]:
        slices = self._sent_slices
        if self._optimizer is not None:
            fixed = computing_boxes(self._mapped_buffers, self.layout, self.buffers)
            boxes = itertools.chain(main_boxes(self._shards()), fixed)
            slices = slices_by_tensor(boxes, self._shapes, self._template.names)

        shards = functools.partial(read_slices, slices)
        return collect_whole(self._exported_parameters, shards, self.device)

    # ---------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "steps": self.steps,
            self.random_stream.key: self.random_stream.state,
        }
        for name, stream in self._tracker_states.items():
            state[self._tracker_key(name)] = stream

        buffers = model_state(self._mapped_buffers, self._shapes, self._manifest)
        config = self.spec.optimizer
        if config is None:
            weights = model_state(self._mapped, self._shapes, self._manifest)
            state["model"] = weights | buffers
            return state

        saved_optimizer = optimizer_state(self._shards(), self._shapes, self._manifest)
        saved_optimizer["model"] |= buffers
        rate = next(iter(self._optimizer.param_groups))["lr"]
        saved_optimizer["optimizer"]["param_groups"] = torch_param_groups(
            self._template, config, rate
        )
        return state | saved_optimizer

    def load_state(self, state: dict[str, Any]) -> None:
        # The tensors of `state` are this engine's own, so their values are in place.
        self.steps = int(state["steps"])
        self.random_stream.restore(state, self.steps)
        for name in self._tracker_states:
            stream = state.get(self._tracker_key(name))
            # Another type of device has no such stream. It then remains as
            # megatron-core seeded it.
            if stream is not None:
                self._tracker_states[name] = stream

        if self._optimizer is None:
            return

        load_step_counters(self._shards(), state["optimizer"]["state"])
        self._install_weights()

    def _tracker_key(self, name: str) -> str:
        """Return a checkpoint's key of a random stream of megatron-core's tracker."""
        return random_key(self.rank, self.device.type, name)

    def _move_state(self, params: torch.device, optimizer: torch.device) -> None:
        weights_to_host = params.type == "cpu"
        optimizer_to_host = optimizer.type == "cpu"

        if self._optimizer is None:
            weights = [
                offloadable(name, value) for name, value in self._named_parameters()
            ]
            if weights_to_host:
                self.offload.to_host(weights)
            else:
                self.offload.to_device(weights)
            return

        if optimizer_to_host:
            self._optimizer.offload_to_cpu()

        if weights_to_host:
            self.buffers.weights_to_host()
        else:
            self.buffers.weights_to_device()

        # No step can follow while a part of the state is on the host.
        if weights_to_host or optimizer_to_host:
            self.buffers.release_gradients()
        else:
            self.buffers.renew_gradients()

        if not optimizer_to_host:
            reload_optimizer(self._optimizer)
