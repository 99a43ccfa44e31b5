"""The computation that all engines over packed rows share.

Invariant: a backend may differ in how tensors are placed and moved, never in what is
computed. This file is the computation: rows become micro-batches, micro-batches become
outputs and losses, and an optimizer step is taken or skipped. A backend only defines
how micro-batches pass through its model. Numbers reach the host once per call, not once
per micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.algorithms.aggregation import aggregate, surface_non_finite
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.checkpoint.sharded import random_key
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rows, TrainingBatch
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.engine.base import (
    Engine,
    EngineSpec,
    ForwardResult,
    LossAccumulator,
    LossReport,
    StepReport,
)
from verl_ray.engine.expert_balance import (
    BiasUpdate,
    balance_coefficient,
    balance_per_loss,
)
from verl_ray.engine.forward_results import join_column, zero_result
from verl_ray.engine.micro_batches import (
    MICRO_BATCHES,
    Loss,
    MicroBatch,
    MicroBatches,
    loss_columns,
    pack_no_rows,
    pack_rows,
    plan_micro_batches,
    to_learn,
)
from verl_ray.engine.optimizer import (
    describe_bad_gradient,
    learning_rate,
    names_not_finite,
)
from verl_ray.engine.recorded_losses import RecordedLosses
from verl_ray.engine.weight_average import (
    Stepped,
    exchange_average,
    update_average,
)
from verl_ray.errors import EngineError
from verl_ray.learning.objectives import LossInputs, Objective, without_uncounted
from verl_ray.models.attention import plan_layout
from verl_ray.models.export import Configure, with_other_parts, write_directory
from verl_ray.models.role_model import PackedRows, RoleModel
from verl_ray.models.routing_replay import RecordedRouting, require_choices
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import PackedTokens, ShardingManager
from verl_ray.profiling.flops import ModelShape
from verl_ray.profiling.progress import reach, touch
from verl_ray.settings.config_json import num_experts, positions_of
from verl_ray.weight_sync.manifest import Manifest, Parameter


class PackedEngine(Engine):
    """An engine whose model takes packed rows."""

    spec: EngineSpec
    device: torch.device
    rank: int
    world_size: int
    dtype: torch.dtype
    sharding: ShardingManager
    random_stream: RandomStream

    micro_batch_multiple = 1
    """The number of micro-batches of a call is a multiple of this."""

    forward_is_collective: bool
    """Whether ranks must do a forward pass together, because they gather parameters."""

    steps: int
    """Optimizer steps taken so far, skipped ones included."""

    _manifest: Manifest

    def describe(self, model: RoleModel) -> None:
        """Set the attributes of the contract that follow from the model."""
        config = model.hf.config
        self._config = config
        self.head = self.spec.head
        self.vocab_size = int(config.vocab_size)
        self.max_positions = (
            positions_of(config.to_dict()) or config.max_position_embeddings
        )
        self.shape = ModelShape.of(config.to_dict(), self.spec.head)

        self._parameter_names = [name for name, _ in model.hf.named_parameters()]
        self._routed = model.router_watch is not None
        if self.spec.replays_routing:
            if model.router_watch is None:
                raise EngineError(
                    f"rollout.routing_replay: {self.spec.model_path} has no experts, or"
                    " its routers return no choice; set it to false"
                )
            model.replay_routing()
            self._routed_layers = list(model.router_watch.routers)
        self._balance_coefficient = balance_coefficient(self.spec, model)
        self._balance_metric = f"{self.spec.role}/expert_balance_loss"
        self._bias_update: BiasUpdate | None = None
        if self.spec.expert_bias_update:
            self._bias_update = BiasUpdate.of(
                self.spec, model, world_size=self.world_size
            )

    # ----------------------------------------------------------- what a backend defines

    @abstractmethod
    def _compute_outputs(
        self, batches: MicroBatches, outputs: RequestedOutputs
    ) -> list[TokenOutputs]:
        """Return the outputs of each micro-batch, without gradients.

        The list is empty on a rank that does not compute outputs, such as an early
        pipeline stage.
        """

    @abstractmethod
    def _accumulate_gradients(
        self, batches: MicroBatches, outputs: RequestedOutputs, loss: Loss
    ) -> None:
        """Add the gradients of the loss of all micro-batches.

        `loss` is called on the ranks that have the outputs.
        """

    def _complete_report(self, report: LossReport) -> LossReport:
        """Return the report with what a backend measures besides the outputs."""
        return report

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Finish the sum of gradients over ranks and return its global norm."""

    @abstractmethod
    def _clip_and_step(self, norm: float, rate: float) -> None:
        """Clip gradients of this norm to the configured one and step the optimizer."""

    @abstractmethod
    def _stepped(self) -> Stepped:
        """Yield what this rank's optimizer steps."""

    def _install_weights(self) -> None:
        """Make the weights that compute those that the optimizer steps. Collective."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Set all gradients to zero, or remove them."""

    @abstractmethod
    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield this rank's part of each gradient with the name of its parameter."""

    @abstractmethod
    def _named_weights(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name and part of each parameter in this rank, and if it learns."""

    @abstractmethod
    def _gathered_parameters(self) -> Iterator[Tensor]:
        """Yield each exported tensor, gathered one at a time. Collective.

        Ranks other than 0 yield as many tensors, of undefined values.
        """

    @abstractmethod
    def _move_state(self, params: torch.device, optimizer: torch.device) -> None:
        """Move parameters and optimizer state to these devices.

        Called only on GPUs; the caller synchronizes afterwards.
        """

    # --------------------------------------------------------------------- the contract

    @torch.no_grad()
    def forward(self, rows: Rows, outputs: RequestedOutputs) -> ForwardResult:
        # Ranks that gather parameters from each other do equally many passes.
        plan = self._plan(rows, agree_with_ranks=self.forward_is_collective)
        batches = MicroBatches(
            plan, lambda indices: self._make_micro_batch(rows, indices)
        )
        with self._own_random_numbers(), self.sharding:
            results = self._compute_outputs(batches, outputs)
        reach(len(batches), len(batches), MICRO_BATCHES)

        if not results:
            return zero_result(rows, outputs)

        selected = [batches.selected[i] for i in range(len(plan))]

        def token_column(name: str) -> np.ndarray[Any, Any] | None:
            return join_column(results, name, selected, rows.num_tokens)

        return ForwardResult(
            log_probs=token_column("log_probs"),
            entropy=token_column("entropy"),
            greedy=token_column("greedy"),
            squared_probs=token_column("squared_probs"),
            values=token_column("values"),
            top_tokens=token_column("top_tokens"),
            top_log_probs=token_column("top_log_probs"),
            scores=join_column(results, "scores", plan, rows.num_rows),
        )

    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        self._require_optimizer()
        if self.spec.replays_routing and rows.routed_experts is None:
            raise EngineError(
                "rollout.routing_replay: rows to learn from have no routed_experts,"
                " which their sampler did not record; set it to false"
            )
        accumulator = LossAccumulator()
        recorded = RecordedLosses(rows, objective.level)

        def loss_of(batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
            token_loss = self._token_loss(rows, objective, batch, outputs)
            recorded.add(batch, token_loss)
            return self._loss_of(batch, outputs, token_loss, accumulator)

        def make(indices: Int64) -> MicroBatch:
            batch = self._make_micro_batch(rows, indices)
            return to_learn(batch, rows, objective.level)

        # Gradients are summed in the last micro-batch, so all ranks have as many.
        plan = self._plan(rows, agree_with_ranks=True)
        batches = MicroBatches(plan, make)
        outputs = replace(objective.outputs, routing=self._routed)
        with self._own_random_numbers(), self.sharding:
            self._accumulate_gradients(batches, outputs, loss_of)
        reach(len(batches), len(batches), MICRO_BATCHES)

        report = self._complete_report(accumulator.report())
        report = replace(report, recorded=recorded.by_row())
        if self._bias_update is not None:
            self._bias_update.count(report.expert_load)
        return report

    def optimizer_step(self) -> StepReport:
        config = self._require_optimizer()
        norm = self._gradient_norm()
        touch()

        pace = self.spec.pace
        position = self.steps if pace is None else pace.position(self.steps)
        rate = learning_rate(config, position, self.spec.schedule_steps)
        skipped = None
        broken: tuple[str, ...] = ()
        if math.isfinite(norm):
            self._clip_and_step(norm, rate)
            if self.spec.average_decay is not None:
                update_average(self._stepped(), self.spec.average_decay)
            if self._bias_update is not None:
                self._bias_update.step()
            broken = self.names_not_finite(learning=True)
        else:
            skipped = describe_bad_gradient(
                self._named_gradients(),
                self._parameter_names,
                rank=self.rank,
                world_size=self.world_size,
            )

            if self._bias_update is not None:
                self._bias_update.forget()

        # A skipped step counts too, so the schedule depends on the calls alone.
        self._zero_gradients()
        self.steps += 1
        return StepReport(norm, rate, skipped, broken)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        if self.spec.average_decay is None:
            raise EngineError(
                f"the {self.spec.role} has no average of its weights: set"
                " distill.teacher=average"
            )
        self._exchange_average()
        try:
            yield
        except BaseException:
            # Nothing is computed with this process again, and its peers may wait in
            # another collective, so nothing is gathered.
            exchange_average(self._stepped())
            raise
        self._exchange_average()

    def _exchange_average(self) -> None:
        exchange_average(self._stepped())
        self._install_weights()

    def names_not_finite(self, *, learning: bool = False) -> tuple[str, ...]:
        return names_not_finite(
            (name, part)
            for name, part, learns in self._named_weights()
            if learns or not learning
        )

    def manifest(self, *, separate_adapter: bool = False) -> Manifest:
        return self._manifest

    def place(self, *, params: str, optimizer: str) -> None:
        unknown = {params, optimizer} - {"device", "host"}
        if unknown:
            raise EngineError(f"place: {unknown} is neither 'device' nor 'host'")
        if self.device.type == "cpu":
            # Both are the same memory.
            return

        devices = {"device": self.device, "host": torch.device("cpu")}
        self._move_state(devices[params], devices[optimizer])

        # The source of a copy must stay as it is until the copy is complete.
        torch.cuda.synchronize()
        if "host" in (params, optimizer):
            # Free memory that torch caches, that of activations too, would otherwise be
            # available to this process only.
            torch.cuda.empty_cache()

    @torch.no_grad()
    def export(self, path: str, *, adapter: bool = False) -> None:
        if adapter:
            role = self.spec.role
            raise EngineError(
                f"the {role} learned without an adapter: {role}.lora.rank is 0"
            )

        self._write(
            Path(path),
            self._config.save_pretrained,
            self._exported_parameters,
            self._gathered_parameters(),
            stem="model",
        )

    # --------------------------------------------------------------------------- losses

    def _require_optimizer(self) -> OptimizerConfig:
        if self.spec.optimizer is None:
            raise EngineError(
                f"the {self.spec.role} does not learn: it was built without an"
                " optimizer"
            )
        return self.spec.optimizer

    @staticmethod
    def _token_loss(
        rows: TrainingBatch,
        objective: Objective,
        batch: MicroBatch,
        outputs: TokenOutputs,
    ) -> TokenLoss:
        """Return the losses of a micro-batch by the objective alone."""
        assert batch.row_weights is not None, "rows are learned from"
        inputs = LossInputs(
            row=batch.row_of_output(objective.outputs),
            unit=batch.unit,
            **loss_columns(rows, batch),
        )
        counted = batch.row_weights != 0
        return objective(*without_uncounted(outputs, inputs, counted))

    def _loss_of(
        self,
        batch: MicroBatch,
        outputs: TokenOutputs,
        token_loss: TokenLoss,
        accumulator: LossAccumulator,
    ) -> Tensor:
        """Return a micro-batch's share of the loss, and add it to the accumulator."""
        row, row_weights = batch.row_of_loss, batch.row_weights
        assert row is not None and row_weights is not None, "rows are learned from"
        expert_load = None
        if outputs.routing is not None:
            balance = balance_per_loss(outputs.routing, batch)
            token_loss = replace(
                token_loss,
                loss=token_loss.loss + self._balance_coefficient * balance,
                metrics=token_loss.metrics | {self._balance_metric: balance.detach()},
            )
            expert_load = outputs.routing.load

        loss = aggregate(token_loss.loss, row, row_weights)
        weight = row_weights.index_select(0, row)
        accumulator.add(loss, token_loss, weight, expert_load)

        # Any output that depends on the parameters serves to carry a NaN to them.
        candidates = (outputs.log_probs, outputs.values, outputs.scores)
        output = next(values for values in candidates if values is not None)
        return surface_non_finite(loss, output)

    # -------------------------------------------------------------------- micro-batches

    def _plan(self, rows: Rows, *, agree_with_ranks: bool) -> list[Int64]:
        return plan_micro_batches(
            rows.lengths,
            self.spec.backend,
            unit=rows.unit if isinstance(rows, TrainingBatch) else None,
            multiple=self.micro_batch_multiple,
            equal_lengths=not self.spec.packs_rows,
            agree_with_ranks=agree_with_ranks and self.world_size > 1,
        )

    def _make_micro_batch(self, rows: Rows, indices: Int64) -> MicroBatch:
        packing = pack_no_rows(rows)
        if len(indices):
            replays = self.spec.replays_routing
            packing = pack_rows(rows, indices, replays_routing=replays)
        return MicroBatch(
            packed=self._own_part(packing.tokens),
            row_indices=indices,
            selected=packing.selected,
            row_of_token=self._tensor(packing.row_of_token),
        )

    def _own_part(self, rows: PackedTokens) -> PackedRows:
        """Return this rank's part of the packed rows, on its device."""
        own = self.sharding.preprocess(rows)
        layout = plan_layout(
            own.offsets, self.device, self.dtype, self.sharding.exchange
        )
        count = 1 if self.spec.packs_rows else len(own.offsets) - 1
        recorded = None
        if own.experts is not None and own.is_routed is not None:
            require_choices(
                own.experts[own.is_routed],
                self._routed_layers,
                self._config.num_hidden_layers,
                num_experts(self._config.to_dict()),
            )
            recorded = RecordedRouting(
                torch.tensor(own.experts).to(self.device, non_blocking=True),
                torch.tensor(own.is_routed[:, None]).to(self.device, non_blocking=True),
            )
        return PackedRows(
            input_ids=self._tensor(own.tokens).view(count, -1),
            position_ids=self._tensor(own.positions).view(count, -1),
            layout=layout,
            offsets=self._tensor(own.offsets),
            predecessors=self._tensor(own.predecessors),
            targets=self._tensor(own.targets),
            last_tokens=self._tensor(own.last_tokens),
            candidates=None if own.candidates is None else self._tensor(own.candidates),
            recorded_routing=recorded,
        )

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        integers = torch.from_numpy(values.astype(np.int64))
        return integers.to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Let every random generator draw from this engine's streams in the block."""
        with self.random_stream.active():
            yield

    # --------------------------------------------------------------------------- export

    @property
    def _exported_parameters(self) -> Sequence[Parameter]:
        """The tensors of an export, in the order of `_gathered_parameters`."""
        return self._manifest.sent

    def _write(
        self,
        folder: Path,
        configure: Configure,
        parameters: Sequence[Parameter],
        tensors: Iterator[Tensor],
        *,
        stem: str,
    ) -> None:
        """Write a Hugging Face directory from rank 0. Collective.

        Args:
            folder: The directory, which is created if necessary.
            configure: Writes the configuration into the directory.
            parameters: Describes the tensors.
            tensors: Yields the tensors. Every rank consumes its own iterator.
            stem: Name of the safetensors file without its ending.
        """
        if self.rank == 0:
            source = Path(self.spec.model_path)
            if self.head == "policy" and stem == "model":
                configure, parameters, tensors = with_other_parts(
                    source, configure, parameters, tensors
                )
            write_directory(
                folder,
                configure,
                parameters,
                tensors,
                stem=stem,
                tokenizer_from=source,
                chat_template=self.spec.chat_template,
                with_code=self.spec.trusts_code,
            )
        else:
            # Gathering a tensor takes all ranks; this one discards its result.
            for _ in tensors:
                pass
        if self.world_size > 1:
            dist.barrier()


# ----------------------------------------------------------------------- random numbers


class RandomStream:
    """The state of torch's generator for one device, kept apart from the process's own.

    An engine draws random numbers only from its own stream, whatever shares its
    process; and the stream is part of every checkpoint. Streams that a package of a
    backend keeps for itself are not in it.

    Attributes:
        state: uint8 tensor, the state of the generator.
        key: The key of the state in a checkpoint. It differs between ranks and types of
            device, so every rank's stream is in the checkpoint.
    """

    def __init__(self, device: torch.device, rank: int, seed: int) -> None:
        self._device = device
        self._rank = rank
        self._seed = seed
        self.key = random_key(rank, device.type)
        self.state = self._initial_state(0)

    def restore(self, checkpoint: dict[str, Any], steps: int) -> None:
        """Continue the stream of a checkpoint that was taken after `steps` steps.

        A checkpoint that was written on another type of device has None under this
        stream's key. A new stream then begins, which depends on the seed, the rank and
        the step.
        """
        state = checkpoint.get(self.key, self.state)
        if state is None:
            state = self._initial_state(steps)
        self.state = state

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let torch draw from this stream inside the block."""
        with torch.random.fork_rng(devices=self._forked_devices()):
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self.state, self._device)
            else:
                torch.set_rng_state(self.state)

            try:
                yield
            finally:
                self.state = self._generator_state()

    def _initial_state(self, step: int) -> Tensor:
        """Return the state of a newly seeded generator."""
        with torch.random.fork_rng(devices=self._forked_devices()):
            # The primes keep the seeds of different (seed, rank, step) apart.
            seed = self._seed * 1_000_003 + self._rank + step * 1_000_000_007
            torch.manual_seed(seed % 2**63)
            return self._generator_state()

    def _generator_state(self) -> Tensor:
        """Return the present state of torch's generator for this device."""
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _forked_devices(self) -> Sequence[torch.device]:
        """Return the devices that `fork_rng` saves in addition to the CPU."""
        if self._device.type == "cuda":
            return [self._device]
        return []
