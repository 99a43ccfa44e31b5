"""The `megatron` backend: megatron-core computes, reduces, clips and steps; this drives it as the contract says.

Invariant: whatever the layout, results are those of the plain engine; weights and state leave and enter under the names
of the model as transformers has it, so any layout, and any other backend, goes on from there.
Deliberately not here: the model (`model.py`), which models (`supported.py`), who holds what (`weight_map.py`), groups
(`layout.py`), the form of a checkpoint (`state.py`), and how buffers are moved (`residence.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from verl_ray.algorithms.objectives import Objective
from verl_ray.backends.megatron import MegatronBackend
from verl_ray.checkpoint.sharded import random_key
from verl_ray.data.stages import Rows, TrainingBatch
from verl_ray.engine.base import EngineSpec, ForwardResult, LossReport, StepReport
from verl_ray.engine.collect import collected
from verl_ray.engine.megatron.experts import RoutedRows, reported
from verl_ray.engine.megatron.layout import Axis, layout_of
from verl_ray.engine.megatron.model import Stage, has_experts, padded_vocabulary, transformer_config
from verl_ray.engine.megatron.optimizer import clip_and_step, make_optimizer, restore, shards_of
from verl_ray.engine.megatron.residence import Buffers
from verl_ray.engine.megatron.state import held_state
from verl_ray.engine.megatron.supported import require_complete, require_mapped
from verl_ray.engine.megatron.weight_map import Mapped, Region, Sizes, WeightMap, share
from verl_ray.engine.micro_batches import Loss, MicroBatch, MicroBatches
from verl_ray.engine.module_engine import adam, manifest_of
from verl_ray.engine.offload import Offload, tensor_held
from verl_ray.engine.packed_engine import PackedEngine
from verl_ray.models.names import Box, pieces
from verl_ray.models.role_model import PackedRows, build_role_model
from verl_ray.models.weights import CheckpointReader, check_fit, fill_box
from verl_ray.ops.outputs import Outputs, TokenOutputs
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice

Held = tuple[str, Box, Callable[[], Tensor]]
"""A box of one of the model's parameters, by its name, and what stands there, which may move meanwhile."""

Parts = dict[str, list[tuple[Slice, Callable[[], Tensor], Box]]]
"""By name in a checkpoint: a slice, and the box of what is held where it stands."""


