"""What engines that hold a torch module share: the micro-batch loop, the optimizer step, the RNG stream, the state.

Invariant: a backend may differ in how tensors are placed and moved, never in what is computed; so this file is the
computation, and a subclass only wraps the module and says how gradients are summed. One transfer to the host per call,
none per micro-batch. Deliberately not here: anything about a role.
"""

from __future__ import annotations

import contextlib
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.objectives import LossInputs, Objective
from verl_ray.data.batch import Int64, Kind, offsets_of
from verl_ray.data.packing import micro_batches
from verl_ray.data.stages import Rows, TrainingBatch
from verl_ray.engine.base import Engine, EngineSpec, ForwardResult, LossReport, StepReport, scattered
from verl_ray.engine.schedule import learning_rate
from verl_ray.engine.tally import Tally
from verl_ray.errors import DataError, EngineError
from verl_ray.models.attention import plan_layout
from verl_ray.models.export import write_tensors
from verl_ray.models.lora import adapter_name, merged, write_config
from verl_ray.models.names import Piece, pieces
from verl_ray.models.role_model import PackedRows, RoleModel, build_role_model, fill_role_model
from verl_ray.models.weights import CheckpointReader, TensorSource, own_box
from verl_ray.ops.outputs import Outputs, Routing, TokenOutputs
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager
from verl_ray.parallel.topology import Topology
from verl_ray.profiling.flops import ModelShape
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice

COPIED_FILES = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*",
    "added_tokens.json",
)  # fmt: skip
OWN_SETTINGS = ("betas", "eps", "weight_decay")


@dataclass(frozen=True)
class MicroBatch:
    """Some rows on the device, with the tokens that are read."""

    packed: PackedRows
    read: Int64  # [read] their places among the tokens of the whole batch
    row: Tensor  # int64 [read] which of these rows each belongs to


