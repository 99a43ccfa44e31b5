"""What engines around one torch module per rank share: its building, its optimizer, its state and its slices.

Invariant: what is computed is `packed_engine.py`'s; a subclass only wraps the module and says how gradients are summed.
Deliberately not here: micro-batches and losses.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from verl_ray.backends.base import ModuleBackend
from verl_ray.config.roles import OptimizerConfig
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.micro_batches import Loss, MicroBatch, MicroBatches
from verl_ray.engine.offload import Held, Offload, tensor_held
from verl_ray.engine.packed_engine import PackedEngine
from verl_ray.errors import EngineError
from verl_ray.models.lora import adapter_name, merged, write_config
from verl_ray.models.names import Box, Piece, is_adapter, pieces
from verl_ray.models.role_model import RoleModel, build_role_model, fill_role_model
from verl_ray.models.weights import CheckpointReader, TensorSource, is_first_copy, own_box
from verl_ray.ops.outputs import Outputs, TokenOutputs
from verl_ray.parallel.sharding_manager import ShardingManager
from verl_ray.parallel.topology import Topology
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice

OWN_SETTINGS = ("betas", "eps", "weight_decay")


class ModuleEngine(PackedEngine):
    """An engine around one torch module per rank."""

    def __init__(self, spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> None:
        assert isinstance(spec.backend, ModuleBackend)
        self.spec = spec
        self.device = device
        self.rank, self.world_size = rank, world_size
        self.peers = spec.backend.peers
        self.sharding = self.sharding_manager()
        self.topology = Topology(rank // self.peers, world_size // self.peers, answers=rank % self.peers == 0)
        self.dtype = getattr(torch, spec.backend.dtype)
        source = self.source()
        self.model = build_role_model(source, spec.model_path, spec.head, new_head=spec.new_head, adapter=spec.lora)
        self._manifest, self._places = manifest_of(self.model)
        self._cuts: dict[str, tuple[Box, Slice] | None] = {}
        self.describe(self.model)
        if spec.backend.activation_checkpointing:
            self.model.hf.gradient_checkpointing_enable(
                # nothing in a layer is random: dropout is refused
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        if spec.optimizer is None:
            self.model.requires_grad_(False)
        self.shard(self.model)
        self.fill(source)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        self.module = self.wrap(self.model)
        self.steps = 0
        self.optimizer = None if spec.optimizer is None else self.learner(spec.optimizer)
        self.offload = Offload(device)
        self._rng = self._seeded(spec.seed)

    # ------------------------------------------------------------------------------- what a backend decides

    def source(self) -> TensorSource:
        """Where the model's weights come from."""
        return CheckpointReader(self.spec.model_path)

    def shard(self, model: RoleModel) -> None:
        """Replace parameters, which have no memory yet, by the shards that this rank will hold."""

    def fill(self, source: TensorSource) -> None:
        """Values for the parameters, or for this rank's shards of them."""
        fill_role_model(self.model, source, seed=self.spec.seed, device=self.home)

    def learner(self, config: OptimizerConfig) -> torch.optim.AdamW:
        """The optimizer of the parameters that learn."""
        return adam(self.model.parameters(), config)

    def parameters(self) -> Mapping[str, Tensor]:
        """What this rank holds between computations, by the names of the module of transformers."""
        return dict(self.model.hf.named_parameters())

    def whole(self, value: Tensor) -> Tensor:
        """A parameter put together from all ranks, which all ask."""
        return _whole(value)

    def wrap(self, model: RoleModel) -> nn.Module:
        """The module to call."""
        return model

    @property
    def home(self) -> torch.device:
        """Where this rank's parameters are between computations."""
        return self.device

    def sharding_manager(self) -> ShardingManager:
        """How the tokens of a micro-batch are spread over the peers."""
        return ShardingManager()

    @abstractmethod
    def summing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch: gradients are summed over ranks in the last one."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Around every pass through the module: the precision of the computation."""
        return contextlib.nullcontext()

    # --------------------------------------------------------------------------------------------- computation

    def _outputs_of(self, batches: MicroBatches, outputs: Outputs) -> list[TokenOutputs]:
        return [self._run(batch, outputs) for batch in batches]

    def _accumulate(self, batches: MicroBatches, outputs: Outputs, loss: Loss) -> None:
        last = len(batches) - 1
        for i, batch in enumerate(batches):
            with self.summing(last=i == last):
                loss(batch, self._run(batch, outputs)).backward()

    def _run(self, batch: MicroBatch, outputs: Outputs) -> TokenOutputs:
        """One pass through the module; its outputs are those of all peers."""
        with self.computing():
            found: TokenOutputs = self.module(batch.packed, outputs)
        return self.sharding.postprocess(found)

    def _norm(self) -> float:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return float(_whole(norm))

    def _step(self, norm: float, rate: float) -> None:
        assert self.optimizer is not None and self.spec.optimizer is not None
        limit = self.spec.optimizer.max_grad_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, torch.tensor(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _zero_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.model.hf.named_parameters():
            gradient = parameter.grad
            yield name, gradient.to_local() if isinstance(gradient, DTensor) else gradient

    # ------------------------------------------------------------------------------------- weights and state

    def manifest(self, *, apart: bool = False) -> Manifest:
        if not apart:
            return self._manifest
        adapter = [
            _parameter(adapter_name(name), value, adapter=True)
            for name, value in self.parameters().items()
            if is_adapter(name)
        ]
        return Manifest((*self._manifest.parameters, *adapter))

    @torch.no_grad()
    def shards(self, names: Iterable[str], *, apart: bool = False) -> Iterator[tuple[Slice, Tensor]]:
        parameters = self.parameters()
        own: tuple[str, Tensor] | None = None  # pieces of one parameter come one after another
        for name in names:
            module_name, piece = self._places[name]
            if own is None or own[0] != module_name:
                own = module_name, self._leaving(module_name, parameters, merges=not apart)
            value = own[1]
            if name not in self._cuts:
                self._cuts[name] = self._cut(name, value, piece)
            cut = self._cuts[name]
            if cut is not None:
                here, part = cut
                local = value.to_local() if isinstance(value, DTensor) else value
                yield part, local[here].view(part.shape)

    def _cut(self, name: str, value: Tensor, piece: Piece) -> tuple[Box, Slice] | None:
        """What this rank owns of a tensor that is sent: where it is within the rank's part of the module's parameter,
        and within the tensor; None if nothing. It stays so as long as the engine."""
        here, there = piece.overlap(own_box(value))
        part = Slice(name, tuple(side.start for side in there), tuple(side.stop - side.start for side in there))
        owner = is_first_copy(value) if isinstance(value, DTensor) else self.rank == 0
        return (here, part) if owner and all(part.shape) else None

    def state(self) -> dict[str, Any]:
        # RNG under a key per rank: every rank's stream is in the checkpoint
        state: dict[str, Any] = {"steps": self.steps, self._rng_key: self._rng}
        if self.optimizer is None:
            return state
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._kept)
        if self.spec.lora is not None:  # torch leaves frozen parameters in that are tied
            learned = {f"hf.{name}" for name, value in self.model.hf.named_parameters() if value.requires_grad}
            model = {name: value for name, value in model.items() if name in learned}
        return state | {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._load_rng(state)
        if self.optimizer is not None:
            settings = [{name: group[name] for name in OWN_SETTINGS} for group in self.optimizer.param_groups]
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=self._kept,
            )
            for group, own in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(own)  # a resumed run obeys its configuration; torch restores the checkpoint's

    def _move(self, params: torch.device, optimizer: torch.device) -> None:
        if self.home.type == "cpu":
            return  # where they always are
        weights_leave, moments_leave = params.type == "cpu", optimizer.type == "cpu"
        steps = not (weights_leave or moments_leave)
        if weights_leave:
            self.before_offload()
        if not steps:
            self.release_gradients()
        weights, moments = self.held_weights(), self.held_moments()
        self.offload.to_host([*(weights if weights_leave else ()), *(moments if moments_leave else ())])
        self.offload.to_device([*(() if weights_leave else weights), *(() if moments_leave else moments)])
        if not weights_leave:
            self.after_reload()
        if steps:
            self.renew_gradients()

    def before_offload(self) -> None:
        """Free, before the weights leave the device, what was made of them and can be made again."""

    def refuse_pending_gradients(self) -> None:
        """Raise EngineError where a gradient would be left behind."""
        if pending := next((name for name, value in self.model.named_parameters() if value.grad is not None), None):
            raise EngineError(
                f"place: {pending} has a gradient that no step has used; call optimizer_step before the weights move"
            )

    def release_gradients(self) -> None:
        """Free what is kept for gradients between steps: with weights or moments on the host no step follows."""

    def renew_gradients(self) -> None:
        """Have again what `release_gradients` freed; idempotent."""

    def held_weights(self) -> list[Held]:
        """The memory of this rank's weights. Buffers, a few KiB of rotary frequencies, stay on the device."""
        return [tensor_held(name, value) for name, value in self.model.named_parameters()]

    def held_moments(self) -> list[Held]:
        """The memory of this rank's part of the optimizer's moments."""
        if self.optimizer is None:
            return []
        names = {id(value): name for name, value in self.model.named_parameters()}
        return [
            _moment_held(f"{kind} of {names[id(parameter)]}", state, kind)
            for parameter, state in self.optimizer.state.items()
            for kind in state
            if kind != "step"
        ]

    def after_reload(self) -> None:
        """Make again, now that the weights are on the device, what `before_offload` freed; idempotent."""

    @torch.no_grad()
    def export(self, path: str, *, adapter: bool = False) -> None:
        lora = self.spec.lora
        if not adapter or lora is None:
            super().export(path, adapter=adapter)
            return
        parameters, tensors = self._learned()
        configure = functools.partial(write_config, config=lora, base=self.spec.model_path, kind=self.head)
        self._write(Path(path), configure, parameters, tensors, stem="adapter_model")

    def _whole_parameters(self) -> Iterator[Tensor]:
        """Each tensor that is sent; one parameter at a time is gathered."""
        parameters = self.parameters()
        for name in dict.fromkeys(self._places[parameter.name][0] for parameter in self._manifest.sent):
            whole = self.whole(self._leaving(name, parameters, merges=True))
            for piece in pieces(name, whole.shape):
                yield whole[piece.overlap(own_box(whole))[0]].view(piece.shape)

    def _learned(self) -> tuple[tuple[Parameter, ...], Iterator[Tensor]]:
        """What an adapter's file holds, and its tensors, gathered one at a time."""
        learned = {name: value for name, value in self.parameters().items() if value.requires_grad}
        parameters = tuple(_parameter(adapter_name(name), value) for name, value in learned.items())
        return parameters, (self.whole(value) for value in learned.values())

    def _leaving(self, name: str, parameters: Mapping[str, Tensor], *, merges: bool) -> Tensor:
        """A parameter as it leaves this engine: with its adapter in it, or as it is."""
        lora = self.spec.lora
        return merged(name, parameters, lora) if merges and lora is not None else parameters[name].detach()

    @property
    def _kept(self) -> StateDictOptions:
        """A checkpoint of an adapter holds nothing else; its base is in the model's directory."""
        return StateDictOptions(ignore_frozen_params=True, strict=self.spec.lora is None)


