"""Reinforcement learning, one step after another: the driver of PPO, GRPO and their kin.

Invariant: `step` has one commit point, at its end (policy published, cursor advanced, metrics written); everything
before it can be replayed from the last commit with the same result. A producer fills a buffer with scored groups, a
learner learns from what is taken out of it, and the replicas are given what was learned. Deliberately not here: the
loop around a step (`controllers/run/loop.py`), and any arithmetic on tokens.
"""

from __future__ import annotations

import sys
from typing import Any

from controllers.rollouts.evaluator import Evaluator
from controllers.rollouts.producer import Producer
from controllers.system.build import System
from controllers.trainers.base import Evaluation, MakeTrainer, Task, tell_skipped
from controllers.trainers.learner import Learner
from controllers.watch import measures
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import no_way_back
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Credit, Finish, Rollouts
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import TrackingError
from verl_ray.profiling.memory import host_used_gib
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import Shaping
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.curve import reward_curve


class Trainer:
    """The four roles of one run, and the order in which they work."""

    def __init__(self, config: RLConfig, system: System, prompts: PromptSource, evaluator: Evaluator | None) -> None:
        assert system.rollout is not None
        self.config, self.system = config, system
        self.prompts, self.evaluator = prompts, evaluator
        self.timers = Timers()
        self.replicas = system.rollout
        self.producer = Producer(config, self.replicas, system.graders)
        self.buffer = RolloutBuffer(config.rollout.group_size, config.rollout.staleness)
        self.learner = Learner(config, system, self.producer.training().sampling, self.timers, self.producer)
        self.shaping = Shaping(config)
        self.memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)
        self.policy_version = -1

    finished = False
    """Reinforcement learning makes all of its steps."""

    def begin(self, done: int) -> None:
        """The replicas draw from the policy as it is."""
        self.publish(done)

    def step(self, number: int) -> Metrics:
        """One training step: produce, measure, assign credit, learn, publish. Returns its metrics."""
        learner = self.learner
        with self.timers("step"):
            experience = self.produce()
            rollouts, raw = experience.rollouts, measures.graded(experience.scores)
            self.replicas.switch_to_training()
            measured = learner.measure(rollouts)
            aborted = rollouts.row("finish") == Finish.ABORTED
            scores = self.shaping.shape(raw, aborted)
            credit = learner.assign_credit(rollouts, scores, measured)
            no_way_back()  # the update begins: a stop waits for the end of the step
            metrics = learner.learn(number, rollouts, credit, measured, self.policy_version)
            self.memory.ask()  # answered while weights are published
            metrics |= self.publish(number)
            metrics |= self.memory.metrics()
        return metrics | measures.of_scores(self.shaping.weigh(raw), raw, aborted) | self.record(rollouts, credit)

    def produce(self) -> Experience:
        """prompts -> generate -> score, each response as soon as it is finished -> buffer -> this step's groups."""
        batch = self.prompts.next_batch(self.config.data.prompts_per_step)
        self.producer.begin(batch, self.producer.training(), self.buffer)
        return self.producer.take(batch, self.buffer, self.policy_version, self.timers)

    def publish(self, version: int) -> Metrics:
        """The new policy into every rollout replica, verified, under its version."""
        with self.timers("update_weights"), self.timers.waiting():
            metrics = self.replicas.publish(version)
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
            **measures.of_credit(credit, rollouts.row("response_length"), self.learner.whitening(rollouts, credit)),
            **timings,
            **self.replicas.take_counts(),
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
        """The roles whose state a checkpoint holds."""
        return self.learner.groups

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {"cursor": self.prompts.state(), "shaping": self.shaping.state(), **self.learner.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.prompts.load_state(state["cursor"])
        self.shaping.load_state(state["shaping"])
        self.learner.load_state(state)


class ReinforcementTask(Task[RLConfig]):
    """`train --config-name ppo | grpo | quickstart`."""

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
