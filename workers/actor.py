"""The actor: the policy that learns, and the source of the weights that rollouts are drawn from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verl_ray.algorithms.credit import assign, diverge
from verl_ray.algorithms.objectives import PolicyObjective, SupervisedObjective
from verl_ray.cluster.context import WorkerContext
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.data.stages import (
    Credit,
    Divergence,
    LogProbs,
    Rollouts,
    RowRewards,
    Rows,
    Scores,
    TrainingBatch,
    Values,
)
from verl_ray.engine.base import EngineSpec
from verl_ray.models.probe import probe_rows
from verl_ray.ops.masked import Moments, whiten
from verl_ray.ops.outputs import Outputs
from verl_ray.rollout.base import Probe
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.shared_memory import (
    SharedMemoryAddress,
    SharedMemoryTransport,
    create,
    remove,
)
from workers.model_worker import MiniBatch, ModelWorker, UpdateReport, loss_weights


class ActorWorker(ModelWorker):
    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        super().__init__(context, spec)
        self._wire: tuple[SharedMemoryAddress, SharedMemoryTransport] | None = None
        self._own_address: SharedMemoryAddress | None = None

    # ------------------------------------------------------------------------------------------- one RL step

    def compute_base_log_probs(self, rows: Rows, temperature: float) -> LogProbs:
        """The same without the adapter: those of the policy before it learned, which is the reference then."""
        return self._log_probs(rows, Outputs(log_probs=True, temperature=temperature, base=True))

    def diverge(self, rows: Rollouts, policy: LogProbs, reference: LogProbs, algorithm: AlgorithmConfig) -> Divergence:
        """The divergence of each response from the reference."""
        return diverge(algorithm, rows, policy, reference)

    def assign_credit(
        self,
        rows: Rollouts,
        rewards: RowRewards,
        policy: LogProbs | None,
        reference: LogProbs | None,
        values: Values | None,
        algorithm: AlgorithmConfig,
        kl_coefficient: float,
    ) -> Credit:
        """Advantages and returns of these rows; needs no other row."""
        return assign(algorithm, kl_coefficient, rows, rewards, policy, reference, values)

    def update(
        self,
        rows: Rollouts,
        credit: Credit,
        old: LogProbs | None,
        reference: LogProbs | None,
        mini_batch: MiniBatch,
        whitening: Moments | None,
        objective: PolicyObjective,
    ) -> UpdateReport:
        """One optimizer step on a mini-batch of which these are this rank's rows."""
        advantages = credit.advantages
        if whitening is not None:
            advantages = np.where(rows.response_mask, whiten(advantages, whitening), np.float32(0))
        batch = TrainingBatch(
            offsets=rows.offsets,
            tokens=rows.tokens,
            response_mask=rows.response_mask,
            loss_weight=loss_weights(rows, credit, mini_batch),
            rollout_log_probs=rows.rollout_log_probs,
            old_log_probs=None if old is None else old.log_probs,
            ref_log_probs=None if reference is None else reference.log_probs,
            advantages=advantages,
        )
        versions = rows.version_spans.values[:, 1]
        return replace(self.learn(batch, objective), oldest_version=int(versions.min()) if len(versions) else None)

    # ----------------------------------------------------------------------------------- supervised training

    def train_supervised(self, rows: TrainingBatch) -> UpdateReport:
        """One optimizer step of supervised training; `loss_weight` is set by who cut the batch."""
        return self.learn(rows, SupervisedObjective())

    def grade_supervised(self, rows: TrainingBatch) -> Scores:
        """1 for each row whose every response token is the model's most probable one: greedy decoding is right."""
        found = self.engine.forward(rows, Outputs(log_probs=True, greedy=True))
        assert found.greedy is not None
        row = rows.row_of_token
        wrong = np.bincount(row[rows.response_mask & ~found.greedy], minlength=rows.num_rows)
        return Scores.ok((wrong == 0).astype(np.float32))

    # --------------------------------------------------------------------------------------------- publishing

    def manifest(self) -> Manifest:
        return self.engine.manifest()

    def probe(self, longest: int, tolerance: float) -> Probe | None:
        """What this policy says of fixed rows of up to `longest` tokens; None on all ranks but one."""
        rows = probe_rows(self.engine.vocab_size, longest)
        said = self.compute_log_probs(rows, 1.0).log_probs
        if not self.topology.answers or self.topology.row_index:
            return None
        cuts = rows.offsets[1:-1]
        of_row = tuple(values[1:] for values in np.split(said, cuts))
        return Probe(tuple(np.split(rows.tokens, cuts)), of_row, tolerance)

    def open_wire(self, session: str, slot_bytes: int) -> SharedMemoryAddress:
        """Make the files that weights travel through, on this rank's node; those of an earlier call go."""
        if self._own_address is not None:
            remove(self._own_address)
        self._own_address = create(session, slot_bytes)
        return self._own_address

    def write_bucket(self, bucket: Bucket, address: SharedMemoryAddress) -> dict[str, Fingerprint]:
        """Put this rank's slices of the bucket on the wire; returns their fingerprints, which add up over ranks."""
        if self._wire is None or self._wire[0] != address:
            self._close_wire()
            self._wire = address, address.open()
        return self._wire[1].write(bucket, self.engine.shards([entry.parameter.name for entry in bucket.entries]))

    def close(self) -> None:
        self._close_wire()
        if self._own_address is not None:
            remove(self._own_address)
        super().close()

    def _close_wire(self) -> None:
        if self._wire is not None:
            self._wire[1].close()
            self._wire = None
