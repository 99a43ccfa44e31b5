"""Reinforcement learning, step by step: the driver of PPO, GRPO and related algorithms.

Invariant: `step` commits nothing. The loop commits it after it has returned, so an
interrupted step is replayed from the last commit with the same result. A producer fills
a buffer with scored groups, a learner learns from what is taken out of the buffer, and
the replicas receive what was learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controllers.rollouts.evaluator import Evaluator
from controllers.rollouts.producer import Producer
from controllers.rollouts.score_failures import TooManyFailures
from controllers.rollouts.supply import RolloutsBetweenSteps, Supply, SupplyMemory
from controllers.system.build import System
from controllers.trainers.base import (
    Resumable,
    StateFiles,
    Task,
    Trainable,
    warn_skipped,
)
from controllers.trainers.learner import Learner
from controllers.trainers.updates import LearnerBatch
from controllers.watch import step_measures
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from controllers.watch.rollout_record import LearnedRollouts, RolloutRecord
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import pass_point_of_no_return
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Credit, Prompts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.learning.credit import whitening_moments
from verl_ray.profiling.phases import PHASES, Timers, phase
from verl_ray.report.evidence import NUM_EXAMPLES
from verl_ray.rewards.shaping import Rewards, Shaping
from verl_ray.tracking.history import TESTING
from workers.generation import EVALUATION, TRAINING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Trainer:
    """Runs the training steps of one reinforcement learning run."""

    finished = False
    """Always False: the run never ends before run.total_steps."""

    def __init__(
        self,
        config: RLConfig,
        system: System,
        prompts: PromptSource,
        evaluator: Evaluator | None,
        num_held_out: int = 0,
        record: RolloutRecord | None = None,
    ) -> None:
        """Connect the parts of a step.

        Args:
            num_held_out: Number of problems that `evaluator` takes its own from.
            record: Where rollouts are kept for people to read; None keeps none.
        """
        assert system.rollout is not None
        self.config = config
        self.system = system
        self.prompts = prompts
        self.evaluator = evaluator
        self.num_held_out = num_held_out
        self.rollout_record = record
        self.timers = Timers()

        self.replicas = system.rollout
        producer = Producer(config, self.replicas, system.graders, system.restarts)
        self.supply = Supply(config, prompts, producer)
        self.background = RolloutsBetweenSteps(self.supply)
        self.shaping = Shaping(config)

        # The producer is the background of the learner: while models are waited for, it
        # passes on what the replicas have finished.
        sampling = producer.training_generation().sampling
        self.learner = Learner(
            config,
            system,
            sampling,
            self.timers,
            background=producer,
            num_tokens=len(prompts.tokenizer),
        )

        self.memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)
        self.policy_version = -1

    def begin(self, done: int) -> None:
        """Publish the policy as it is after `done` steps, so that replicas use it.

        Raises:
            ConfigError: The server of a teacher is not there, or reads other tokens.
        """
        self.learner.require_teacher(self.prompts.tokenizer)
        self.supply.begin(done)
        self.publish(done)

    def step(self, number: int) -> Metrics:
        """Run training step `number`, counted from 1. Return its metrics.

        produce -> compute log-probs and values -> assign credit -> update the models
        -> publish
        """
        # What came between the steps is no part of this one.
        self.replicas.occupancy.take()

        with self.timers("step"):
            generated = self.produce()
            # Groups of earlier steps may take the place of some.
            experience = self.supply.with_replayed(generated, self.policy_version)
            rollouts = experience.rollouts

            # Trainers return to the GPUs that they share with engines.
            with self.timers.timed("switching to training", "weight_sync/hand_back"):
                self.replicas.free_devices()
                self.replicas.device_sharing.switch_to("training")

            with phase("computing log-probs"):
                outputs = self.learner.compute_log_probs_and_values(number, rollouts)
            with self.timers.timed("assigning credit", "adv"):
                rewards = self.shaping.rewards(experience)
                credit = self.learner.assign_credit(rollouts, rewards.scores, outputs)
            batch = LearnerBatch(number, rollouts, credit, outputs)

            # The update begins: from here on a stop waits for the end of the step.
            pass_point_of_no_return()
            with phase("updating"):
                record = self.recording(experience, batch)
                metrics = self.learner.update_models(batch, self.policy_version, record)

            # The processes report their peaks while the weights are published.
            self.memory.request_peaks()
            self.supply.note_trained(number, batch.learned_groups)
            metrics |= self.publish(number)
            metrics |= self.memory.metrics()

        return metrics | self.step_metrics(generated, experience, rewards, credit)

    @property
    def producer(self) -> Producer:
        """The producer of scored responses."""
        return self.supply.producer

    def produce(self) -> Experience:
        """Return the scored groups of this step.

        prompts -> generate -> score each response as soon as it is finished -> buffer
        -> the groups of this step

        Raises:
            TooManyFailures: More scores have failed than max_failed_fraction allows;
                what has failed is recorded.
        """
        with self.replicas.occupancy.trainers_wait():
            self.background.raise_failure()
            try:
                return self.supply.take(self.policy_version, self.timers)
            except TooManyFailures as failure:
                record, number = self.rollout_record, self.policy_version + 1
                if record is not None:
                    record.write_failed(number, failure.failed)
                raise

    def recording(
        self, experience: Experience, batch: LearnerBatch
    ) -> Callable[[], None] | None:
        """Return what writes some rollouts of the step for people to read.

        The models begin to learn meanwhile. None if no rollouts are kept.
        """
        record = self.rollout_record
        if record is None:
            return None
        rollouts = experience.rollouts
        rows = record.chosen(
            batch.number,
            rollouts.row("group_id"),
            rollouts.row("trajectory_id"),
            rollouts.lengths,
            self.supply.digests,
        )
        learned = LearnedRollouts(
            experience,
            batch.credit,
            batch.outputs.old_log_probs,
            whitening_moments(self.config.algorithm, rollouts, batch.credit),
        )
        learned = learned.select(rows)

        def go_on() -> None:
            PHASES.tick()
            self.background.advance()

        def write() -> None:
            with self.timers("record_rollouts"):
                record.write(batch.number, learned, go_on)
            self.background.raise_failure()

        return write

    def publish(self, version: int) -> Metrics:
        """Send the policy to every replica, verified, under this version."""
        if self.config.rollout.updates == "between":
            # No row may be open.
            with (
                self.timers("drain"),
                self.timers.waiting(),
                self.replicas.occupancy.trainers_wait(),
            ):
                self.producer.finish()

        with self.timers.timed("publishing weights", "update_weights", waits=True):
            metrics = self.replicas.sync_weights(version)
        self.policy_version = version
        self.learner.optimizer_steps.publish(version)
        return metrics

    def step_metrics(
        self,
        generated: Experience,
        experience: Experience,
        rewards: Rewards,
        credit: Sharded[Credit],
    ) -> Metrics:
        """Return the metrics of a finished step, but for those of its models.

        Args:
            generated: What was generated for the step.
            experience: What it has learned from.
            rewards: The rewards of its trajectories.
            credit: The credit of its rows.
        """
        config = self.config
        rollouts = experience.rollouts
        metrics = step_measures.response_metrics(
            config, self.shaping, generated, experience, rewards
        )
        metrics |= step_measures.row_metrics(
            config,
            rollouts,
            rewards,
            credit,
            self.system.actor.partition(rollouts.lengths),
        )
        metrics |= step_measures.time_metrics(
            self.timers.take(), rollouts, self.system.devices
        )
        metrics |= self.replicas.take_counts()
        metrics |= self.producer.outage_metrics(TRAINING, self.policy_version)
        metrics |= self.replicas.occupancy.take()
        metrics["timing_s/rollouts"] = self.replicas.occupancy.take_rollouts_s()
        metrics |= self.supply.take_metrics()
        if self.rollout_record is not None:
            metrics |= self.rollout_record.metrics
        return metrics | {NUM_EXAMPLES: float(len(self.prompts))}

    def draw_ahead(self) -> None:
        """Draw prompts of the next steps; their rollouts go on between the steps."""
        self.background.draw()

    def evaluate(self) -> Evaluation:
        """Evaluate the present policy on the held-out problems."""
        assert self.evaluator is not None

        # The step's generation and scoring are timed under the same names, so the
        # evaluation needs timers of its own.
        timers = Timers()
        evaluation = self.evaluator.evaluate(
            self.producer,
            self.policy_version,
            timers,
        )

        elapsed_s = timers.take()[TESTING]
        self._report_time_of_all(elapsed_s)
        metrics = evaluation.metrics | {TESTING: elapsed_s}
        metrics |= self.producer.outage_metrics(EVALUATION, self.policy_version)
        return replace(evaluation, metrics=metrics)

    def _report_time_of_all(self, elapsed_s: float) -> None:
        """Print once how long all held-out problems take, where some are left out."""
        evaluated = self.config.evaluation.num_prompts
        if evaluated is None or evaluated >= self.num_held_out:
            return

        all_s = elapsed_s * self.num_held_out / evaluated
        print(
            f"evaluated {evaluated} of {self.num_held_out} held-out problems in"
            f" {elapsed_s:.0f} s; all of them would take about {all_s:.0f} s"
            " (evaluation.num_prompts=null)",
            flush=True,
        )
        self.num_held_out = 0

    # ------------------------------------------------------------------------- recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds, by name."""
        return self.learner.groups

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON."""
        return {
            **self.supply.state(),
            "shaping": self.shaping.state(),
            **self.learner.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.supply.load_state(state)
        self.shaping.load_state(state["shaping"])
        self.learner.load_state(state)

    @property
    def supply_memory(self) -> SupplyMemory:
        """History of prompts, and groups that are not trained yet."""
        return self.supply.supply_memory

    def inherit(self, former: Resumable, supply_memory: SupplyMemory) -> None:
        """Take over the history of prompts, and groups that are not trained yet."""
        assert isinstance(former, Trainer), "the task of a run stays"
        self.supply.inherit(former.supply, supply_memory)

    def files(self, step: int) -> StateFiles:
        """Return the larger part of the driver's state."""
        return self.supply.files(step)

    def load_files(self, checkpoint: Path) -> None:
        """Take back the files in the folder of a checkpoint."""
        self.supply.load_files(checkpoint)

    def take_back(self, snapshot: Path) -> None:
        """Take back the files in the folder of a snapshot."""
        self.supply.take_back(snapshot)


