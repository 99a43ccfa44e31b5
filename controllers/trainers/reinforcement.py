"""Reinforcement learning, one step after another: the driver of PPO, GRPO and their kin.

Invariant: `step` has one commit point, at its end (policy published, cursor advanced, metrics written); everything
before it can be replayed from the last commit with the same result. The driver plans on lengths, ids and scores;
tokens stay where they are. Deliberately not here: start-up and recovery (`training.py`), and any arithmetic on tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from controllers.publishing.publisher import Publisher
from controllers.rollouts.evaluator import Evaluator
from controllers.rollouts.producer import Producer
from controllers.system.build import System
from controllers.trainers.base import Evaluation, MakeTrainer, Task, tell_skipped
from controllers.trainers.preparation import prepare
from controllers.watch import measures
from controllers.watch.gradients import GradientWatch
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from controllers.watch.mismatch import MismatchWatch
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.credit import judge
from verl_ray.algorithms.kl_control import make
from verl_ray.algorithms.objectives import PolicyObjective, ValueObjective
from verl_ray.cluster.calls import Call, look_after, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import no_way_back
from verl_ray.cluster.store import put
from verl_ray.config.algorithm import AlgorithmConfig, ValueLossConfig
from verl_ray.config.roles import TrainedRole
from verl_ray.config.schema import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Credit, Finish, LogProbs, Rollouts, Values
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import TrackingError
from verl_ray.ops.masked import Moments
from verl_ray.profiling.memory import host_used_gib
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import Graded, Shaping
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.curve import reward_curve
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import MiniBatch, UpdateReport
from workers.reference import ReferenceWorker

T = TypeVar("T")

SYNCHRONOUS = 0  # how many policy versions rollouts may be behind


@dataclass(frozen=True)
class Measured:
    """What the models say about the rollouts; None where the algorithm does not ask."""

    old: Sharded[LogProbs] | None
    reference: Sharded[LogProbs] | None
    values: Sharded[Values] | None


class Trainer:
    """The four roles of one run, and the order in which they work."""

    def __init__(self, config: RLConfig, system: System, prompts: PromptSource, evaluator: Evaluator | None) -> None:
        assert system.rollout is not None
        self.config, self.system = config, system
        self.prompts, self.evaluator = prompts, evaluator
        self.kl = make(config.algorithm.kl)
        self.shaping = Shaping(config)
        self.servers = system.rollout
        self.producer = Producer(config, system.rollout, system.graders)
        models = [group for group in (system.actor, system.critic, system.reference) if group is not None]
        shared = config.placement.kind == "colocated" and system.has_gpus
        self.publisher = Publisher(
            system.actor, system.rollout, config, sharing=models if shared else (), has_gpus=system.has_gpus
        )
        self.memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)
        self.buffer = RolloutBuffer(SYNCHRONOUS)
        self.timers = Timers()
        self.policy_version = -1
        self.gradients = GradientWatch(config.run.max_skipped_steps)
        self.mismatch = MismatchWatch(config, self.producer.training().sampling)

    finished = False
    """Reinforcement learning makes all of its steps."""

    def begin(self, done: int) -> None:
        """The replicas draw from the policy as it is."""
        self.publish(done)

    def step(self, number: int) -> Metrics:
        """One training step: produce, measure, assign credit, learn, publish. Returns its metrics."""
        with self.timers("step"):
            self.produce()
            experience = self.buffer.take(self.policy_version)
            rollouts, raw = experience.rollouts, measures.graded(experience.scores)
            aborted = rollouts.row("finish") == Finish.ABORTED
            measured = self.measure(rollouts)
            scores = self.shaping.shape(raw, aborted)
            credit = self.assign_credit(rollouts, scores, measured)
            no_way_back()  # the update begins: a stop waits for the end of the step
            metrics = self.learn(number, rollouts, credit, measured)
            self.memory.ask()  # answered while weights are published
            metrics |= self.publish(number)
            metrics |= self.memory.metrics()
        return metrics | measures.of_scores(self.shaping.weigh(raw), raw, aborted) | self.record(rollouts, credit)

    # ------------------------------------------------------------------------------------ the parts, in order

    def produce(self) -> None:
        """prompts -> generate -> score, each response as soon as it is finished -> buffer."""
        batch = self.prompts.next_batch(self.config.data.prompts_per_step)
        self.buffer.put(self.producer.produce(batch, self.policy_version, self.timers))
        self.publisher.hand_back()

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
            None if old is None else self.await_("old_log_prob", old, asked),
            None if reference is None else self.await_("ref", reference, asked),
            None if values is None else self.await_("values", values, asked),
        )

    def assign_credit(self, rollouts: Sharded[Rollouts], scores: Graded, measured: Measured) -> Sharded[Credit]:
        """Group baselines from the scores, here; everything per token, where the tokens are."""
        algorithm, actor = self.config.algorithm, self.system.actor
        with self.timers("adv"):
            charge = None
            if self.charges_whole_responses:
                kl = self.await_("adv", actor.scatter(
                    ActorWorker.diverge, rollouts, measured.old, measured.reference, algorithm))  # fmt: skip
                charge = (self.kl.coefficient * kl.row("kl")).astype(np.float32)
            rewards = judge(
                algorithm, scores.score, scores.ok, rollouts.row("finish"), rollouts.row("group_id"),
                rollouts.row("trajectory_id"), charge,
            )  # fmt: skip
            return self.await_("adv", actor.scatter(
                ActorWorker.assign_credit, rollouts, put(rewards), measured.old, measured.reference, measured.values,
                algorithm, self.kl.coefficient,
            ))  # fmt: skip

    def learn(self, number: int, rollouts: Sharded[Rollouts], credit: Sharded[Credit], measured: Measured) -> Metrics:
        """Critic and actor updates, in flight together; each optimizer step sees a mini-batch cut here."""
        actor, critic, config = self.system.actor, self.system.critic, self.config
        calls: dict[str, list[Call[list[UpdateReport]]]] = {"critic": [], "actor": []}
        if critic is not None and config.algorithm.value_loss is not None and measured.values is not None:
            value = ValueObjective(config.algorithm.value_loss)
            for rows, about in self.mini_batches(number, config.critic, config.algorithm.value_loss, rollouts, credit):
                calls["critic"].append(critic.scatter(
                    CriticWorker.update, rollouts.select(rows), credit.select(rows), measured.values.select(rows),
                    about, value,
                ))  # fmt: skip
        if number > config.algorithm.critic_warmup_steps:
            policy = PolicyObjective(
                config.algorithm, config.rollout.temperature, self.kl.coefficient, self.mismatch.corrects
            )
            whitening = self.whitening(rollouts, credit)
            for rows, about in self.mini_batches(number, config.actor, config.algorithm, rollouts, credit):
                old, reference = (
                    None if column is None else column.select(rows) for column in (measured.old, measured.reference)
                )
                calls["actor"].append(actor.scatter(
                    ActorWorker.update, rollouts.select(rows), credit.select(rows), old, reference,
                    about, whitening, policy,
                ))  # fmt: skip
        metrics: Metrics = {}
        asked = [call for updates in calls.values() for call in updates]
        for role, updates in calls.items():
            if updates:
                with self.timers(f"update_{role}"), self.timers.waiting():
                    reports = wait_all(updates, partial(look_after, asked))
                self.gradients.see(role, reports)
                metrics |= measures.of_updates(role, reports)
                if role == "actor":  # without old log-probs, later updates say what earlier ones learned, too
                    compared = reports if measured.old is not None else reports[:1]
                    metrics |= measures.of_mismatch([rank.loss for ranks in compared for rank in ranks])
                    self.mismatch.see(number, metrics, reports, self.policy_version)
        if not calls["actor"] and measured.old is not None:  # the critic warms up
            with self.timers.waiting():
                alone = actor.scatter(ActorWorker.compare, rollouts, credit, measured.old).result()
            metrics |= measures.of_mismatch(alone)
            self.mismatch.see(number, metrics, [], self.policy_version)
        if config.algorithm.kl.place != "none":
            metrics |= self._charge(rollouts, credit)
        return metrics

    def publish(self, version: int) -> Metrics:
        """The new policy into every rollout replica, verified, under its version."""
        with self.timers("update_weights"), self.timers.waiting():
            metrics = self.publisher.publish(version)
        self.policy_version = version
        return metrics

    def record(self, rollouts: Sharded[Rollouts], credit: Sharded[Credit]) -> Metrics:
        """The step in numbers."""
        timings = self.timers.take()
        response_tokens = int(rollouts.row("response_length").sum())
        return {
            **measures.of_rollouts(
                rollouts, self.config.data.max_prompt_tokens, self.system.actor.deal(rollouts.lengths)
            ),
            **measures.of_credit(credit, rollouts.row("response_length"), self.whitening(rollouts, credit)),
            **timings,
            **self.servers.take_counts(),
            **measures.per_token_ms(timings, response_tokens, rollouts.num_tokens),
            "perf/time_per_step": timings["timing_s/step"],
            "perf/throughput": rollouts.num_tokens / timings["timing_s/step"] / self.system.devices,
            "perf/cpu_memory_used_gb": host_used_gib(),
            "training/epoch": float(self.prompts.epoch),
        }

    def evaluate(self) -> Evaluation:
        """The present policy on held-out problems."""
        assert self.evaluator is not None
        timers = Timers()  # its own: the step's generation and grading are timed under the same names
        metrics, samples = self.evaluator.evaluate(self.producer, self.policy_version, timers)
        return metrics | {"timing_s/testing": timers.take()["timing_s/testing"]}, samples

    # ------------------------------------------------------------------------------------------------ recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds; the reference is what it was."""
        learning = {"actor": self.system.actor, "critic": self.system.critic}
        return {name: group for name, group in learning.items() if group is not None}

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {
            "cursor": self.prompts.state(),
            "kl": self.kl.state(),
            "shaping": self.shaping.state(),
            "gradients": self.gradients.state(),
            "mismatch": self.mismatch.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.prompts.load_state(state["cursor"])
        self.kl.load_state(state["kl"])
        self.shaping.load_state(state["shaping"])
        self.gradients.load_state(state["gradients"])
        self.mismatch.load_state(state["mismatch"])

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
                    horizon = self.config.algorithm.aggregation_horizon
                    yield rows, MiniBatch(int(tokens.sum()), int(np.count_nonzero(tokens)), loss.aggregation, horizon)

    def whitening(self, rollouts: Sharded[Rollouts], credit: Sharded[Credit]) -> Moments | None:
        """The moments of all advantages of the step, from the sums that each shard told."""
        if not self.config.algorithm.whiten_advantages:
            return None
        counted = credit.row("in_loss")
        tokens = int(rollouts.row("response_length")[counted].sum())
        return measures.moments(credit.row("advantage_statistics")[counted], tokens)

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

    def await_(self, name: str, call: Call[T], beside: Sequence[Call[Any]] = ()) -> T:
        """The answer, with the time spent on it under `name`; calls `beside` it may not stand still meanwhile."""
        with self.timers(name), self.timers.waiting():
            return wait_all([call], partial(look_after, beside))[0]

    def _charge(self, rollouts: Sharded[Rollouts], credit: Sharded[Credit]) -> Metrics:
        """What the divergence cost in this step; the controller then learns of it."""
        coefficient = self.kl.coefficient
        if self.config.algorithm.kl.place == "loss":
            return {"actor/kl_coef": coefficient}
        charge = measures.Charge.of(credit, rollouts.row("response_length"))
        if charge.responses:
            self.kl.update(charge.per_response, charge.responses)
        return charge.metrics(coefficient)


class ReinforcementTask(Task[RLConfig]):
    """`train --config-name ppo | grpo | quickstart`."""

    def prepare(self, session: Session) -> None:
        prepare(self.config, session)

    def read(self, *, trains: bool = True) -> MakeTrainer:
        """The prompts, and the held-out problems."""
        config = self.config
        tokenizer = load_tokenizer(config.actor.model.path)
        prompts = PromptSource(config.data.train_path, tokenizer, config.data, config.run.seed)
        if trains:
            tell_skipped(prompts.skipped, "prompts of the training data are too long")
        evaluator = Evaluator(config, tokenizer) if config.run.evaluate_every or not trains else None
        return lambda system: Trainer(config, system, prompts, evaluator)

    def outputs(self) -> dict[str, str]:
        picture = self.folder / "reward_curve.png"
        try:
            reward_curve(self.folder / "metrics.jsonl", picture)
        except TrackingError as error:  # no score came through: the metrics say so, and the run is done all the same
            print(f"warning: {error}", file=sys.stderr, flush=True)
        return {"reward curve": str(picture)}

    def shortfall(self, before: Metrics, after: Metrics) -> str | None:
        wanted = self.config.prepare
        if wanted is None or not after:
            return None
        gain = min(after[name] - before[name] for name in after if name.startswith(HELD_OUT))
        if gain >= wanted.min_gain:
            return None
        return (
            f"held-out accuracy rose by {gain:.3f}, less than prepare.min_gain = {wanted.min_gain}: "
            "the run did not learn what it should have"
        )

    def next_command(self) -> str:
        made = self.config.prepare is not None
        return "scripts/quickstart algorithm=grpo backend=fsdp" if made else "verl-ray evaluate --help"