def manifest_of(model: RoleModel) -> tuple[Manifest, dict[str, tuple[str, Piece]]]:
    """What is sent, and where each of its tensors is: the module's parameter, and the piece of it."""
    first: dict[int, str] = {}
    parameters, places = [], {}
    for name, value in model.hf.named_parameters(remove_duplicate=False):
        for piece in pieces(name, value.shape):
            holder = first.setdefault(id(value), piece.name) if piece.shape == value.shape else piece.name
            parameters.append(_parameter(piece.name, value, piece.shape, None if holder == piece.name else holder))
            places[piece.name] = name, piece
        if is_adapter(name):
            whole = tuple(value.shape)
            places[adapter_name(name)] = name, Piece(adapter_name(name), (0,) * len(whole), whole, whole)
    return Manifest(tuple(parameters)), places


def _parameter(
    name: str, value: Tensor, shape: Sequence[int] | None = None, tied_to: str | None = None, *, adapter: bool = False
) -> Parameter:
    dtype = str(value.dtype).removeprefix("torch.")
    return Parameter(name, tuple(value.shape if shape is None else shape), dtype, tied_to, adapter)


def _moment_held(name: str, state: dict[str, Tensor], kind: str) -> Held:
    """An entry of an optimizer's state, which other tensors may replace at any time."""

    def memory() -> Tensor:
        value = state[kind]
        return value._local_tensor if isinstance(value, DTensor) else value

    def take(memory: Tensor) -> None:
        value = state[kind]
        if isinstance(value, DTensor):
            local = memory.view(value._local_tensor.shape)
            state[kind] = DTensor(local, value._spec, requires_grad=False)
        else:
            state[kind] = memory.view(value.shape)

    return Held(name, memory, take)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def adam(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Of those that learn; weight decay spares norms and biases."""
    learning = [p for p in parameters if p.requires_grad]
    decayed = [p for p in learning if p.dim() >= 2]
    spared = [p for p in learning if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for parameter in learning:
        # As AdamW does at its first step. Without it torch makes the state that a checkpoint of an optimizer which
        # has not stepped lacks by stepping it, and every later bias correction is one step ahead.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer
