"""Actor: the policy that learns, and the sender of the weights that generate rollouts.

Invariant: no method but `update`, `update_pairs` and `learn` changes the weights. Which
methods make a step, and who receives the weights, is decided by `controllers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.mismatch import compare_log_probs
from verl_ray.cluster.context import WorkerContext, steering
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import (
    Credit,
    Divergence,
    Float32,
    LogProbs,
    Rollouts,
    RowRewards,
    TrainingBatch,
    Values,
)
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.distill import TeacherService
from verl_ray.config.rollout import WireName
from verl_ray.data.token_versions import VersionAges, versions_of_tokens
from verl_ray.engine.base import EngineSpec, LossAccumulator, LossReport
from verl_ray.errors import WeightSyncError
from verl_ray.learning.credit import response_divergences, token_credit
from verl_ray.learning.objectives import Objective
from verl_ray.learning.policy_objective import (
    PolicyObjective,
    mean_weight,
    select_tokens,
)
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from verl_ray.ops.installed_torch import leaving_a_core
from verl_ray.ops.masked import Moments, whiten
from verl_ray.ops.outputs import TopTokens
from verl_ray.rewards.teacher import RemoteTeacher, ServerNeeds, no_log_probs
from verl_ray.rollout.probes import Probe
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import (
    KeptVersion,
    SealedAddress,
    Sender,
    SendResult,
    Shards,
    WireSpec,
)
from verl_ray.weight_sync.wires import sender_of
from workers.model_worker import MiniBatch, ModelWorker, UpdateReport, loss_weights
from workers.teacher_context import TeacherContext, behind_own_prompts


class ActorWorker(ModelWorker):
    """One rank of the actor."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        super().__init__(context, spec)
        self._wire: tuple[Sender, WireSpec] | None = None
        self._kept_version = KeptVersion()

    # ---------------------------------------------------------------------- one RL step

    def ask_teacher(
        self,
        rows: Rollouts,
        services: Mapping[str, TeacherService],
        top: TopTokens | None,
        context: TeacherContext | None,
    ) -> LogProbs:
        """Return the log-probabilities that servers give to the response tokens.

        Args:
            services: The servers of the teacher by their keys; the data source of a row
                decides which is asked.
            top: Which of the most probable tokens are asked for; None = none.
            context: The prompts that a teacher reads; None = those of the policy.

        Raises:
            ConfigError: A data source has no server.
            ModelServiceError: A server gives none.
        """
        # One of the peers that compute the same rows asks for all of them.
        if not self.topology.returns_results:
            return no_log_probs(rows, top)
        read = rows if context is None else context.rows(rows)
        sources = rows.data_source.texts()
        log_probs = RemoteTeacher(services).log_probs(read, sources, top)
        if context is None:
            return log_probs
        return behind_own_prompts(log_probs, read, rows)

    def require_teacher(
        self, services: Mapping[str, TeacherService], needs: ServerNeeds
    ) -> None:
        """Check that this rank reaches servers of a teacher that fit the run.

        Raises:
            ConfigError: It does not.
        """
        if self.topology.returns_results:
            RemoteTeacher(services).require(needs)

    def compute_divergence(
        self,
        rows: Rollouts,
        policy: LogProbs | None,
        reference: LogProbs,
        algorithm: AlgorithmConfig,
    ) -> Divergence:
        """Return the divergence of each response from the reference."""
        return response_divergences(algorithm, rows, policy, reference)

    def compute_mismatch(
        self, rows: Rollouts, credit: Credit, policy: LogProbs
    ) -> LossReport:
        """Compare these log-probs with the sampler's, as an update reports them.

        Only rows that are learned from count.
        """
        import torch

        mask = rows.response_mask & credit.in_loss[rows.row_of_token]
        row_of_token = torch.from_numpy(rows.row_of_token[mask])
        means, maxima = compare_log_probs(
            torch.from_numpy(policy.log_probs[mask]),
            torch.from_numpy(rows.rollout_log_probs[mask]),
            row_of_token,
        )

        # The same report as of an update, which has a loss besides.
        no_loss = torch.zeros(())
        weight = torch.ones(len(row_of_token))
        accumulator = LossAccumulator()
        accumulator.add(no_loss, TokenLoss(no_loss, means, maxima), weight, None)
        return accumulator.report()

    def compute_credit(
        self,
        rows: Rollouts,
        rewards: RowRewards,
        policy: LogProbs | None,
        reference: LogProbs | None,
        values: Values | None,
        algorithm: AlgorithmConfig,
        kl_coefficient: float,
        turn_weights: Mapping[str, float],
    ) -> Credit:
        """Return advantages and returns of these rows; no other row is needed."""
        return token_credit(
            algorithm,
            kl_coefficient,
            rows,
            rewards,
            policy,
            reference,
            values,
            turn_weights,
        )

    def data_sources(self, rows: Rollouts) -> list[str]:
        """Return the data source of each of these rows."""
        return rows.data_source.texts()

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
        """Make one optimizer step on a mini-batch.

        Args:
            rows: This rank's rows of the mini-batch, like the four next arguments.
            old: Log-probabilities of the policy before the step, if they were computed.
            whitening: Moments of the advantages over the whole step; None leaves the
                advantages as they are.
        """
        algorithm = objective.algorithm
        advantages = advantages_in_loss(algorithm, rows, credit, whitening)
        seed = mini_batch.seed
        selections = select_tokens(
            algorithm, rows, credit, advantages, old, seed, self.total
        )
        if objective.normalises:
            mean = mean_weight(algorithm, rows, credit, old, self.total)
            objective = replace(objective, mean_weight=mean)
        weights = loss_weights(rows, credit, mini_batch)
        batch = TrainingBatch(
            offsets=rows.offsets,
            tokens=rows.tokens,
            response_mask=rows.response_mask,
            routed_experts=rows.routed_experts,
            selected=selections.selected,
            uncertain=selections.uncertain,
            loss_weight=weights,
            unit=rows.trajectory_id if algorithm.judges_trajectories else None,
            nll_weight=_nll_weights(algorithm, rows, credit, mini_batch, weights),
            rollout_log_probs=rows.rollout_log_probs,
            old_log_probs=None if old is None else old.log_probs,
            ref_log_probs=None if reference is None else reference.log_probs,
            candidates=None if reference is None else reference.top_tokens,
            teacher_log_probs=None if reference is None else reference.top_log_probs,
            advantages=advantages,
        )
        return self._learn_of_ages(rows, batch, objective, mini_batch.ages)

    def update_pairs(
        self,
        rows: Rollouts,
        reference: LogProbs | None,
        mini_batch: MiniBatch,
        objective: PolicyPreferenceObjective,
    ) -> UpdateReport:
        """Make one optimizer step on the pairs of a mini-batch.

        The loss is the mean over all of them.

        Args:
            rows: This rank's rows, in whole pairs: the best response of a group, then
                the worst one.
            reference: Log-probs of the reference for them; None for a loss without one.
        """
        weight = np.float32(2 / mini_batch.total_trajectories)
        ref_log_prob = None
        if reference is not None:
            ref_log_prob = np.bincount(
                rows.row_of_token, weights=reference.log_probs, minlength=rows.num_rows
            ).astype(np.float64)
        batch = TrainingBatch(
            offsets=rows.offsets,
            tokens=rows.tokens,
            response_mask=rows.response_mask,
            routed_experts=rows.routed_experts,
            loss_weight=np.full(rows.num_rows, weight),
            unit=rows.group_id,
            rollout_log_probs=rows.rollout_log_probs,
            ref_log_prob=ref_log_prob,
        )
        return self._learn_of_ages(rows, batch, objective, mini_batch.ages)

    def _learn_of_ages(
        self,
        rows: Rollouts,
        batch: TrainingBatch,
        objective: Objective,
        ages: VersionAges | None,
    ) -> UpdateReport:
        """Make one optimizer step; report how old the tokens of its rows are.

        Args:
            rows: The rows.
            batch: What the objective reads of them.
            objective: The loss.
            ages: What is known of the ages of versions; None: all are the present one.
        """
        if ages is None:
            return self.learn(batch, objective)
        # No loss is built from tokens that are too old.
        versions = versions_of_tokens(rows)
        tokens_of_versions = ages.count(versions)
        batch = batch.replace(is_fresh=_is_fresh(rows, versions, ages))
        report = self.learn(batch, objective)
        return replace(
            report,
            tokens_of_versions=tokens_of_versions,
            oldest_optimizer_steps=ages.oldest(tokens_of_versions),
        )

    # ----------------------------------------------------------------------- publishing

    def manifest(self, separate_adapter: bool = False) -> Manifest:
        """Return the manifest of the weights that this policy sends.

        Args:
            separate_adapter: Whether the adapter is sent separately, and not merged
                into the model.
        """
        return self.engine.manifest(separate_adapter=separate_adapter)

    def probe(self, longest: int, tolerance: float) -> Probe | None:
        """Return this policy's log-probs of fixed rows of up to `longest` tokens.

        Every rank has to call this. All of them but one return None.
        """
        from verl_ray.models.export import probe_rows

        rows = probe_rows(self.engine.vocab_size, longest)
        # Replicas load what was sent meanwhile.
        with leaving_a_core():
            log_probs = self.compute_log_probs(rows, 1.0).log_probs
        if not self.topology.returns_results or self.topology.dp_rank:
            return None

        cuts = rows.offsets[1:-1]
        tokens_by_row = np.split(rows.tokens, cuts)
        # The first token of a row has no log-prob.
        log_probs_by_row = [values[1:] for values in np.split(log_probs, cuts)]
        return Probe(tuple(tokens_by_row), tuple(log_probs_by_row), tolerance)

    def open_wire(self, name: WireName, wire_spec: WireSpec) -> SealedAddress:
        """Open this rank's endpoint of the wire that weights will travel over.

        The endpoint of an earlier call is closed.

        Returns:
            The address of the wire, for the receivers; only that of rank 0 counts.
        """
        import torch

        self._close_wire()
        device = torch.device(self.context.device)
        sender = sender_of(name)(wire_spec, self.context.rank, device)
        self._wire = sender, wire_spec
        return SealedAddress.of(sender.offer())

    def connect_wire(self, address: SealedAddress) -> str | None:
        """Connect to the receivers, which connect at the same time.

        Returns:
            Which receivers did not connect, as text; None if all did. A missing
            receiver is no failure of this rank, so it is not raised.
        """
        try:
            self._sender.connect(address.unsealed())
        except WeightSyncError as error:
            return str(error)
        return None

    @steering
    def stop_waiting_for_receivers(self) -> None:
        """Stop waiting in `connect_wire`, since a receiver will not connect."""
        self._sender.stop_waiting()

    def send(self, indices: Sequence[int], whole: bool, again: bool) -> SendResult:
        """Send this rank's slices of buckets, one after another.

        Args:
            indices: The numbers of the buckets. Each of them has a slot of its own.
            whole: Whether to send whole tensors instead of changes, because a receiver
                may lack the last version.
            again: Whether to send what was sent last, instead of the present weights.
        """
        results = [self._send(index, whole=whole, again=again) for index in indices]
        return sum(results, SendResult())

    def _send(self, index: int, *, whole: bool, again: bool) -> SendResult:
        import torch

        sender, wire_spec = self._current_wire
        bucket = wire_spec.buckets[index]
        # What never changes is not kept.
        changes = bucket.adapter or not wire_spec.separate_adapter

        shards: Shards | None = None
        if again and changes:
            shards = self._kept_version.shards(index, torch.device(self.context.device))
            assert shards is not None, "a version is kept before a replica needs it"
        if shards is None:
            shards = self.engine.shards(
                bucket.names, separate_adapter=wire_spec.separate_adapter
            )
            if wire_spec.keeps_version and changes:
                shards = self._kept_version.keep(index, shards)
        return sender.send(bucket, shards, whole=whole)

    def finish_sync(self) -> None:
        """Free what one weight sync needed; the wire stays open for the next."""
        self._sender.finish()

    def close(self) -> None:
        """Close the wire and the engine."""
        self._close_wire()
        super().close()

    @property
    def _current_wire(self) -> tuple[Sender, WireSpec]:
        if self._wire is None:
            raise WeightSyncError(
                "the actor has no wire to send weights over: open_wire comes first"
            )
        return self._wire

    @property
    def _sender(self) -> Sender:
        return self._current_wire[0]

    def _close_wire(self) -> None:
        if self._wire is not None:
            sender, _ = self._wire
            sender.close()
            self._wire = None


