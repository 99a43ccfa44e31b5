"""What all engines share: rows become micro-batches, micro-batches outputs and losses, and a step takes or skips.

Invariant: a backend may differ in how tensors are placed and moved, never in what is computed; so this file is the
computation, and a backend says only how micro-batches go through its model. Numbers come to the host once per call,
not per micro-batch. Deliberately not here: the model, its optimizer, and anything about a role.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.algorithms.aggregation import aggregate, surfaced
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.objectives import LossInputs, Objective, of_counted
from verl_ray.checkpoint.sharded import random_key
from verl_ray.config.roles import OptimizerConfig
from verl_ray.data.batch import Int64, Kind, offsets_of
from verl_ray.data.packing import micro_batches
from verl_ray.data.stages import Float32, Rows, TrainingBatch
from verl_ray.engine.base import Engine, EngineSpec, ForwardResult, LossReport, StepReport, scattered
from verl_ray.engine.micro_batches import MICRO_BATCHES, Loss, MicroBatch, MicroBatches
from verl_ray.engine.schedule import learning_rate
from verl_ray.engine.tally import Tally
from verl_ray.errors import DataError, EngineError
from verl_ray.models.attention import plan_layout
from verl_ray.models.export import write_tensors
from verl_ray.models.role_model import PackedRows, RoleModel
from verl_ray.ops.outputs import Outputs, Routing, TokenOutputs
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager
from verl_ray.profiling.flops import ModelShape
from verl_ray.profiling.progress import reach, touch
from verl_ray.weight_sync.manifest import Manifest, Parameter

COPIED_FILES = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*",
    "added_tokens.json",
)  # fmt: skip


class PackedEngine(Engine):
    """An engine whose model takes packed rows."""

    spec: EngineSpec
    device: torch.device
    rank: int
    world_size: int
    dtype: torch.dtype
    sharding: ShardingManager
    micro_batch_multiple = 1
    """Micro-batches go through the model in groups of so many."""
    forward_is_collective: bool
    """Whether ranks must go through a forward pass together, as those must that gather parameters for it."""
    steps: int
    _manifest: Manifest
    _rng: Tensor

    def describe(self, model: RoleModel) -> None:
        """Take what callers ask about from the model as transformers knows it."""
        self._config = config = model.hf.config
        self.head = self.spec.head
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self.shape = ModelShape.of(config.to_dict(), self.spec.head)
        self._names = [name for name, _ in model.hf.named_parameters()]
        self._balance = self._balance_weight(model)
        self._routed = model.routers is not None

    # ------------------------------------------------------------------------------- what a backend decides

    @abstractmethod
    def _outputs_of(self, batches: MicroBatches, outputs: Outputs) -> list[TokenOutputs]:
        """The outputs of each micro-batch, without gradients; none on a rank that does not compute them."""

    @abstractmethod
    def _accumulate(self, batches: MicroBatches, outputs: Outputs, loss: Loss) -> None:
        """Add the gradients of the loss of all micro-batches. `loss` is called where the outputs are."""

    def _reported(self, report: LossReport) -> LossReport:
        """With what a backend knows beside the outputs."""
        return report

    @abstractmethod
    def _norm(self) -> float:
        """Of the gradients of all ranks, which are summed by then."""

    @abstractmethod
    def _step(self, norm: float, rate: float) -> None:
        """Clip to the configured norm, and let the optimizer step."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """This rank's part of each parameter's gradient, under the parameter's name."""

    @abstractmethod
    def _whole_parameters(self) -> Iterator[Tensor]:
        """Each tensor that is exported, put together one at a time; on ranks other than 0 anything, as often."""

    @abstractmethod
    def _move(self, params: torch.device, optimizer: torch.device) -> None:
        """Bring parameters and optimizer state there. Called with GPUs alone, which are waited for afterwards."""

    # ------------------------------------------------------------------------------------------- the contract

    @torch.no_grad()
    def forward(self, rows: Rows, outputs: Outputs) -> ForwardResult:
        plan = self._micro_batches(rows, together=self.forward_is_collective)
        batches = MicroBatches(plan, lambda index: self._to_device(rows, index))
        with self._rng_stream(), self.sharding:
            found = self._outputs_of(batches, outputs)
        reach(len(batches), len(batches), MICRO_BATCHES)
        if not found:
            return _nothing(rows, outputs)
        reads = [batches.read[i] for i in range(len(plan))]

        def column(name: str, where: Sequence[Int64], size: int) -> np.ndarray[Any, Any] | None:
            parts = [getattr(one, name) for one in found]
            if parts[0] is None:
                return None
            return scattered(torch.cat(parts).cpu().numpy(), np.concatenate(where), size)

        per_token = ("log_probs", "entropy", "greedy", "values")
        flat = {name: column(name, reads, rows.num_tokens) for name in per_token}
        return ForwardResult(**flat, scores=column("scores", plan, rows.num_rows))

    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        self._learning()
        tally = Tally()

        def loss_of(batch: MicroBatch, told: TokenOutputs) -> Tensor:
            row = batch.row_of_losses(objective.outputs)
            assert batch.weight is not None, "these rows are learned from"
            weight = batch.weight.index_select(0, row)
            inputs = LossInputs(row=row, **self._columns(rows, batch))
            found = objective(*of_counted(told, inputs, weight != 0))
            if told.routing is not None:
                found = self._balanced(found, told.routing, row, batch.weight)
            loss = aggregate(found.loss, row, batch.weight)
            tally.add(loss, found, weight, None if told.routing is None else told.routing.load)
            main = next(one for one in (told.log_probs, told.values, told.scores) if one is not None)
            return surfaced(loss, main)

        def made(index: Int64) -> MicroBatch:
            weight = torch.from_numpy(rows.loss_weight[index]).to(self.device, non_blocking=True)
            return replace(self._to_device(rows, index), weight=weight)

        plan = self._micro_batches(rows, together=True, unit=objective.rows_per_unit)
        batches = MicroBatches(plan, made)
        with self._rng_stream(), self.sharding:
            self._accumulate(batches, replace(objective.outputs, routing=self._routed), loss_of)
        reach(len(batches), len(batches), MICRO_BATCHES)
        return self._reported(tally.report())

    def optimizer_step(self) -> StepReport:
        config = self._learning()
        norm = self._norm()
        touch()
        rate = learning_rate(config, self.steps, self.spec.schedule_steps)
        skipped = None
        if math.isfinite(norm):
            self._step(norm, rate)
        else:
            skipped = self._first_bad_gradient()
        self._zero_gradients()
        self.steps += 1
        return StepReport(norm, rate, skipped)

    def manifest(self, *, apart: bool = False) -> Manifest:
        return self._manifest

    def place(self, *, params: str, optimizer: str) -> None:
        unknown = {params, optimizer} - {"device", "host"}
        if unknown:
            raise EngineError(f"place: {unknown} is neither 'device' nor 'host'")
        if self.device.type == "cpu":
            return  # both are the same memory
        where = {"device": self.device, "host": torch.device("cpu")}
        self._move(where[params], where[optimizer])
        torch.cuda.synchronize()  # what is moved lies where it was read from until the copy has ended
        if "host" in (params, optimizer):
            torch.cuda.empty_cache()  # of activations, too; else it would be free for this process alone

    @torch.no_grad()
    def export(self, path: str, *, adapter: bool = False) -> None:
        if adapter:
            raise EngineError(f"the {self.spec.role} learned without an adapter: {self.spec.role}.lora.rank is 0")
        tensors = self._whole_parameters()
        self._write(Path(path), self._config.save_pretrained, self._exported, tensors, stem="model")

    # ------------------------------------------------------------------------------------------------- inside

    @property
    def _exported(self) -> Sequence[Parameter]:
        """The tensors of an export."""
        return self._manifest.sent

    def _write(
        self,
        folder: Path,
        configure: Callable[[Path], None],
        parameters: Sequence[Parameter],
        tensors: Iterator[Tensor],
        *,
        stem: str,
    ) -> None:
        """A Hugging Face directory with these tensors, by rank 0 with the help of all."""
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            configure(folder)
            for pattern in COPIED_FILES:
                for file in Path(self.spec.model_path).glob(pattern):
                    shutil.copy(file, folder / file.name)
            write_tensors(folder, parameters, tensors, stem=stem)
        else:
            for _ in tensors:
                pass  # gathering takes all ranks
        if self.world_size > 1:
            dist.barrier()

    def _learning(self) -> OptimizerConfig:
        if self.spec.optimizer is None:
            raise EngineError(f"the {self.spec.role} does not learn: it was built without an optimizer")
        return self.spec.optimizer

    def _balance_weight(self, model: RoleModel) -> float:
        asked, role = self.spec.expert_balance, self.spec.role
        if model.routers is None:
            if asked is not None:
                raise EngineError(
                    f"{role}.expert_balance = {asked}: {self.spec.model_path} has no experts; set it to null"
                )
            return 0.0
        if self.spec.backend.token_slices > 1:
            key = f"{role}.backend.{self.spec.backend.token_slices_key}"
            raise EngineError(
                f"{key} = {self.spec.backend.token_slices}: {self.spec.model_path} has experts, whose rows are not "
                f"cut; set it to 1"
            )
        return float(model.hf.config.router_aux_loss_coef if asked is None else asked)

    def _balanced(self, found: TokenLoss, routing: Routing, row: Tensor, weight: Tensor) -> TokenLoss:
        """The loss of each token with the balance of its row: weighted as it, the rows' mean is added. That of a row of
        `weight` 0 is not looked at, as nothing else of it is (`of_counted`)."""
        balance = routing.balance.masked_fill(weight == 0, 0).index_select(0, row)
        metrics = found.metrics | {f"{self.spec.role}/expert_balance_loss": balance.detach()}
        return replace(found, loss=found.loss + self._balance * balance, metrics=metrics)

    def _micro_batches(self, rows: Rows, *, together: bool, unit: int = 1) -> list[Int64]:
        """At least one. `together`: as many on every rank, empty ones where a rank lacks rows; and where one rank
        has a row that is too long, all refuse, so that none waits for it. `unit`: rows that stay together."""
        refusal = None
        try:
            plan = micro_batches(
                rows.lengths, self.spec.backend.micro_batch_tokens_per_rank, unit, self.spec.backend.token_slices
            )
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
        count += -count % self.micro_batch_multiple
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
        return MicroBatch(self._own_part(packed), index, whole, self._tensor(row))

    def _empty(self) -> MicroBatch:
        """One token that nobody reads, for the ranks that meet inside."""
        nothing, token = np.empty(0, np.int64), np.zeros(1, np.int64)
        packed = PackedTokens(token, token, nothing, nothing, nothing, offsets_of([1]))
        return MicroBatch(self._own_part(packed), nothing, nothing, self._tensor(nothing))

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

    def _columns(self, rows: TrainingBatch, batch: MicroBatch) -> dict[str, Tensor]:
        kinds = rows.columns()
        given = {name: getattr(rows, name) for name in LossInputs.columns()}
        return {
            name: torch.from_numpy(values[batch.index if kinds[name].kind is Kind.ROW else batch.read]).to(
                self.device, non_blocking=True
            )
            for name, values in given.items()
            if values is not None
        }

    def _first_bad_gradient(self) -> str:
        """The first parameter of which some rank has a bad part. All ranks skip the step, and all say the same."""
        names = self._names
        first = len(names)
        for name, gradient in self._gradients():
            touch()
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                first = min(first, names.index(name))
        found = torch.tensor(first * self.world_size + self.rank)  # on the host: the gloo half of the process group
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        first, rank = divmod(int(found), self.world_size)
        if first == len(names):
            return "the gradient norm is not finite, though every gradient is"
        return f"the gradient of {names[first]} is not finite on rank {rank}"

    def _seeded(self, seed: int, step: int = 0) -> Tensor:
        """The state of a generator of this device that nothing was drawn from."""
        with torch.random.fork_rng(devices=self._rng_devices()):
            torch.manual_seed((seed * 1_000_003 + self.rank + step * 1_000_000_007) % 2**63)
            return self._rng_now()

    @property
    def _rng_key(self) -> str:
        return random_key(self.rank, self.device.type)

    def _load_rng(self, state: dict[str, Any]) -> None:
        """Go on with this rank's random stream; a checkpoint that another type of device wrote has None of it."""
        found = state.get(self._rng_key, self._rng)
        self._rng = self._seeded(self.spec.seed, self.steps) if found is None else found

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


def _nothing(rows: Rows, outputs: Outputs) -> ForwardResult:
    """The wanted outputs of a rank that has none."""

    def column(wanted: bool, size: int) -> Float32 | None:
        return np.zeros(size, np.float32) if wanted else None

    tokens = rows.num_tokens
    return ForwardResult(
        log_probs=column(outputs.log_probs, tokens),
        entropy=column(outputs.entropy, tokens),
        greedy=np.zeros(tokens, np.bool_) if outputs.greedy else None,
        values=column(outputs.values, tokens),
        scores=column(outputs.scores, rows.num_rows),
    )
