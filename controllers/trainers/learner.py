"""What a step of reinforcement learning makes of rollouts: measure, assign credit, learn.

Invariant: which rows go into which optimizer step depends on the run's seed and the step's number alone; a loss sees
one optimizer step's global denominators, whatever rows a rank has. The driver plans on lengths, ids and scores; tokens
stay where they are. Deliberately not here: where rollouts come from (`controllers/rollouts`), and any arithmetic on
tokens (`workers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from controllers.system.build import System
from controllers.watch import measures
from controllers.watch.gradients import GradientWatch
from controllers.watch.measures import Metrics
from controllers.watch.mismatch import MismatchWatch
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.credit import judge
from verl_ray.algorithms.kl_control import make
from verl_ray.algorithms.objectives import PolicyObjective, ValueObjective
from verl_ray.algorithms.row_weights import HORIZON
from verl_ray.cluster.calls import Call, look_after, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.store import put
from verl_ray.cluster.waiting import Background
from verl_ray.config.algorithm import AlgorithmConfig, ValueLossConfig
from verl_ray.config.roles import TrainedRole
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Credit, LogProbs, Rollouts, Values
from verl_ray.ops.masked import Moments
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import Graded
from verl_ray.rollout.requests import Sampling
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import MiniBatch, UpdateReport
from workers.reference import ReferenceWorker

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """What the models say about the rollouts; None where the algorithm does not ask."""

    old: Sharded[LogProbs] | None
    reference: Sharded[LogProbs] | None
    values: Sharded[Values] | None


class Learner:
    """The roles that learn, and the reference: one step's rollouts into updates."""

    def __init__(
        self, config: RLConfig, system: System, sampling: Sampling, timers: Timers, background: Background
    ) -> None:
        """`sampling`: how the rollouts are drawn; `background`: advanced while the models are waited for."""
        self.config, self.system = config, system
        self.timers = timers
        self.kl = make(config.algorithm.kl)
        self.gradients = GradientWatch(config.run.max_skipped_steps)
        self.mismatch = MismatchWatch(config, sampling)
        self._background = background

    def measure(self, rollouts: Sharded[Rollouts]) -> Measured:
        """Old log-probs, reference log-probs and values, in flight together."""
        system, temperature = self.system, self.config.rollout.temperature
        old = reference = values = None
        if self.needs_old_log_probs:
            old = system.actor.scatter(ActorWorker.compute_log_probs, rollouts, temperature)
        if system.reference is not None:
            reference = system.reference.scatter(ReferenceWorker.compute_log_probs, rollouts, temperature)
        elif self.config.reference_is_base:
            reference = system.actor.scatter(ActorWorker.compute_base_log_probs, rollouts, temperature)
        if system.critic is not None:
            values = system.critic.scatter(CriticWorker.compute_values, rollouts)
        asked = [call for call in (old, reference, values) if call is not None]
        return Measured(
            None if old is None else self._await("old_log_prob", old, asked),
            None if reference is None else self._await("ref", reference, asked),
            None if values is None else self._await("values", values, asked),
        )

    def assign_credit(self, rollouts: Sharded[Rollouts], scores: Graded, measured: Measured) -> Sharded[Credit]:
        """Group baselines from the scores, here; everything per token, where the tokens are."""
        algorithm, actor = self.config.algorithm, self.system.actor
        with self.timers("adv"):
            charge = None
            if self.charges_whole_responses:
                kl = self._await("adv", actor.scatter(
                    ActorWorker.diverge, rollouts, measured.old, measured.reference, algorithm))  # fmt: skip
                charge = (self.kl.coefficient * kl.row("kl")).astype(np.float32)
            rewards = judge(
                algorithm, scores.score, scores.ok, rollouts.row("finish"), rollouts.row("group_id"),
                rollouts.row("trajectory_id"), charge,
            )  # fmt: skip
            return self._await("adv", actor.scatter(
                ActorWorker.assign_credit, rollouts, put(rewards), measured.old, measured.reference, measured.values,
                algorithm, self.kl.coefficient,
            ))  # fmt: skip

    def learn(
        self,
        number: int,
        rollouts: Sharded[Rollouts],
        credit: Sharded[Credit],
        measured: Measured,
        policy_version: int,
    ) -> Metrics:
        """Critic and actor updates, in flight together; each optimizer step sees a mini-batch cut here.

        `number`: of the training step, from 1; `policy_version`: the version that learns.
        """
        updates = {
            "critic": self._update_critic(number, rollouts, credit, measured),
            "actor": self._update_actor(number, rollouts, credit, measured),
        }
        asked = [call for calls in updates.values() for call in calls]
        metrics: Metrics = {}
        for role, calls in updates.items():
            if not calls:
                continue
            with self.timers(f"update_{role}"):
                reports = self._wait(calls, asked)
            self.gradients.see(role, reports)
            metrics |= measures.of_updates(role, reports)
            if role == "actor":  # without old log-probs, later updates say what earlier ones learned, too
                compared = reports if measured.old is not None else reports[:1]
                metrics |= measures.of_mismatch([rank.loss for ranks in compared for rank in ranks])
                self.mismatch.see(number, metrics, reports, policy_version)

        if not updates["actor"] and measured.old is not None:  # the critic warms up
            compare = self.system.actor.scatter(ActorWorker.compare, rollouts, credit, measured.old)
            metrics |= measures.of_mismatch(self._wait([compare])[0])
            self.mismatch.see(number, metrics, [], policy_version)
        if self.config.algorithm.kl.place != "none":
            metrics |= self._charge(rollouts, credit)
        return metrics

    def _update_critic(
        self, number: int, rollouts: Sharded[Rollouts], credit: Sharded[Credit], measured: Measured
    ) -> list[Call[list[UpdateReport]]]:
        critic, loss = self.system.critic, self.config.algorithm.value_loss
        if critic is None or loss is None or measured.values is None:
            return []
        objective = ValueObjective(loss)
        return [
            critic.scatter(
                CriticWorker.update, rollouts.select(rows), credit.select(rows), measured.values.select(rows),
                about, objective,
            )
            for rows, about in self.mini_batches(number, self.config.critic, loss, rollouts, credit)
        ]  # fmt: skip

    def _update_actor(
        self, number: int, rollouts: Sharded[Rollouts], credit: Sharded[Credit], measured: Measured
    ) -> list[Call[list[UpdateReport]]]:
        """None while only the critic learns."""
        config, actor = self.config, self.system.actor
        if number <= config.algorithm.critic_warmup_steps:
            return []
        corrects, temperature = self.mismatch.corrects, config.rollout.temperature
        objective = PolicyObjective(config.algorithm, temperature, self.kl.coefficient, corrects)
        whitening = self.whitening(rollouts, credit)
        calls = []
        for rows, about in self.mini_batches(number, config.actor, config.algorithm, rollouts, credit):
            old = None if measured.old is None else measured.old.select(rows)
            reference = None if measured.reference is None else measured.reference.select(rows)
            calls.append(actor.scatter(
                ActorWorker.update, rollouts.select(rows), credit.select(rows), old, reference,
                about, whitening, objective,
            ))  # fmt: skip
        return calls

    def _charge(self, rollouts: Sharded[Rollouts], credit: Sharded[Credit]) -> Metrics:
        """What the divergence cost in this step; the controller then learns of it."""
        coefficient = self.kl.coefficient
        if self.config.algorithm.kl.place == "loss":
            return {"actor/kl_coef": coefficient}
        charge = measures.Charge.of(credit, rollouts.row("response_length"))
        if charge.responses:
            self.kl.update(charge.per_response, charge.responses)
        return charge.metrics(coefficient)

    # -------------------------------------------------------------------------------------------- mini-batches

    def mini_batches(
        self,
        number: int,
        role: TrainedRole,
        loss: AlgorithmConfig | ValueLossConfig,
        rollouts: Sharded[Rollouts],
        credit: Sharded[Credit],
    ) -> Iterator[tuple[Int64, MiniBatch]]:
        """The rows of each optimizer step of this training step, shuffled where there is more than one, and the
        global denominators of its loss. Rows of which nothing is learned make no step: momentum alone would move it.
        """
        count = len(rollouts)
        size = role.mini_batch_size or count
        counted = np.where(credit.row("in_loss"), rollouts.row("response_length"), 0)
        for epoch in range(role.epochs):
            order = np.arange(count)
            if size < count or role.epochs > 1:
                order = np.random.default_rng([self.config.run.seed, number, epoch]).permutation(count)
            for start in range(0, count, size):
                rows = order[start : start + size]
                tokens = counted[rows]
                if tokens.any():
                    horizon: int | None = getattr(self.config.algorithm, HORIZON.name)
                    yield rows, MiniBatch(int(tokens.sum()), int(np.count_nonzero(tokens)), loss.aggregation, horizon)

    def whitening(self, rollouts: Sharded[Rollouts], credit: Sharded[Credit]) -> Moments | None:
        """The moments of all advantages of the step, from the sums that each shard told."""
        if not self.config.algorithm.whiten_advantages:
            return None
        counted = credit.row("in_loss")
        tokens = int(rollouts.row("response_length")[counted].sum())
        return measures.moments(credit.row("advantage_statistics")[counted], tokens)

    # ------------------------------------------------------------------------------------------------ recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds; the reference is what it was."""
        learning = {"actor": self.system.actor, "critic": self.system.critic}
        return {name: group for name, group in learning.items() if group is not None}

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {"kl": self.kl.state(), "gradients": self.gradients.state(), "mismatch": self.mismatch.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.kl.load_state(state["kl"])
        self.gradients.load_state(state["gradients"])
        self.mismatch.load_state(state["mismatch"])

    # ------------------------------------------------------------------------------------------------- details

    @property
    def needs_old_log_probs(self) -> bool:
        """One update per batch makes the old log-probs equal to the fresh ones, and in the two-policy form the
        sampler's take their place; the reward's divergence needs them all the same."""
        config = self.config
        actor, rows = config.actor, config.data.prompts_per_step * config.rollout.group_size
        several = actor.epochs > 1 or (actor.mini_batch_size or rows) < rows
        replaced = self.mismatch.corrects and config.algorithm.correction.form == "two_policy"
        return (several and not replaced) or config.algorithm.kl.place == "reward"

    @property
    def charges_whole_responses(self) -> bool:
        """A group baseline compares whole responses, so the divergence is taken from their rewards first."""
        algorithm = self.config.algorithm
        return algorithm.kl.place == "reward" and ADVANTAGES[algorithm.advantage].needs_group

    def _await(self, name: str, call: Call[T], beside: Sequence[Call[Any]] = ()) -> T:
        """The answer, with the time spent on it under `name`; calls `beside` it may not stand still meanwhile."""
        with self.timers(name):
            return self._wait([call], beside)[0]

    def _wait(self, calls: Sequence[Call[T]], beside: Sequence[Call[Any]] = ()) -> list[T]:
        with self.timers.waiting():
            return wait_all(calls, partial(look_after, beside), self._background)