@dataclass(frozen=True)
class Problems:
    """The problems of a run, tokenized.

    Attributes:
        tokenizer: The tokenizer of the policy.
        prompts: The prompts to learn from.
        held_out: The problems of an evaluation; None for a run without one.
        num_held_out: How many problems the evaluation could have.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    held_out: Prompts | None
    num_held_out: int


class ReinforcementTask(Task[RLConfig, Problems]):
    """The task of `train --config-name ppo | grpo | quickstart`."""

    def read(self, *, trains: bool = True) -> Problems:
        """Read the prompts, and the held-out problems where there is an evaluation."""
        config = self.config
        tokenizer = policy_tokenizer(config)
        prompts = PromptSource(
            config.data.train_sets,
            tokenizer,
            config.data,
            config.run.seed,
            may_stream=True,
            environments=config.agent.environments,
        )
        if trains:
            warn_skipped(prompts.skipped, "prompts of the training data")

        # Held-out problems are read only where there is an evaluation.
        held_out: Prompts | None = None
        num_held_out = 0
        if config.run.evaluate_every or not trains:
            source = PromptSource(
                config.data.validation_sets,
                tokenizer,
                config.data,
                config.run.seed,
                environments=config.agent.environments,
            )
            held_out = source.all(config.evaluation.num_prompts)
            num_held_out = len(source)

        return Problems(tokenizer, prompts, held_out, num_held_out)

    def num_examples(self, data: Problems) -> int:
        """Return the number of prompts to learn from."""
        return len(data.prompts)

    def make_trainer(self, data: Problems, system: System) -> Trainer:
        """Make the trainer, with an evaluator where there are held-out problems."""
        evaluator: Evaluator | None = None
        if data.held_out is not None:
            evaluator = Evaluator(self.config, data.tokenizer, data.held_out)
        record: RolloutRecord | None = None
        if self.config.tracking.rollouts != "none":
            record = RolloutRecord(self.config, data.tokenizer)
        return Trainer(
            self.config, system, data.prompts, evaluator, data.num_held_out, record
        )

    def conclude(self, trainer: Trainable) -> None:
        """Write the end of the ledger, which no checkpoint may hold."""
        assert isinstance(trainer, Trainer)
        trainer.supply.ledger.close()

    def shortfall(self, before: Metrics, after: Metrics) -> str | None:
        """Return an error text if held-out scores rose too little, else None."""
        preparation = self.config.prepare
        if preparation is None or not before or not after:
            return None

        # Every data source has to improve, so the smallest gain counts.
        gains = [
            (after[name] - before[name], name)
            for name in after.keys() & before.keys()
            if fnmatchcase(name, self.config.main_metric)
        ]
        gain, name = min(gains, default=(0.0, ""))
        if gain >= preparation.min_gain:
            return None

        measure = "mean reward" if "/reward/" in name else "accuracy"
        moved = "fell" if gain < 0 else "rose"
        return (
            f"held-out {measure} {moved} by {abs(gain):.3f}; expected a rise of at"
            f" least prepare.min_gain = {preparation.min_gain}: the run did not learn"
            " enough"
        )
