"""The optimizer steps of one training step: their rows, their losses, their calls.

Invariant: which rows go into which optimizer step depends on the run's seed, the number
of the training step and the epoch alone. A loss is divided by the global denominators
of its optimizer step, whatever rows a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from controllers.watch import update_measures
from controllers.watch.measures import Metrics
from verl_ray.algorithms.row_weights import HORIZON
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.columns.batch import Batch, Int64
from verl_ray.columns.packing import assignment_of_units
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Credit, LogProbs, Rollouts, Values
from verl_ray.config.algorithm import AlgorithmConfig, ValueLossConfig
from verl_ray.config.roles import TrainedRole
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.token_versions import OptimizerSteps
from verl_ray.learning.credit import whitening_moments
from verl_ray.learning.objectives import ValueObjective
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import MiniBatch, UpdateReport

B = TypeVar("B", bound=Batch)

UpdateCalls = list[Call[list[UpdateReport]]]
"""One call per optimizer step, each with one report per data-parallel rank."""


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of the models for the rollouts; None where the algorithm needs none."""

    old_log_probs: Sharded[LogProbs] | None
    """Log-probs of the actor before it learns from the rollouts."""
    reference_log_probs: Sharded[LogProbs] | None
    values: Sharded[Values] | None


@dataclass(frozen=True)
class LearnerBatch:
    """Everything that one training step learns from."""

    number: int
    """Number of the training step, from 1."""
    rollouts: Sharded[Rollouts]
    credit: Sharded[Credit]
    outputs: ModelOutputs

    @property
    def learned_groups(self) -> Int64:
        """The ordinal of the group of each row in the loss, int64."""
        groups: Int64 = self.rollouts.row("group_id")
        return groups[self.credit.row("in_loss")]

    @property
    def paired_rows(self) -> Int64:
        """Rows whose groups have a pair, the better one of each first, int64 [rows]."""
        rows = np.flatnonzero(self.credit.row("in_loss"))
        group = self.rollouts.row("group_id")[rows]
        # An advantage is 1 or -1 on every token.
        is_worse = self.credit.row("advantage_statistics")[rows, 0] < 0
        paired: Int64 = rows[np.lexsort((is_worse, group))]
        return paired


def start_critic_updates(
    config: RLConfig,
    critic: WorkerGroup[CriticWorker] | None,
    batch: LearnerBatch,
    optimizer_steps: OptimizerSteps,
) -> UpdateCalls:
    """Start the critic's optimizer steps; none where there is no critic.

    Its rows may be as old as those of the actor, also while the actor does not learn.
    """
    loss = config.algorithm.value_loss
    values = batch.outputs.values
    if critic is None or loss is None or values is None:
        return []

    # The ranks queue the calls: each update starts from the parameters of the last one.
    objective = ValueObjective(loss)
    calls: UpdateCalls = []
    for rows, mini_batch in cut_mini_batches(config, config.critic, loss, batch):
        rollouts = batch.rollouts.select(rows)
        call = critic.scatter(
            CriticWorker.update,
            rollouts,
            batch.credit.select(rows),
            values.select(rows),
            replace(mini_batch, ages=optimizer_steps.ages(len(calls))),
            objective,
            assignment=whole_trajectories(critic, rollouts),
        )
        calls.append(call)
    return calls


def start_actor_updates(
    config: RLConfig,
    actor: WorkerGroup[ActorWorker],
    batch: LearnerBatch,
    objective: PolicyObjective,
    optimizer_steps: OptimizerSteps,
) -> UpdateCalls:
    """Start the actor's optimizer steps; none while only the critic learns."""
    algorithm = config.algorithm
    outputs = batch.outputs
    if batch.number <= algorithm.critic_warmup_steps:
        return []

    # Moments of the whole training step: every mini-batch is whitened in the same way.
    whitening = whitening_moments(algorithm, batch.rollouts, batch.credit)

    calls: UpdateCalls = []
    for rows, mini_batch in cut_mini_batches(config, config.actor, algorithm, batch):
        rollouts = batch.rollouts.select(rows)
        call = actor.scatter(
            ActorWorker.update,
            rollouts,
            batch.credit.select(rows),
            _select(outputs.old_log_probs, rows),
            _select(outputs.reference_log_probs, rows),
            replace(mini_batch, ages=optimizer_steps.ages(len(calls))),
            whitening,
            objective,
            assignment=whole_trajectories(actor, rollouts),
        )
        calls.append(call)
    return calls


def start_pair_updates(
    config: RLConfig,
    actor: WorkerGroup[ActorWorker],
    batch: LearnerBatch,
    reference: Sharded[LogProbs] | None,
    objective: PolicyPreferenceObjective,
    optimizer_steps: OptimizerSteps,
) -> UpdateCalls:
    """Start the actor's optimizer steps on pairs; none where there is no pair.

    Args:
        config: Configuration of the run.
        actor: The actor.
        batch: The training step.
        reference: Log-probs of `batch.paired_rows`; None for a loss without reference.
        objective: The loss of pairs.
        optimizer_steps: Counts of optimizer steps.
    """
    paired = batch.paired_rows
    calls: UpdateCalls = []
    for rows, mini_batch in cut_mini_batches(
        config, config.actor, config.algorithm, batch
    ):
        is_here = np.isin(paired, rows)
        rollouts = batch.rollouts.select(paired[is_here])
        unit = rollouts.row("group_id")
        call = actor.scatter(
            ActorWorker.update_pairs,
            rollouts,
            _select(reference, np.flatnonzero(is_here)),
            replace(mini_batch, ages=optimizer_steps.ages(len(calls))),
            objective,
            assignment=assignment_of_units(actor.partition, rollouts.lengths, unit),
        )
        calls.append(call)
    return calls


