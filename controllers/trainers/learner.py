"""The learning half of a reinforcement learning step: from rollouts to updates.

The order is: compute log-probs and values, assign credit, update the models.

Invariant: the driver handles only lengths, ids and scores. Token data stays on the
workers and in the object store. Which rows go into which optimizer step is decided in
`updates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from controllers.system.build import System
from controllers.trainers.updates import (
    LearnerBatch,
    ModelOutputs,
    UpdateCalls,
    mismatch_of_updates,
    start_actor_updates,
    start_critic_updates,
    start_pair_updates,
    whole_trajectories,
)
from controllers.watch import measures, update_measures
from controllers.watch.gradients import GradientWatch
from controllers.watch.measures import Metrics
from controllers.watch.mismatch_limit import MismatchWatch
from controllers.watch.token_ages import age_metrics
from verl_ray.agents.contract import End, Treatment
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.agent_baselines import AgentBaselines
from verl_ray.algorithms.estimators import (
    AgentBaseline,
    GroupTokenBaseline,
    ResponseColumns,
)
from verl_ray.algorithms.groups import is_last_of_group
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.restarts import Pending
from verl_ray.cluster.waiting import Background, put
from verl_ray.columns.packing import assignment_of_units
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    Credit,
    Float32,
    LogProbs,
    Rollouts,
    Values,
    last_rows,
)
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.token_versions import OptimizerSteps
from verl_ray.data.tokenizers import tokens_to_compare
from verl_ray.learning.coefficients import EntropyControl, make_kl_controller
from verl_ray.learning.credit import response_rewards
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from verl_ray.ops.outputs import TopTokens
from verl_ray.profiling.phases import Timers, phase
from verl_ray.rewards.shaping import ResponseScores, turn_weights
from verl_ray.rewards.teacher import ServerNeeds
from verl_ray.rollout.requests import Sampling
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import ReferenceWorker, UpdateReport
from workers.teacher_context import TeacherContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Learner:
    """Turns one step's rollouts into updates of actor and critic."""

    def __init__(
        self,
        config: RLConfig,
        system: System,
        sampling: Sampling,
        timers: Timers,
        background: Background,
        num_tokens: int,
    ) -> None:
        """Start from the configuration; `load_state` continues from a checkpoint.

        Args:
            config: Configuration of the run.
            system: Its processes.
            sampling: How the rollouts are sampled.
            timers: Timers of the step, which record the waits for models.
            background: Work that is advanced while models are waited for.
            num_tokens: Number of tokens of the actor's tokenizer.
        """
        self.config = config
        self.system = system
        self.timers = timers
        self.kl = make_kl_controller(config.algorithm.kl)
        self.entropy = EntropyControl(config.algorithm)
        self.agent_baselines = AgentBaselines()
        self.gradients = GradientWatch(config.run.max_skipped_steps)
        # Sampling parameters are among the causes of a mismatch that the watch names.
        self.mismatch = MismatchWatch(config, sampling)
        self.optimizer_steps = OptimizerSteps(
            config.oldest_age,
            config.actor.updates_per_step(config.rows_per_step),
        )
        self._background = background
        # A teacher's vocabulary may go on behind that of the tokenizer.
        self._top: TopTokens | None = None
        self._context: TeacherContext | None = None
        distill = config.distill
        if distill is not None and distill.num_top:
            self._top = TopTokens(distill.num_top, num_tokens)
        if distill is not None and distill.teacher_prompt is not None:
            self._context = TeacherContext(
                distill.teacher_prompt,
                distill.max_prompt_tokens,
                config.data,
                config.actor.model.folder,
            )
        self._step = 0

    def require_teacher(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that each rank of the actor reaches the servers of a teacher, if any.

        Args:
            tokenizer: The tokenizer of the actor.

        Raises:
            ConfigError: One is not there, or does not fit the run.
        """
        distill = self.config.distill
        if distill is None or not distill.services or not self.system.learns:
            return
        text, tokens = tokens_to_compare(tokenizer)
        needs = ServerNeeds(text, tokens, self._top, self.config.longest_row[0])
        call = self.system.actor.broadcast(
            ActorWorker.require_teacher, distill.services, needs
        )
        with phase("asking the teacher's server"):
            self._wait([call])

    # ------------------------------------------------------------- log-probs and values

    def compute_log_probs_and_values(
        self, number: int, rollouts: Sharded[Rollouts]
    ) -> ModelOutputs:
        """Compute old and reference log-probs and values, at the same time.

        Args:
            number: Number of the training step, from 1.
            rollouts: All rollouts of the step.
        """
        self._step = number
        system = self.system
        algorithm = self.config.algorithm
        temperature = self.config.rollout.temperature

        old_log_probs: Call[Sharded[LogProbs]] | None = None
        if self.needs_old_log_probs:
            old_log_probs = system.actor.scatter(
                ActorWorker.compute_log_probs,
                rollouts,
                temperature,
                algorithm.entropy_share is not None,
                ADVANTAGES[algorithm.advantage].reads_probabilities,
            )

        # Of pairs, which scores decide, the reference says something later.
        reference_log_probs: Pending[Sharded[LogProbs]] | None = None
        if self.config.preference is None:
            reference_log_probs = self._call_reference(number, rollouts)
        values: Call[Sharded[Values]] | None = None
        if system.critic is not None:
            values = system.critic.scatter(CriticWorker.compute_values, rollouts)

        # Each wait watches all calls, so that a stall of any of them is noticed.
        calls: list[Pending[Any]] = [
            call
            for call in (old_log_probs, reference_log_probs, values)
            if call is not None
        ]
        return ModelOutputs(
            old_log_probs=self._wait_if_called("old_log_prob", old_log_probs, calls),
            reference_log_probs=self._wait_if_called("ref", reference_log_probs, calls),
            values=self._wait_if_called("values", values, calls),
        )

    def _call_reference(
        self, number: int, rollouts: Sharded[Rollouts]
    ) -> Pending[Sharded[LogProbs]] | None:
        """Ask the reference or teacher for log-probs; None where there is none."""
        config, distill = self.config, self.config.distill
        temperature, top, context = config.rollout.temperature, self._top, self._context
        actor, reference = self.system.actor, self.system.reference
        if distill is not None and distill.services:
            method = ActorWorker.ask_teacher
            return actor.scatter(method, rollouts, distill.services, top, context)
        if reference is not None:
            # A lost reference may start again beside the others, which go on.
            return self.system.restarts.call(
                reference,
                lambda: reference.scatter(
                    ReferenceWorker.compute_reference_log_probs,
                    rollouts,
                    temperature,
                    False,
                    top,
                    context,
                ),
                number,
            )
        # The actor is the reference: itself, its average, or without its adapter.
        own_teacher = None if distill is None else distill.own_teacher
        if own_teacher is None and not config.reference_is_base:
            return None
        return actor.scatter(
            ActorWorker.compute_reference_log_probs,
            rollouts,
            temperature,
            own_teacher is None,
            top,
            context,
            own_teacher == "average",
        )

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the actor computes log-probs before it learns."""
        return self.config.needs_old_log_probs(corrects=self.mismatch.corrects)

    # --------------------------------------------------------------------------- credit

    def assign_credit(
        self, rollouts: Sharded[Rollouts], scores: ResponseScores, outputs: ModelOutputs
    ) -> Sharded[Credit]:
        """Turn scores into rewards, and rewards into advantages and returns.

        Rewards per response and baselines of rows are computed here, from one number
        per row; everything per token is computed where the tokens are.

        Args:
            rollouts: All rollouts of the step.
            scores: The rewards of their trajectories.
            outputs: What the models computed for them.
        """
        algorithm = self.config.algorithm
        actor = self.system.actor
        kl_coefficient = self.kl.coefficient
        # That of a trajectory stands on the last of its rows.
        scores = scores.on_rows(last_rows(rollouts.row("trajectory_id")))

        # A KL penalty per token is applied on the ranks, with the credit.
        charge = None
        if algorithm.charges_whole_responses:
            charge = (kl_coefficient, self._response_divergences(rollouts, outputs))

        # The responses of a group are on several ranks; only the driver has the scores
        # of all of them.
        columns = response_columns(rollouts, self.config)
        graded = scores.as_graded
        rewards = response_rewards(
            algorithm, scores.score, scores.ok, columns, charge, scores.parts, graded
        )

        estimator = ADVANTAGES[algorithm.advantage]
        if isinstance(estimator, AgentBaseline):
            settings = estimator.settings(algorithm)
            agents = self._agents(rollouts)
            rewards = self.agent_baselines.with_advantages(
                estimator, settings, rewards, columns, agents
            )

        # Credit goes on from row to row of a trajectory, so that is on one rank.
        assignment = whole_trajectories(actor, rollouts)
        # Baselines of tokens compare the tokens of a group, and so is that.
        if isinstance(estimator, GroupTokenBaseline):
            group = rollouts.row("group_id")
            assignment = assignment_of_units(actor.partition, rollouts.lengths, group)
        call = actor.scatter(
            ActorWorker.compute_credit,
            rollouts,
            put(rewards),
            outputs.old_log_probs,
            outputs.reference_log_probs,
            outputs.values,
            algorithm,
            kl_coefficient,
            turn_weights(self.config),
            assignment=assignment,
        )
        return self._wait_for("adv", call)

    def _agents(self, rollouts: Sharded[Rollouts]) -> list[str]:
        """Return the name of each row's agent, which is its data source."""
        actor = self.system.actor
        assignment = actor.partition(rollouts.lengths)
        call = actor.scatter(ActorWorker.data_sources, rollouts, assignment=assignment)
        rank_results = self._wait_for("adv", call)
        sources = np.array([name for names in rank_results for name in names], object)
        in_order = np.empty_like(sources)
        in_order[np.concatenate(assignment)] = sources
        return list(in_order)

    def _response_divergences(
        self, rollouts: Sharded[Rollouts], outputs: ModelOutputs
    ) -> Float32:
        """Return the divergence of each response from the reference, float32 [rows]."""
        call = self.system.actor.scatter(
            ActorWorker.compute_divergence,
            rollouts,
            outputs.old_log_probs,
            outputs.reference_log_probs,
            self.config.algorithm,
        )
        divergence: Float32 = self._wait_for("adv", call).row("kl")
        return divergence

    # --------------------------------------------------------------------------- update

    def update_models(
        self,
        batch: LearnerBatch,
        policy_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Metrics:
        """Update critic and actor at the same time; return the metrics of the updates.

        Args:
            batch: What the training step learns from.
            policy_version: The version of the policy that learns.
            meanwhile: Work of the driver, timed as the updates that go on.
        """
        config = self.config
        number, outputs = batch.number, batch.outputs
        metrics: Metrics = {}

        # Both are in flight before either is waited for.
        critic_updates = start_critic_updates(
            config, self.system.critic, batch, self.optimizer_steps
        )
        actor_updates = self._start_actor_updates(batch)
        updates = [*critic_updates, *actor_updates]
        if meanwhile is not None:
            role = "critic" if critic_updates else "actor"
            with self._updating(role) if updates else nullcontext():
                meanwhile()

        if critic_updates:
            reports = self._wait_for_updates("critic", critic_updates, updates)
            metrics |= update_measures.update_metrics("critic", reports)

        if actor_updates:
            reports = self._wait_for_updates("actor", actor_updates, updates)
            metrics |= update_measures.update_metrics("actor", reports)
            metrics |= self.entropy.update(metrics)
            metrics |= mismatch_of_updates(reports, outputs)
            metrics |= age_metrics(reports, policy_version, config.oldest_age)
            self.mismatch.observe(number, metrics, reports, policy_version)
            self.optimizer_steps.add(len(actor_updates))
        elif outputs.old_log_probs is not None:
            # While the critic warms up the actor is not updated, so the sampler is
            # compared with the old log-probs.
            metrics |= self._mismatch_without_update(
                batch.rollouts, batch.credit, outputs.old_log_probs
            )
            self.mismatch.observe(number, metrics, [], policy_version)

        if config.algorithm.kl.place != "none":
            metrics |= self._kl_metrics(batch.rollouts, batch.credit)
        return metrics

    def _start_actor_updates(self, batch: LearnerBatch) -> UpdateCalls:
        """Start the actor's optimizer steps."""
        config, actor = self.config, self.system.actor
        if config.preference is None:
            return start_actor_updates(
                config, actor, batch, self._policy_objective, self.optimizer_steps
            )

        reference: Sharded[LogProbs] | None = None
        if len(batch.paired_rows):
            pairs = batch.rollouts.select(batch.paired_rows)
            call = self._call_reference(batch.number, pairs)
            reference = self._wait_if_called("ref", call, [call] if call else [])
        objective = PolicyPreferenceObjective(
            config.preference, config.rollout.temperature
        )
        return start_pair_updates(
            config, actor, batch, reference, objective, self.optimizer_steps
        )

    @property
    def _policy_objective(self) -> PolicyObjective:
        """The actor's loss as the step begins."""
        return PolicyObjective(
            self.config.algorithm,
            self.config.rollout.temperature,
            self.kl.coefficient,
            self.mismatch.corrects,
            self.entropy.coefficient,
            distill=self.config.distill,
        )

    # -------------------------------------------------------------------------- metrics

    @contextmanager
    def _updating(self, role: str) -> Iterator[None]:
        """Time the block as the updates of a role, which the driver waits for."""
        with self.timers(f"update_{role}"), self.timers.waiting():
            yield

    def _wait_for_updates(
        self,
        role: str,
        calls: UpdateCalls,
        watched: UpdateCalls,
    ) -> list[list[UpdateReport]]:
        """Return the reports of a role's updates, by optimizer step and rank."""
        with self._updating(role):
            reports = self._wait(calls, watched)
        self.gradients.observe(role, self._step, reports)
        return reports

    def _mismatch_without_update(
        self,
        rollouts: Sharded[Rollouts],
        credit: Sharded[Credit],
        old_log_probs: Sharded[LogProbs],
    ) -> Metrics:
        """Return the mismatch of sampler and trainer without actor updates."""
        call = self.system.actor.scatter(
            ActorWorker.compute_mismatch, rollouts, credit, old_log_probs
        )
        (losses,) = self._wait([call])
        return update_measures.step_mismatch_metrics(losses)

    def _kl_metrics(
        self,
        rollouts: Sharded[Rollouts],
        credit: Sharded[Credit],
    ) -> Metrics:
        """Return the KL metrics of this step.

        With a KL penalty in the reward, this also updates the KL controller.
        """
        # The metrics show the coefficient that this step used.
        coefficient = self.kl.coefficient
        if self.config.algorithm.kl.place == "loss":
            return {"actor/kl_coef": coefficient}

        # The controller acts on what was measured in this step, from the next one on.
        divergence = measures.ReferenceDivergence.of(
            credit, rollouts.row("response_length"), rollouts.row("trajectory_id")
        )
        if divergence.responses:
            self.kl.update(divergence.per_response, divergence.responses)
        return divergence.metrics(coefficient)

    # ------------------------------------------------------------------------- recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds, by name.

        The reference never changes, so it is not one of them.
        """
        groups: dict[str, WorkerGroup[Any]] = {"actor": self.system.actor}
        if self.system.critic is not None:
            groups["critic"] = self.system.critic
        return groups

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, which JSON can hold."""
        return {
            "kl": self.kl.state(),
            "entropy": self.entropy.state(),
            "agents": self.agent_baselines.state(),
            "gradients": self.gradients.state(),
            "mismatch": self.mismatch.state(),
            "optimizer_steps": self.optimizer_steps.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.kl.load_state(state["kl"])
        # Checkpoints of earlier versions have none.
        self.entropy.load_state(state.get("entropy", {}))
        self.agent_baselines.load_state(state.get("agents", {}))
        self.gradients.load_state(state["gradients"])
        self.mismatch.load_state(state["mismatch"])
        # Checkpoints of earlier versions are of synchronous runs, which need no counts.
        if "optimizer_steps" in state:
            self.optimizer_steps.load_state(state["optimizer_steps"])

    # -------------------------------------------------------------------------- waiting

    def _wait_if_called(
        self, timer: str, call: Pending[T] | None, watched: Sequence[Pending[Any]]
    ) -> T | None:
        """Return the result of a call, or None where there is none."""
        if call is None:
            return None
        return self._wait_for(timer, call, watched)

    def _wait_for(
        self, timer: str, call: Pending[T], watched: Sequence[Pending[Any]] = ()
    ) -> T:
        """Return the result of a call; record the time of the wait under `timer`."""
        with self.timers(timer), self.timers.waiting():
            watch = partial(self.system.restarts.check, watched, self._step)
            return call.result(watch, self._background)

    def _wait(
        self,
        calls: Sequence[Call[T]],
        watched: Sequence[Call[Any]] = (),
    ) -> list[T]:
        """Return the results of calls, in order; advance the background meanwhile.

        Args:
            calls: The calls to wait for.
            watched: Further calls that must make progress meanwhile.

        Raises:
            DeadlineExceeded: One of these calls makes no progress.
        """
        with self.timers.waiting():
            watch = partial(self.system.restarts.check, watched, self._step)
            return wait_all(calls, watch, self._background)


def response_columns(rollouts: Sharded[Rollouts], config: RLConfig) -> ResponseColumns:
    """Return the columns of some rollouts."""
    group_size = config.rollout.group_size
    is_masked = None
    if config.episodes is not None:
        treatments = config.episodes.treatments
        # The last one is that of single responses.
        masks = [*(treatments[end] is Treatment.MASK for end in End), False]
        is_masked = np.array(masks)[rollouts.row("end")]
    return ResponseColumns(
        finish=rollouts.row("finish"),
        group_id=rollouts.row("group_id"),
        trajectory_id=rollouts.row("trajectory_id"),
        length=rollouts.row("response_length"),
        is_last=is_last_of_group(rollouts.row("trajectory_id"), group_size),
        is_masked=is_masked,
    )
