"""The trainer of `verl-ray bench schedule`, which makes the steps of one schedule.

Invariant: it is the trainer of `train`, with lengths that are forced and a record of
when it did what. Every schedule gets replicas of its own, in the same processes.
Deliberately not here: which schedules there are (`schedule.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from controllers.bench.schedule_reactions import DriverRecord, Span
from controllers.bench.schedule_replica import (
    ForcedGeneration,
    Lengths,
    RecordingWorker,
    ReplicaRecord,
)
from controllers.rollouts.graders import Graders, PendingScores, ScoreFailures
from controllers.rollouts.producer import Producer
from controllers.system.build import System, build_replicas
from controllers.trainers.learner import Learner
from controllers.trainers.rl import Trainer
from controllers.watch.measures import Metrics
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.chat_templates import policy_tokenizer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from workers.rollout import Generation

_POLL_S = 0.02


class _RecordingGraders(Graders):
    """Graders that note when rows come to them."""

    record: DriverRecord

    def score(
        self, rollouts: Sharded[Rollouts], purpose: str, step: int
    ) -> PendingScores:
        """Start to score a piece of rollouts, and note when."""
        scores = super().score(rollouts, purpose, step)
        now_s = time.monotonic()
        row_ids = rollouts.row("row_id").tolist()
        self.record.passed_on.update(dict.fromkeys(row_ids, now_s))
        return scores


class _ForcedProducer(Producer):
    """A producer of responses with forced lengths."""

    def __init__(
        self, config: RLConfig, system: System, lengths: Lengths, record: DriverRecord
    ) -> None:
        assert system.rollout is not None
        super().__init__(config, system.rollout, system.graders)
        self._lengths = lengths
        self._record = record
        self._graders = _RecordingGraders(config, system.graders)
        self._graders.record = record

    def training_generation(self) -> Generation:
        """Return the settings of generation, with forced lengths."""
        of_run = super().training_generation()
        return ForcedGeneration(**vars(of_run), lengths=self._lengths)

    def begin(
        self,
        prompts: Prompts,
        generation: Generation,
        buffer: RolloutBuffer,
        step: int,
        finished: Experience | None = None,
        failures: ScoreFailures | None = None,
    ) -> ScoreFailures:
        """Begin to generate and score groups, and note when they were drawn."""
        now_s = time.monotonic()
        ordinals = prompts.group_id.tolist()
        self._record.drawn.update(dict.fromkeys(ordinals, now_s))
        return super().begin(prompts, generation, buffer, step, finished, failures)


class ScheduleTrainer(Trainer):
    """Makes steps of one schedule, from a run that has just begun."""

    def __init__(self, config: RLConfig, system: System, lengths: Lengths) -> None:
        """Connect a system that is running to a trainer of its own.

        Args:
            config: The resolved configuration, which may differ from the system's in
                the schedule and in the size of a step.
            system: The running processes.
            lengths: Lengths of the responses.
        """
        assert system.rollout is not None
        self.members = system.rollout.available
        replicas = build_replicas(
            config,
            self.members,
            system.actor,
            list(system.models.values()),
            on_gpus=system.has_gpus,
        )
        own_system = replace(system, rollout=replicas)
        tokenizer = policy_tokenizer(config)
        prompts = PromptSource(config.data.train_sets, tokenizer, config.data, 0)
        super().__init__(config, own_system, prompts, None)

        self.record = DriverRecord()
        producer = _ForcedProducer(config, own_system, lengths, self.record)
        self.supply.producer = producer
        sampling = producer.training_generation().sampling
        self.learner = Learner(config, own_system, sampling, self.timers, producer)

    def produce(self) -> Experience:
        """Return the groups of a step, and note how long they were waited for."""
        with self._noting(self.record.waiting):
            return super().produce()

    def publish(self, version: int) -> Metrics:
        """Publish a version, and note when."""
        with self._noting(self.record.publishing):
            return super().publish(version)

    @contextlib.contextmanager
    def _noting(self, spans: list[Span]) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        spans.append((began_s, time.monotonic()))

    def end(self) -> ReplicaRecord:
        """Abandon all generation; return what the replica did since the beginning."""
        self.replicas.stop_generation()
        (replica,) = cast(tuple[WorkerGroup[RecordingWorker], ...], self.members)
        # Ends once the engine has aborted what was abandoned.
        while replica.rank_zero(RecordingWorker.health).result().in_flight:
            time.sleep(_POLL_S)
        self.replicas.close()
        return replica.rank_zero(RecordingWorker.take_record).result()
