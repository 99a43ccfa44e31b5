"""The actor: the policy that learns, and the source of the weights that rollouts are drawn from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from verl_ray.algorithms.credit import assign, diverge
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.mismatch import compare
from verl_ray.algorithms.objectives import PolicyObjective, SupervisedObjective
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.lanes import steering
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.rollout import WireName
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
from verl_ray.engine.base import EngineSpec, LossReport
from verl_ray.engine.tally import Tally
from verl_ray.errors import WeightSyncError
from verl_ray.models.probe import probe_rows
from verl_ray.ops.masked import Moments, whiten
from verl_ray.ops.outputs import Outputs
from verl_ray.rollout.update import Probe
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route, Sender, Sent
from verl_ray.weight_sync.wires import SENDERS
from workers.model_worker import MiniBatch, ModelWorker, UpdateReport, loss_weights


class ActorWorker(ModelWorker):
    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        super().__init__(context, spec)
        self._wire: tuple[Sender, Route] | None = None

    # ------------------------------------------------------------------------------------------- one RL step

    def compute_base_log_probs(self, rows: Rows, temperature: float) -> LogProbs:
        """The same without the adapter: those of the policy before it learned, which is the reference then."""
        return self._log_probs(rows, Outputs(log_probs=True, temperature=temperature, base=True))

    def diverge(self, rows: Rollouts, policy: LogProbs, reference: LogProbs, algorithm: AlgorithmConfig) -> Divergence:
        """The divergence of each response from the reference."""
        return diverge(algorithm, rows, policy, reference)

    def compare(self, rows: Rollouts, credit: Credit, policy: LogProbs) -> LossReport:
        """These log-probs beside the sampler's, as an update reports them: of the rows that are learned from."""
        mask, tally = rows.response_mask & credit.in_loss[rows.row_of_token], Tally()
        row = torch.from_numpy(rows.row_of_token[mask])
        means, maxima = compare(
            torch.from_numpy(policy.log_probs[mask]), torch.from_numpy(rows.rollout_log_probs[mask]), row
        )
        nothing, counted = torch.zeros(()), torch.ones(len(row))
        tally.add(nothing, TokenLoss(nothing, means, maxima), counted, None)
        return tally.report()

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

    def manifest(self, apart: bool = False) -> Manifest:
        """What leaves this policy; `apart`: its adapter beside the model, and not merged into it."""
        return self.engine.manifest(apart=apart)

    def probe(self, longest: int, tolerance: float) -> Probe | None:
        """What this policy says of fixed rows of up to `longest` tokens; None on all ranks but one."""
        rows = probe_rows(self.engine.vocab_size, longest)
        said = self.compute_log_probs(rows, 1.0).log_probs
        if not self.topology.answers or self.topology.row_index:
            return None
        cuts = rows.offsets[1:-1]
        of_row = tuple(values[1:] for values in np.split(said, cuts))
        return Probe(tuple(np.split(rows.tokens, cuts)), of_row, tolerance)

    def open_wire(self, name: WireName, route: Route) -> Address:
        """Make this rank's end of the wire that weights will travel over; rank 0 says where it is. That of an earlier
        call goes."""
        self._close_wire()
        sender = SENDERS[name](route, self.context.rank, torch.device(self.context.device))
        self._wire = sender, route
        return sender.offer()

    def connect_wire(self, address: Address) -> str | None:
        """Meet the receivers, which connect at the same time. Returns which of them did not come: no failure of this
        rank."""
        try:
            self._sender.connect(address)
        except WeightSyncError as error:
            return str(error)
        return None

    @steering
    def leave_wire(self) -> None:
        """A receiver will not come: those who meet wait no longer."""
        self._sender.leave()

    def send(self, index: int, whole: bool) -> Sent:
        """Put this rank's slices of a bucket on the wire. `whole`: a receiver may not hold what was sent before."""
        sender, route = self._opened
        bucket = route.buckets[index]
        return sender.send(bucket, self.engine.shards(bucket.names, apart=route.apart), whole=whole)

    def finish_sync(self) -> None:
        """The sync is over: what it alone needed goes, the wire stays."""
        self._sender.finish()

    def close(self) -> None:
        self._close_wire()
        super().close()

    @property
    def _opened(self) -> tuple[Sender, Route]:
        if self._wire is None:
            raise WeightSyncError("the actor has no wire to send weights over: open_wire comes first")
        return self._wire

    @property
    def _sender(self) -> Sender:
        return self._opened[0]

    def _close_wire(self) -> None:
        if self._wire is not None:
            self._wire[0].close()
            self._wire = None