def _is_fresh(rows: Rollouts, versions: Int64, ages: VersionAges) -> Float32 | None:
    """Return 1 where a token is of the version that learns, float32 [tokens].

    None where all tokens are.

    Args:
        versions: int64 [response tokens], the version that sampled each.
    """
    if not ages.stale_rows:
        return None
    is_fresh = np.zeros(rows.num_tokens, np.float32)
    is_fresh[rows.response_mask] = versions == ages.present
    return is_fresh


def advantages_in_loss(
    algorithm: AlgorithmConfig,
    rows: Rollouts,
    credit: Credit,
    whitening: Moments | None,
) -> Float32:
    """Return the advantages as the loss sees them, float32 [tokens].

    Args:
        algorithm: Settings of the loss.
        rows: Some rows of a step.
        credit: Their credit.
        whitening: As in `ActorWorker.update`.
    """
    advantages = credit.advantages
    if whitening is not None:
        # Whitening moves zeros too, but they stay 0 outside the response mask.
        advantages = whiten(advantages, whitening)
        advantages = np.where(rows.response_mask, advantages, np.float32(0))

    bound = algorithm.advantage_clip
    if bound is None:
        return advantages
    # An infinite advantage shows, instead of becoming the bound.
    is_finite = np.isfinite(advantages)
    return np.where(is_finite, advantages.clip(-bound, bound), advantages)


def _nll_weights(
    algorithm: AlgorithmConfig,
    rows: Rollouts,
    credit: Credit,
    mini_batch: MiniBatch,
    weights: Float32,
) -> Float32 | None:
    """Return the weight of each token's negative log-likelihood beside its row's.

    With the row's weight it is algorithm.positive_nll / tokens of positive rows, so
    that the term is a mean over those, whatever the aggregation.

    Returns:
        float32 [tokens]; None without such a term.
    """
    weight = algorithm.positive_nll
    if weight is None:
        return None

    counts = credit.is_positive & (weights > 0)
    per_token = weight / max(mini_batch.positive_tokens, 1)
    row_values = np.where(counts, per_token / np.where(counts, weights, 1), 0)
    return (row_values[rows.row_of_token] * rows.response_mask).astype(np.float32)
