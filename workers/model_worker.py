"""What every role with a model does, written once over the engine contract.

Invariant: no method knows which backend holds the model. Deliberately not here: what only one role does.
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
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.lanes import concurrent
from verl_ray.cluster.rendezvous import share_timeout
from verl_ray.config.algorithm import AggregationName
from verl_ray.data.stages import Credit, LogProbs, Rollouts, Rows, TrainingBatch
from verl_ray.engine.base import EngineSpec, LossReport, StepReport
from verl_ray.engine.build import build_engine
from verl_ray.models.probe import plain_outputs, probe_rows
from verl_ray.ops.outputs import Outputs
from verl_ray.profiling.flops import peak_flops_per_s, training_flops
from verl_ray.profiling.memory import DeviceMemory, device_memory

if TYPE_CHECKING:  # imported where it is used: the driver imports this module too, and saves nothing itself
    from verl_ray.checkpoint.sharded import Saving


@dataclass(frozen=True)
class MiniBatch:
    """What a loss must know of a whole mini-batch, over all ranks."""

    total_tokens: int
    total_rows: int
    aggregation: AggregationName
    horizon: int | None


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step on one rank."""

    loss: LossReport
    step: StepReport
    seconds: float = 0.0
    flops: float = 0.0
    """Needed for this rank's rows; 0 for a model whose arithmetic is not counted."""
    peak_flops_per_s: float | None = None
    """Of this rank's device; None where it is not known."""
    memory: DeviceMemory | None = None
    """Of this rank's device, with the peaks since the call began; None without one."""
    oldest_version: int | None = None
    """The oldest policy version that sampled a token of this rank's rows, where they are rollouts."""


class ModelWorker:
    """One rank of a role whose model an engine holds."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        self.context = context
        device = torch.device(context.device)
        self.engine = build_engine(spec, device=device, rank=context.rank, world_size=context.num_ranks)
        self._shape = shape = self.engine.shape
        self._adapted = spec.lora is not None
        self.topology = replace(self.engine.topology, quadratic=shape.quadratic if shape is not None else 0.0)
        self._peak_flops_per_s = peak_flops_per_s(device, spec.backend.dtype)
        self._saving: Saving | None = None
        self._saving_group: dist.ProcessGroup | None = None

    def compute_log_probs(self, rows: Rows, temperature: float) -> LogProbs:
        """Log-probabilities of the response tokens at the temperature they were sampled with."""
        return self._log_probs(rows, Outputs(log_probs=True, temperature=temperature))

    def _log_probs(self, rows: Rows, outputs: Outputs) -> LogProbs:
        found = self.engine.forward(rows, outputs)
        assert found.log_probs is not None
        return LogProbs(offsets=rows.offsets, log_probs=found.log_probs)

    def learn(self, rows: TrainingBatch, objective: Objective) -> UpdateReport:
        """One optimizer step on this rank's rows of a mini-batch."""
        began = time.perf_counter()
        loss, step = self.engine.forward_backward(rows, objective), self.engine.optimizer_step()
        seconds = time.perf_counter() - began  # the gradient norm has been waited for, so the device is done
        flops = 0.0
        if self._shape is not None:
            flops = training_flops(self._shape, rows.lengths, frozen=self._adapted) / self.engine.peers
        return UpdateReport(loss, step, seconds, flops, self._peak_flops_per_s, device_memory())

    def save(self, path: str) -> None:
        """Write this rank's shards of the engine's state under `path`."""
        from verl_ray.checkpoint.sharded import save

        save(self.engine.state(), path)

    def begin_save(self, path: str) -> None:
        """The same behind what comes next: what is written is the state as it is now."""
        from verl_ray.checkpoint.sharded import Saving

        if self._saving_group is None and self.context.num_ranks > 1:
            self._saving_group = dist.new_group(backend="gloo")
            share_timeout()
        self._saving = Saving(self.engine.state(), path, self._saving_group)

    @concurrent
    def finish_save(self) -> None:
        """Wait for what `begin_save` began, beside what this rank computes meanwhile."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, path: str) -> list[str]:
        """Take the engine's state from a checkpoint that any layout wrote. Returns what could not be taken over."""
        from verl_ray.checkpoint.sharded import load

        state = self.engine.state()
        notes = load(state, path)
        self.engine.load_state(state)
        return notes

    def export(self, path: str, adapter: bool = False) -> None:
        """Write a Hugging Face directory, or what was learned beside it as an adapter."""
        self.engine.export(path, adapter=adapter)

    def distance_from(self, path: str) -> float:
        """The largest difference between this engine and transformers on the directory `path`, over some fixed rows:
        of the log-probs of a policy, or of the scores of any other model. 0 on ranks that only help."""
        rows = probe_rows(self.engine.vocab_size)
        policy = self.engine.head == "policy"
        found = self.engine.forward(rows, Outputs(log_probs=policy, scores=not policy))
        if not self.topology.answers or self.topology.row_index:
            return 0.0
        ours = found.log_probs if policy else found.scores
        assert ours is not None
        return float(np.abs(ours - plain_outputs(path, rows, policy)).max())

    def place(self, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host"."""
        self.engine.place(params=params, optimizer=optimizer)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.engine.close()


def loss_weights(rows: Rollouts, credit: Credit, mini_batch: MiniBatch) -> np.ndarray:
    """The weight of each token loss of a row, float32 [rows]; 0 for rows that are not learned from."""
    counted = np.where(credit.in_loss, rows.response_length, 0).astype(np.int64)
    return row_weights(
        mini_batch.aggregation,
        counted,
        total_tokens=mini_batch.total_tokens,
        total_rows=mini_batch.total_rows,
        horizon=mini_batch.horizon,
    )
