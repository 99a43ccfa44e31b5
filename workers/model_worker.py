"""Base of every role with a model, written once over the engine contract.

Invariant: no method knows which backend holds the model. Deliberately not here: methods
of one role alone.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from verl_ray.algorithms.objectives import Objective
from verl_ray.algorithms.row_weights import row_weights
from verl_ray.cluster.concurrency_groups import concurrent
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.rendezvous import share_timeout
from verl_ray.config.algorithm import AggregationName
from verl_ray.data.stages import Credit, LogProbs, Rollouts, Rows, TrainingBatch
from verl_ray.engine.base import EngineSpec, LossReport, StepReport
from verl_ray.engine.build import build_engine
from verl_ray.models.probe import plain_outputs, probe_rows
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.profiling.flops import peak_flops_per_s, training_flops
from verl_ray.profiling.memory import DeviceMemory, device_memory

# Imported where it is used: the driver imports this module too, and saves nothing
# itself.
if TYPE_CHECKING:
    from verl_ray.checkpoint.sharded import BackgroundSave


@dataclass(frozen=True)
class MiniBatch:
    """Totals of a whole mini-batch over all ranks, which its losses need."""

    total_tokens: int
    total_rows: int
    aggregation: AggregationName
    horizon: int | None


@dataclass(frozen=True)
class UpdateReport:
    """Report of one optimizer step on one rank."""

    loss: LossReport
    step: StepReport
    seconds: float = 0.0
    flops: float = 0.0
    """Operations for this rank's rows; 0 where the model's are not counted."""
    peak_flops_per_s: float | None = None
    """Peak of this rank's device; None where it is not known."""
    memory: DeviceMemory | None = None
    """Memory of this rank's device, with the peaks since the call began.

    None without a device that reports its memory.
    """
    oldest_version: int | None = None
    """The oldest policy version that sampled a token of this rank's rows.

    None where the rows are no rollouts.
    """


class ModelWorker:
    """One rank of a role whose model an engine holds."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        self.context = context
        device = torch.device(context.device)
        self.engine = build_engine(
            spec, device=device, rank=context.rank, world_size=context.num_ranks
        )
        self._shape = self.engine.shape
        self._has_adapter = spec.lora is not None
        # The driver balances rows by their estimated work, for which it needs the model
        quadratic = 0.0 if self._shape is None else self._shape.quadratic
        self.topology = replace(self.engine.topology, quadratic=quadratic)
        self._peak_flops_per_s = peak_flops_per_s(device, spec.backend.compute_dtype)
        self._saving: BackgroundSave | None = None
        self._saving_group: dist.ProcessGroup | None = None

    def compute_log_probs(self, rows: Rows, temperature: float) -> LogProbs:
        """Return the log-probabilities of the response tokens.

        Args:
            temperature: The temperature that the tokens were sampled with.
        """
        outputs = RequestedOutputs(log_probs=True, temperature=temperature)
        return self._log_probs(rows, outputs)

    def _log_probs(self, rows: Rows, outputs: RequestedOutputs) -> LogProbs:
        results = self.engine.forward(rows, outputs)
        assert results.log_probs is not None
        return LogProbs(offsets=rows.offsets, log_probs=results.log_probs)

    def learn(self, rows: TrainingBatch, objective: Objective) -> UpdateReport:
        """Make one optimizer step on this rank's rows of a mini-batch."""
        began = time.perf_counter()
        loss = self.engine.forward_backward(rows, objective)
        step = self.engine.optimizer_step()
        # The step waited for the gradient norm, so the device is done.
        seconds = time.perf_counter() - began

        flops = 0.0
        if self._shape is not None:
            all_flops = training_flops(
                self._shape, rows.lengths, frozen=self._has_adapter
            )
            # Peers compute the same rows together.
            flops = all_flops / self.engine.peers
        return UpdateReport(
            loss, step, seconds, flops, self._peak_flops_per_s, device_memory()
        )

    def save(self, path: str) -> None:
        """Write this rank's shards of the engine's state under `path`."""
        from verl_ray.checkpoint.sharded import save

        save(self.engine.state(), path)

    def begin_save(self, path: str) -> None:
        """Begin to write this rank's shards in the background.

        The state is written as it is now, whatever the next calls change.
        """
        from verl_ray.checkpoint.sharded import BackgroundSave

        # A separate group, since the ranks communicate about the save while they train.
        if self._saving_group is None and self.context.num_ranks > 1:
            self._saving_group = dist.new_group(backend="gloo")
            share_timeout()
        self._saving = BackgroundSave(self.engine.state(), path, self._saving_group)

    @concurrent
    def finish_save(self) -> None:
        """Wait for the save of `begin_save`; this rank may compute meanwhile."""
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.wait()

    def load(self, path: str) -> list[str]:
        """Load the engine's state from a checkpoint of any layout.

        Returns:
            Notes on what could not be taken over.
        """
        from verl_ray.checkpoint.sharded import load

        state = self.engine.state()
        notes = load(state, path)
        self.engine.load_state(state)
        return notes

    def export(self, path: str, adapter: bool = False) -> None:
        """Write the model as a Hugging Face directory, or only its adapter."""
        self.engine.export(path, adapter=adapter)

    def distance_from(self, path: str) -> float:
        """Return the largest difference between this engine and transformers.

        The log-probs of a policy are compared, or the scores of any other model, over
        some fixed rows. Ranks that return no results return 0.

        Args:
            path: The directory that transformers loads.
        """
        rows = probe_rows(self.engine.vocab_size)
        is_policy = self.engine.head == "policy"
        outputs = self.engine.forward(
            rows, RequestedOutputs(log_probs=is_policy, scores=not is_policy)
        )
        # Every rank computes, but one result is enough.
        if not self.topology.returns_results or self.topology.dp_rank:
            return 0.0

        ours = outputs.log_probs if is_policy else outputs.scores
        assert ours is not None
        theirs = plain_outputs(path, rows, is_policy)
        return float(np.abs(ours - theirs).max())

    def place(self, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host"."""
        self.engine.place(params=params, optimizer=optimizer)

    def close(self) -> None:
        """Close the engine; an engine that fails is closed as far as it can be."""
        with contextlib.suppress(Exception):
            self.engine.close()


def loss_weights(rows: Rollouts, credit: Credit, mini_batch: MiniBatch) -> np.ndarray:
    """Return the weight of each token loss of a row, float32 [rows].

    It is 0 for rows that are not learned from.
    """
    num_tokens = np.where(credit.in_loss, rows.response_length, 0).astype(np.int64)
    return row_weights(
        mini_batch.aggregation,
        num_tokens,
        total_tokens=mini_batch.total_tokens,
        total_rows=mini_batch.total_rows,
        horizon=mini_batch.horizon,
    )