class ModuleEngine(Engine):
    """An engine around one torch module per rank."""

    forward_is_collective: bool
    """Whether ranks must go through a forward pass together, as those must that gather parameters for it."""

    def __init__(self, spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> None:
        self.spec = spec
        self.device = device
        self.rank, self.world_size = rank, world_size
        self.peers = spec.backend.peers
        self.sharding = self.sharding_manager()
        self.topology = Topology(rank // self.peers, world_size // self.peers, answers=rank % self.peers == 0)
        self.dtype = getattr(torch, spec.backend.dtype)
        source = self.source()
        self.model = build_role_model(source, spec.model_path, spec.head, new_head=spec.new_head, adapter=spec.lora)
        self._manifest, self._places = _manifest_of(self.model)
        self.head = spec.head
        config = self.model.hf.config
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self.shape = ModelShape.of(config.to_dict(), spec.head)
        self._balance = self._balance_weight()
        if spec.backend.activation_checkpointing:
            self.model.hf.gradient_checkpointing_enable(
                # nothing in a layer is random: dropout is refused
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        if spec.optimizer is None:
            self.model.requires_grad_(False)
        self.shard(self.model)
        fill_role_model(self.model, source, seed=spec.seed, device=self.home)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        self.module = self.wrap(self.model)
        self.steps = 0
        self.optimizer = None if spec.optimizer is None else _optimizer(self.model, spec)
        self._rng = self._seeded(spec.seed)

    # ------------------------------------------------------------------------------- what a backend decides

    def source(self) -> TensorSource:
        """Where the model's weights come from."""
        return CheckpointReader(self.spec.model_path)

    def shard(self, model: RoleModel) -> None:
        """Replace parameters, which have no memory yet, by the shards that this rank will hold."""

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

    # ------------------------------------------------------------------------------------------- the contract

    @torch.no_grad()
    def forward(self, rows: Rows, outputs: Outputs) -> ForwardResult:
        found: list[TokenOutputs] = []
        reads: list[Int64] = []
        plan = self._micro_batches(rows, together=self.forward_is_collective)
        with self._rng_stream(), self.sharding:
            for index in plan:
                batch = self._to_device(rows, index)
                found.append(self._run(batch, outputs))
                reads.append(batch.read)

        def column(name: str, where: Sequence[Int64], size: int) -> np.ndarray[Any, Any] | None:
            parts = [getattr(one, name) for one in found]
            if parts[0] is None:
                return None
            return scattered(torch.cat(parts).cpu().numpy(), np.concatenate(where), size)

        per_token = ("log_probs", "entropy", "greedy", "values")
        flat = {name: column(name, reads, rows.num_tokens) for name in per_token}
        return ForwardResult(**flat, scores=column("scores", plan, rows.num_rows))

    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        self._optimizer_or_refuse()
        tally = Tally()
        outputs = replace(objective.outputs, routing=self.model.routers is not None)
        plan = self._micro_batches(rows, together=True, unit=objective.rows_per_unit)
        with self._rng_stream(), self.sharding:
            for i, index in enumerate(plan):
                batch = self._to_device(rows, index)
                row = torch.arange(len(index), device=self.device) if objective.outputs.scores else batch.row
                inputs = LossInputs(row=row, **self._columns(rows, batch, index))
                weight = torch.from_numpy(rows.loss_weight[index]).to(self.device, non_blocking=True)
                with self.summing(last=i == len(plan) - 1):
                    told = self._run(batch, outputs)
                    found = objective(told, inputs)
                    if told.routing is not None:
                        found = self._balanced(found, told.routing, row)
                    loss = aggregate(found.loss, row, weight)
                    loss.backward()
                counted = (weight != 0).float().index_select(0, row)
                tally.add(loss, found, counted, None if told.routing is None else told.routing.load)
        return tally.report()

    def optimizer_step(self) -> StepReport:
        optimizer = self._optimizer_or_refuse()
        config = self.spec.optimizer
        assert config is not None
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        rate = learning_rate(config, self.steps, self.spec.schedule_steps)
        skipped = None
        if bool(torch.isfinite(norm)):
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), config.max_grad_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        else:
            skipped = self._first_bad_gradient()
        optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepReport(float(norm), rate, skipped)

    def manifest(self) -> Manifest:
        return self._manifest

    @torch.no_grad()
    def shards(self, names: Iterable[str]) -> Iterator[tuple[Slice, Tensor]]:
        parameters = dict(self.model.hf.named_parameters())
        own: tuple[str, Tensor] | None = None  # pieces of one parameter come one after another
        for name in names:
            module_name, piece = self._places[name]
            if own is None or own[0] != module_name:
                own = module_name, self._merged(module_name, parameters)
            value = own[1]
            if isinstance(value, DTensor):
                owner, local = _is_first_copy(value), value.to_local()
            else:
                owner, local = self.rank == 0, value
            here, there = piece.overlap(own_box(value))
            part = local[here].view([side.stop - side.start for side in there])
            if owner and part.numel():
                yield Slice(name, tuple(side.start for side in there), tuple(part.shape)), part

    def state(self) -> dict[str, Any]:
        # RNG under a key per rank: every rank's stream is in the checkpoint
        state: dict[str, Any] = {"steps": self.steps, f"rng_{self.rank}": self._rng}
        if self.optimizer is None:
            return state
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._kept)
        if self.spec.lora is not None:  # torch leaves frozen parameters in that are tied
            learned = {f"hf.{name}" for name, value in self.model.hf.named_parameters() if value.requires_grad}
            model = {name: value for name, value in model.items() if name in learned}
        return state | {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._rng = state.get(f"rng_{self.rank}", self._rng)
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

    def place(self, *, params: str, optimizer: str) -> None:
        unknown = {params, optimizer} - {"device", "host"}
        if unknown:
            raise EngineError(f"place: {unknown} is neither 'device' nor 'host'")
        if self.device.type == "cuda" and "host" in (params, optimizer):
            torch.cuda.empty_cache()  # of activations; else it would be free for this process alone
        if self.home.type == "cpu":
            return  # host is device, or is where they always are
        self.module.to("cpu" if params == "host" else self.device)
        if self.optimizer is not None:
            target = torch.device("cpu") if optimizer == "host" else self.device
            for moments in self.optimizer.state.values():
                for name, value in moments.items():
                    if isinstance(value, Tensor) and name != "step":
                        moments[name] = value.to(target)
        if "host" in (params, optimizer):
            torch.cuda.empty_cache()

    @torch.no_grad()
    def export(self, path: str, *, adapter: bool = False) -> None:
        lora = self.spec.lora
        if adapter and lora is None:
            raise EngineError(f"the {self.spec.role} learned without an adapter: {self.spec.role}.lora.rank is 0")
        folder = Path(path)
        parameters, tensors = self._learned() if adapter else (self._manifest.sent, self._whole_parameters())
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if adapter and lora is not None:
                write_config(folder, lora, self.spec.model_path, self.head)
            else:
                self.model.hf.config.save_pretrained(folder)
            for pattern in COPIED_FILES:
                for file in Path(self.spec.model_path).glob(pattern):
                    shutil.copy(file, folder / file.name)
            write_tensors(folder, parameters, tensors, stem="adapter_model" if adapter else "model")
        else:
            for _ in tensors:
                pass  # gathering takes all ranks
        if self.world_size > 1:
            dist.barrier()

    # ------------------------------------------------------------------------------------------------- inside

    def _run(self, batch: MicroBatch, outputs: Outputs) -> TokenOutputs:
        """One pass through the module; its outputs are those of all peers."""
        with self.computing():
            found: TokenOutputs = self.module(batch.packed, outputs)
        return self.sharding.postprocess(found)

    def _whole_parameters(self) -> Iterator[Tensor]:
        """Each tensor that is sent; one parameter at a time is gathered."""
        parameters = dict(self.model.hf.named_parameters())
        for name in dict.fromkeys(self._places[parameter.name][0] for parameter in self._manifest.sent):
            whole = _whole(self._merged(name, parameters))
            for piece in pieces(name, whole.shape):
                yield whole[piece.overlap(own_box(whole))[0]].view(piece.shape)

    def _learned(self) -> tuple[tuple[Parameter, ...], Iterator[Tensor]]:
        """What an adapter's file holds, and its tensors, gathered one at a time."""
        learned = {name: value for name, value in self.model.hf.named_parameters() if value.requires_grad}
        parameters = tuple(_parameter(adapter_name(name), value) for name, value in learned.items())
        return parameters, (_whole(value) for value in learned.values())

    def _merged(self, name: str, parameters: Mapping[str, Tensor]) -> Tensor:
        """A parameter as it leaves this engine, with its adapter in it."""
        return parameters[name].detach() if self.spec.lora is None else merged(name, parameters, self.spec.lora)

    @property
    def _kept(self) -> StateDictOptions:
        """A checkpoint of an adapter holds nothing else; its base is in the model's directory."""
        return StateDictOptions(ignore_frozen_params=True, strict=self.spec.lora is None)

    def _balance_weight(self) -> float:
        asked, role = self.spec.expert_balance, self.spec.role
        if self.model.routers is None:
            if asked is not None:
                raise EngineError(
                    f"{role}.expert_balance = {asked}: {self.spec.model_path} has no experts; set it to null"
                )
            return 0.0
        if self.peers > 1:
            raise EngineError(
                f"{role}.backend.sequence_parallel = {self.peers}: {self.spec.model_path} has experts, whose rows are "
                f"not cut; set it to 1"
            )
        return float(self.model.hf.config.router_aux_loss_coef if asked is None else asked)

    def _balanced(self, found: TokenLoss, routing: Routing, row: Tensor) -> TokenLoss:
        """The loss of each token with the balance of its row: weighted as it, the rows' mean is added."""
        balance = routing.balance.index_select(0, row)
        metrics = found.metrics | {f"{self.spec.role}/expert_balance_loss": balance.detach()}
        return replace(found, loss=found.loss + self._balance * balance, metrics=metrics)

    def _optimizer_or_refuse(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise EngineError(f"the {self.spec.role} does not learn: it was built without an optimizer")
        return self.optimizer

    def _micro_batches(self, rows: Rows, *, together: bool, unit: int = 1) -> list[Int64]:
        """At least one. `together`: as many on every rank, empty ones where a rank lacks rows; and where one rank
        has a row that is too long, all refuse, so that none waits for it. `unit`: rows that stay together."""
        refusal = None
        try:
            plan = micro_batches(rows.lengths, self.spec.backend.micro_batch_tokens_per_rank, unit, self.peers)
        except DataError as error:
            plan, refusal = [], error
        count = max(len(plan), 1)
        if together and self.world_size > 1:
            agreed = torch.tensor([count, refusal is not None])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)  # a host tensor: the gloo half of the process group
            count, refused = agreed.tolist()
            if refused and refusal is None:
                refusal = DataError("another rank refused its rows of this call; its error says why")
        if refusal is not None:
            raise refusal
        return plan + [np.empty(0, dtype=np.int64)] * (count - len(plan))

    def _to_device(self, rows: Rows, index: Int64) -> MicroBatch:
        if len(index) == 0:
            return self._empty()
        chosen = rows if len(index) == rows.num_rows else rows.select(index)
        starts = rows.offsets[index] - chosen.offsets[:-1]  # from places here to places in the whole batch
        row_of_token = chosen.row_of_token
        read = np.flatnonzero(chosen.response_mask)
        if bool(chosen.response_mask[chosen.offsets[:-1]].any()):
            raise DataError("response_mask is True on a row's first token, which nothing comes before")
        row, whole = row_of_token[read], read + starts[row_of_token[read]]
        positions = np.arange(chosen.num_tokens) - chosen.offsets[row_of_token]

        packed = PackedTokens(
            chosen.tokens, positions, read - 1, chosen.tokens[read], chosen.offsets[1:] - 1, chosen.offsets
        )
        return MicroBatch(self._own_part(packed), whole, self._tensor(row))

    def _empty(self) -> MicroBatch:
        """One token that nobody reads, for the ranks that meet inside."""
        nothing, token = np.empty(0, np.int64), np.zeros(1, np.int64)
        packed = PackedTokens(token, token, nothing, nothing, nothing, offsets_of([1]))
        return MicroBatch(self._own_part(packed), nothing, self._tensor(nothing))

    def _own_part(self, rows: PackedTokens) -> PackedRows:
        """What this rank computes of packed rows, on its device."""
        own = self.sharding.preprocess(rows)
        return PackedRows(
            self._tensor(own.tokens)[None],
            self._tensor(own.positions)[None],
            plan_layout(own.offsets, self.device, self.dtype, self.sharding.exchange),
            self._tensor(own.before),
            self._tensor(own.targets),
            self._tensor(own.ends),
        )

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device, non_blocking=True)

    def _columns(self, rows: TrainingBatch, batch: MicroBatch, index: Int64) -> dict[str, Tensor]:
        kinds = rows.columns()
        given = {name: getattr(rows, name) for name in LossInputs.columns()}
        return {
            name: torch.from_numpy(values[index if kinds[name].kind is Kind.ROW else batch.read]).to(
                self.device, non_blocking=True
            )
            for name, values in given.items()
            if values is not None
        }

    def _first_bad_gradient(self) -> str:
        """The first parameter of which some rank has a bad part. All ranks skip the step, and all say the same."""
        names = [name for name, _ in self.model.hf.named_parameters()]
        first = len(names)
        for i, parameter in enumerate(self.model.hf.parameters()):
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is not None and not bool(torch.isfinite(local).all()):
                first = i
                break
        found = torch.tensor(first * self.world_size + self.rank)  # on the host: the gloo half of the process group
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        first, rank = divmod(int(found), self.world_size)
        if first == len(names):
            return "the gradient norm is not finite, though every gradient is"
        return f"the gradient of {names[first]} is not finite on rank {rank}"

    def _seeded(self, seed: int) -> Tensor:
        with torch.random.fork_rng(devices=self._rng_devices()):
            torch.manual_seed(seed * 1_000_003 + self.rank)
            return self._rng_now()

    def _rng_devices(self) -> Sequence[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _rng_now(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    @contextlib.contextmanager
    def _rng_stream(self) -> Iterator[None]:
        """Random numbers come from this engine's own stream, whoever shares its process."""
        with torch.random.fork_rng(devices=self._rng_devices()):
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self._rng, self.device)
            else:
                torch.set_rng_state(self._rng)
            try:
                yield
            finally:
                self._rng = self._rng_now()


def _manifest_of(model: RoleModel) -> tuple[Manifest, dict[str, tuple[str, Piece]]]:
    """What is sent, and where each of its tensors is: the module's parameter, and the piece of it."""
    first: dict[int, str] = {}
    parameters, places = [], {}
    for name, value in model.hf.named_parameters(remove_duplicate=False):
        for piece in pieces(name, value.shape):
            holder = first.setdefault(id(value), piece.name) if piece.shape == value.shape else piece.name
            parameters.append(_parameter(piece.name, value, piece.shape, None if holder == piece.name else holder))
            places[piece.name] = name, piece
    return Manifest(tuple(parameters)), places


def _parameter(name: str, value: Tensor, shape: Sequence[int] | None = None, tied_to: str | None = None) -> Parameter:
    dtype = str(value.dtype).removeprefix("torch.")
    return Parameter(name, tuple(value.shape if shape is None else shape), dtype, tied_to)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _optimizer(model: RoleModel, spec: EngineSpec) -> torch.optim.Optimizer:
    config = spec.optimizer
    assert config is not None
    learning = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.dim() >= 2]
    spared = [p for p in learning if p.dim() < 2]  # norms and biases
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


def _is_first_copy(value: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same slice."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    return all(
        not placement.is_replicate() or at == 0 for placement, at in zip(value.placements, coordinate, strict=True)
    )