class MegatronEngine(PackedEngine):
    def __init__(self, spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> None:
        assert isinstance(spec.backend, MegatronBackend)
        backend = spec.backend
        self.spec, self.device, self.rank, self.world_size = spec, device, rank, world_size
        self.layout = layout = layout_of(backend)
        self.peers, self.topology = backend.peers, layout.topology
        self.dtype = getattr(torch, backend.dtype)
        self.sharding = ShardingManager() if layout.cp.size == 1 else UlyssesManager(layout.groups.cp)
        self.forward_is_collective = backend.expert_parallel * backend.expert_tensor_parallel > 1
        self.micro_batch_multiple = layout.pp.size if layout.chunks > 1 else 1
        self._routed_batches: list[RoutedRows] = []
        self._token_multiple = layout.cp.size * (layout.tp.size if backend.sequence_parallel else 1)

        source = CheckpointReader(spec.model_path)
        self.described = build_role_model(source, spec.model_path, spec.head, new_head=spec.new_head)
        require_mapped(spec, self.described)
        self._manifest = _in_dtype(manifest_of(self.described)[0], backend.dtype)
        self._shapes = {name: tuple(value.shape) for name, value in self.described.hf.named_parameters()}
        self.describe(self.described)
        layers = range(self._config.num_hidden_layers) if self._routed else ()
        self._expert_layers = [layer + 1 for layer in layers if has_experts(self._config, layer)]
        self._tied = spec.head == "policy" and self._config.tie_word_embeddings
        with layout.entered():
            self._core = transformer_config(self.described, backend, self.dtype)
            self._stages = [
                Stage(self.described, self._core, layout, chunk).to(device) for chunk in range(layout.chunks)
            ]
            for name, parameter in (named for stage in self._stages for named in stage.named_parameters()):
                if ".experts." in name:
                    # megatron-core says so only where experts are shared out: else their gradients would be summed
                    # over the ranks that hold copies of the rest, which are others
                    setattr(parameter, "allreduce", False)  # noqa: B010
            self._modules: list[Any] = list(self._stages)
            if spec.optimizer is not None:
                config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
                self._modules = [DistributedDataParallel(self._core, config, stage) for stage in self._stages]
            self._mapped = dict(self._map())
            for parameter, mapped in self._mapped.items():
                # megatron-core marks what it draws; unmarked ones are left out of the norm but on the first rank
                setattr(parameter, "tensor_model_parallel", not mapped.replicated)  # noqa: B010
            self._fill(source)
            self._optimizer: Any = (
                None if spec.optimizer is None else make_optimizer(spec.optimizer, self._modules, self.dtype)
            )
        if self._optimizer is not None:
            self._zero_gradients()  # their memory holds anything yet
            if self.dtype != torch.float32:
                self._fill_main(source)
        require_complete(spec, self._shapes, self._mapped.values(), world_size)
        self._owned = self._by_piece(self._regions_owned())
        self.offload = Offload(device)
        self.buffers = Buffers([] if spec.optimizer is None else self._modules, self.offload)
        self.steps = 0
        self._rng = self._seeded(spec.seed)
        self._random_states = tensor_parallel.get_cuda_rng_tracker().get_states()

    # ----------------------------------------------------------------------------------------------- building

    def _map(self) -> Iterator[tuple[nn.Parameter, Mapped]]:
        """This rank's parameters, and what they are."""
        hf, attention = self._config, cast(Any, self.described.layers[0]).self_attn
        padded = padded_vocabulary(hf.vocab_size, self.layout.tp.size)
        sizes = Sizes.of(hf, head_size=attention.head_dim, padded_vocabulary=padded)
        weights = WeightMap(sizes, self.layout, tied=self._tied)
        for stage in self._stages:
            numbers = [layer.layer_number - 1 for layer in stage.decoder.layers]
            for name, parameter in stage.named_parameters():
                inside = name.split(".")
                layer = numbers[int(inside[2])] if name.startswith("decoder.layers.") else None
                yield parameter, weights.of(name, layer)

    @torch.no_grad()
    def _fill(self, source: CheckpointReader) -> None:
        """Each parameter from the tensors that it is made of, of which only this rank's part is read."""
        new, unused = self.described.heads_of_others
        check_fit(self.described.hf, source, new=new, unused=unused)
        for parameter, mapped in self._mapped.items():
            rows = 0
            for region in mapped.regions:
                self._read(self._rows(parameter, region), region.box, region.name, source)
                rows += region.shape[0]
            parameter[rows:].zero_()  # words that only fill up

    def _fill_main(self, source: CheckpointReader) -> None:
        """What learns, where that is not what computes: megatron-core made it from values already rounded."""
        for one in shards_of(self._optimizer, self._mapped):
            for name, box, run in one.parts():
                self._read(one.main[run].view(_sides(box)), box, name, source)

    def _read(self, local: Tensor, box: Box, name: str, source: CheckpointReader) -> None:
        """A box of the model's parameter of this name into `local`."""
        new, _ = self.described.heads_of_others
        fill_box(local, box, name, self._shapes[name], source, new=new, seed=self.spec.seed)

    # --------------------------------------------------------------------------------------------- computation

    def forward(self, rows: Rows, outputs: Outputs) -> ForwardResult:
        with self.layout.entered():
            return super().forward(rows, outputs)

    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        with self.layout.entered():
            return super().forward_backward(rows, objective)

    def optimizer_step(self) -> StepReport:
        with self.layout.entered():
            return super().optimizer_step()

    def _outputs_of(self, batches: MicroBatches, outputs: Outputs) -> list[TokenOutputs]:
        def told(stage: Stage, hidden: Tensor, rows: PackedRows) -> TokenOutputs:
            return self.sharding.postprocess(stage.head(hidden, rows, outputs))

        def step(batches: Iterator[MicroBatch], stage: Stage) -> tuple[Tensor, Callable[..., TokenOutputs]]:
            batch = next(batches)
            hidden = stage(batch.packed)
            return hidden, lambda hidden, non_loss_data: told(stage, hidden, batch.packed)

        found: list[TokenOutputs] = self._schedule(batches, step, forward_only=True)
        return found

    def _accumulate(self, batches: MicroBatches, outputs: Outputs, loss: Loss) -> None:
        self._routed_batches.clear()
        no_tokens = torch.zeros((), dtype=torch.int, device=self.device)  # megatron-core would divide by their sum

        def step(batches: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            stage, routed = module.module, self._routed_rows(batch, outputs) if self._expert_layers else None

            def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
                told = self.sharding.postprocess(stage.head(hidden, batch.packed, outputs))
                return loss(batch, told), no_tokens, None

            return module(batch.packed, routed), loss_of

        self._schedule(batches, step, forward_only=False)

    def _routed_rows(self, batch: MicroBatch, outputs: Outputs) -> RoutedRows:
        """What routers must know; kept until the call is reported."""
        assert batch.weight is not None
        ends, tokens = batch.packed.ends, batch.packed.input_ids.shape[1]
        own = share(tokens, self.layout.tp if self._core.sequence_parallel else Axis(1, 0))
        row = torch.bucketize(torch.arange(tokens, device=self.device), ends)[own]
        losses = torch.bincount(batch.row_of_losses(outputs), minlength=len(ends)).float()
        found = RoutedRows(
            row=row,
            length=torch.diff(ends, prepend=ends.new_full((1,), -1)).float()[:, None],
            weight=self._balance * batch.weight * losses,
            counted=(batch.weight != 0) * losses,
            group=self.layout.groups.tp,
            layers=len(self._expert_layers),
        )
        self._routed_batches.append(found)
        return found

    def _reported(self, report: LossReport) -> LossReport:
        if not self._expert_layers:
            return report
        found = reported(self._routed_batches, self._expert_layers, self._config.num_experts, self.layout.groups.mp)
        name = f"{self.spec.role}/expert_balance_loss"
        sums = report.sums | {name: found.counted}
        return dataclasses.replace(report, loss=report.loss + found.loss, sums=sums, expert_load=found.load.numpy())

    def _schedule(self, batches: MicroBatches, step: Callable[..., Any], *, forward_only: bool) -> Any:
        """megatron-core's own: one after another, 1F1B, or interleaved."""
        modules = list(self._stages) if forward_only else self._modules
        several = len(modules) > 1
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in modules] if several else iter(batches),
            model=modules,
            num_microbatches=len(batches),
            seq_length=self._token_multiple,  # varying lengths are told from stage to stage
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _own_part(self, rows: PackedTokens) -> PackedRows:
        return super()._own_part(rows.filled_up(self._token_multiple))

    def _norm(self) -> float:
        finalize_model_grads(self._modules)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _step(self, norm: float, rate: float) -> None:
        assert self.spec.optimizer is not None
        clip_and_step(self._optimizer, norm, self.spec.optimizer.max_grad_norm, rate)

    def _zero_gradients(self) -> None:
        for module in self._modules:
            module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for parameter, mapped in self._mapped.items():
            yield mapped.regions[0].name, cast(Any, parameter).main_grad

    @contextlib.contextmanager
    def _rng_stream(self) -> Iterator[None]:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        before = tracker.get_states()
        tracker.set_states(self._random_states)
        with super()._rng_stream():
            try:
                yield
            finally:
                self._random_states = tracker.get_states()
                tracker.set_states(before)

    # -------------------------------------------------------------------------------------------- weights, state

    def _regions_owned(self) -> Iterator[Held]:
        """What this rank sends: in the type that computes, as rollouts do."""
        layout = self.layout
        for parameter, mapped in self._mapped.items():
            first_copy = layout.expert_dp.rank == 0 if mapped.expert else layout.dp.rank == layout.cp.rank == 0
            for region in mapped.regions if mapped.owned and first_copy else ():
                yield region.name, region.box, functools.partial(self._rows, parameter, region)

    def _rows(self, parameter: Tensor, region: Region) -> Tensor:
        """The region's rows of a parameter, in the shape of the region's box."""
        rows = slice(region.first_row, region.first_row + region.shape[0])
        return self._values(parameter)[rows].view(_sides(region.box))

    def _values(self, parameter: Tensor) -> Tensor:
        """Of a parameter; while its memory on the device is given back, those on the host."""
        if parameter.untyped_storage().nbytes():
            return parameter.detach()
        return self.buffers.on_host(parameter)

    def _main_owned(self) -> Iterator[Held]:
        """What this rank exports: in float32, as it learns."""
        for one in shards_of(self._optimizer, self._mapped):
            for name, box, run in one.parts() if one.mapped.owned else ():
                yield name, box, functools.partial(one.main[run].view, _sides(box))

    def _by_piece(self, held: Iterable[Held]) -> Parts:
        found: Parts = defaultdict(list)
        for name, box, value in held:
            for piece in pieces(name, self._shapes[name], box):
                here, there = piece.overlap(box)
                if all(side.start < side.stop for side in there):
                    place = Slice(piece.name, tuple(side.start for side in there), tuple(_sides(there)))
                    found[piece.name].append((place, value, here))
        return found

    @torch.no_grad()
    def shards(self, names: Iterable[str], *, apart: bool = False) -> Iterator[tuple[Slice, Tensor]]:
        return _parts(self._owned, names)

    @property
    def _exported(self) -> Sequence[Parameter]:
        return self._manifest.sent if self._optimizer is None else _in_dtype(self._manifest, "float32").sent

    def _whole_parameters(self) -> Iterator[Tensor]:
        owned = self._owned if self._optimizer is None else self._by_piece(self._main_owned())
        return collected(self._exported, functools.partial(_parts, owned), self.device)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, self._rng_key: self._rng}
        state |= {self._tracked_key(name): value for name, value in self._random_states.items()}
        if self._optimizer is None:
            return state
        held = held_state(shards_of(self._optimizer, self._mapped), self._shapes, self._manifest)
        held["optimizer"]["param_groups"] = self._groups()
        return state | held

    def load_state(self, state: dict[str, Any]) -> None:
        """The tensors of `state` are this engine's own, so they are here already."""
        self.steps = int(state["steps"])
        self._load_rng(state)
        for name in self._random_states:
            found = state.get(self._tracked_key(name))
            if found is not None:  # else it stays as megatron-core seeded it
                self._random_states[name] = found
        if self._optimizer is None:
            return
        steps = state["optimizer"]["state"]
        for one in shards_of(self._optimizer, self._mapped):
            # each shard counts for itself: one counter for all would be raised once per shard
            for name, _, _ in one.parts():
                one.held["step"].copy_(steps[f"hf.{name}"]["step"])
        with self.layout.entered():
            for part in self._optimizer.chained_optimizers:
                part._copy_main_params_to_model_params()
            for module in self._modules:
                module.start_param_sync(force_sync=True)

    def _tracked_key(self, name: str) -> str:
        """Of a random stream of megatron-core's tracker."""
        return random_key(self.rank, self.device.type, name)

    def _groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer as torch keeps them, for backends that read this state."""
        assert self.spec.optimizer is not None
        names = {id(value): f"hf.{name}" for name, value in self.described.hf.named_parameters()}
        groups = adam(self.described.parameters(), self.spec.optimizer).param_groups
        rate = next(iter(self._optimizer.param_groups))["lr"]
        return [group | {"lr": rate, "params": [names[id(value)] for value in group["params"]]} for group in groups]

    def _move(self, params: torch.device, optimizer: torch.device) -> None:
        to_host = {"params": params.type == "cpu", "optimizer": optimizer.type == "cpu"}
        if self._optimizer is None:
            weights = [tensor_held(name, value) for name, value in self._weights()]
            self.offload.to_host(weights) if to_host["params"] else self.offload.to_device(weights)
            return
        if to_host["optimizer"]:
            self._optimizer.offload_to_cpu()
        self.buffers.weights_to_host() if to_host["params"] else self.buffers.weights_to_device()
        if to_host["params"] or to_host["optimizer"]:  # no step follows
            self.buffers.release_gradients()
        else:
            self.buffers.renew_gradients()
        if not to_host["optimizer"]:
            restore(self._optimizer)

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of this rank, by names that differ between its stages."""
        for number, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters():
                yield f"stage {number}: {name}", parameter


def _parts(owned: Parts, names: Iterable[str]) -> Iterator[tuple[Slice, Tensor]]:
    for name in names:
        for place, value, here in owned.get(name, ()):
            yield place, value()[here].view(place.shape)


def _in_dtype(manifest: Manifest, dtype: str) -> Manifest:
    return Manifest(tuple(dataclasses.replace(parameter, dtype=dtype) for parameter in manifest.parameters))


def _sides(box: Box) -> list[int]:
    return [side.stop - side.start for side in box]