def mismatch_of_updates(
    reports: Sequence[Sequence[UpdateReport]],
    outputs: ModelOutputs,
) -> Metrics:
    """Return how far trainer and sampler differ, as the actor's updates report it.

    Args:
        reports: Reports by optimizer step and data-parallel rank.
        outputs: The outputs that the updates read.
    """
    # Without old log-probs an update compares its fresh log-probs. From the second
    # update on these also hold what earlier updates learned.
    if outputs.old_log_probs is None:
        reports = reports[:1]
    losses = [report.loss for ranks in reports for report in ranks]
    return update_measures.step_mismatch_metrics(losses)


def cut_mini_batches(
    config: RLConfig,
    role: TrainedRole,
    loss: AlgorithmConfig | ValueLossConfig,
    batch: LearnerBatch,
) -> Iterator[tuple[Int64, MiniBatch]]:
    """Yield the rows of each optimizer step, and the global denominators of its loss.

    A trajectory is never cut: sizes count trajectories, which are shuffled where there
    is more than one optimizer step, see `shuffled_units`. A mini-batch without a row to
    learn from is left out: momentum alone would move the parameters.

    Args:
        config: Configuration of the run.
        role: Settings of the role that learns.
        loss: Settings of its loss, which say how it is aggregated.
        batch: The training step.

    Yields:
        Row numbers, int64 [rows of the mini-batch], and what the loss must know of the
        whole mini-batch.
    """
    # The number of each row's trajectory, int64 [rows].
    trajectories, trajectory = np.unique(
        batch.rollouts.row("trajectory_id"), return_inverse=True
    )
    count = len(trajectories)
    size = role.mini_batch_size or count

    # Response tokens of each row that are learned from, [rows].
    response_length = batch.rollouts.row("response_length")
    learned_tokens = np.where(batch.credit.row("in_loss"), response_length, 0)
    is_positive = batch.credit.row("is_positive")

    # Only some aggregations use this setting; for the others it is None.
    horizon: int | None = getattr(config.algorithm, HORIZON.name)

    for epoch in range(role.epochs):
        place = np.arange(count)
        if size < count or role.epochs > 1:
            random = np.random.default_rng([config.run.seed, batch.number, epoch])
            place = shuffled_places(shuffled_units(config, batch.rollouts), random)
        order = np.argsort(place[trajectory], kind="stable")
        step = place[trajectory][order] // size

        for number in range(-(-count // size)):
            rows = order[step == number]
            tokens = learned_tokens[rows]
            if not tokens.any():
                continue

            mini_batch = MiniBatch(
                total_tokens=int(tokens.sum()),
                total_trajectories=len(np.unique(trajectory[rows[tokens > 0]])),
                aggregation=loss.aggregation,
                horizon=horizon,
                positive_tokens=int(tokens[is_positive[rows]].sum()),
                seed=(config.run.seed, batch.number, epoch, number * size),
            )
            yield rows, mini_batch


def shuffled_units(config: RLConfig, rollouts: Sharded[Rollouts]) -> Int64:
    """Return the unit that each trajectory is shuffled with, int64 [trajectories].

    Of episodes and pairs it is the group. A group is then cut only where the size of
    mini-batches is no multiple of its own, which is refused where a loss compares
    pairs. Other single responses are shuffled one by one.
    """
    trajectories, first_row = np.unique(
        rollouts.row("trajectory_id"), return_index=True
    )
    if config.episodes is None and config.preference is None:
        return trajectories
    group: Int64 = rollouts.row("group_id")[first_row]
    return group


def shuffled_places(unit: Int64, random: np.random.Generator) -> Int64:
    """Return the place of each item in a random order of the units, int64 [items].

    The items of a unit stay adjacent, in their order.

    Args:
        unit: int64 [items], the unit of each item.
        random: Where the order comes from.
    """
    units, number = np.unique(unit, return_inverse=True)
    place_of_unit = np.argsort(random.permutation(len(units)))
    return np.argsort(np.argsort(place_of_unit[number], kind="stable"))


def whole_trajectories(
    role: WorkerGroup[Any], rollouts: Sharded[Rollouts]
) -> list[Int64] | None:
    """Return the row numbers of each data-parallel rank, in whole trajectories.

    None where every trajectory is one row, which any assignment keeps whole.
    """
    trajectory = rollouts.row("trajectory_id")
    if len(np.unique(trajectory)) == len(trajectory):
        return None
    return assignment_of_units(role.partition, rollouts.lengths, trajectory)


def _select(batch: Sharded[B] | None, rows: Int64) -> Sharded[B] | None:
    """Return these rows of a batch, or None where there is no batch."""
    if batch is None:
        return None
    return batch.select(rows)
