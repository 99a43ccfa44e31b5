"""The trainer and the replica of the suite `schedule`, which make the steps of one
schedule, and how long the driver takes to react to finished rows.

Invariant: the trainer is that of `train`, with lengths that are forced and a record of
when it did what. The length of a response depends on its row id alone, so that all
schedules generate the same responses. Every schedule gets replicas of its own, in the
same processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np

from controllers.rollouts.graders import Graders, PendingScores
from controllers.rollouts.producer import Producer
from controllers.rollouts.score_failures import ScoreFailures
from controllers.system.build import System, build_replicas
from controllers.trainers.learner import Learner
from controllers.trainers.rl import Trainer
from controllers.watch.measures import Metrics
from verl_ray.cluster.context import WorkerContext, concurrent, steering
from verl_ray.cluster.group import WorkerGroup
from verl_ray.columns.batch import Int64
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Prompts, Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.rollout.requests import Sampling
from workers.generation import Generation
from workers.rollout import (
    RolloutSpec,
    RolloutWorker,
)

LEARNING = "learning"
"""The phase of the driver in which the trainer computes."""

LEAST_OF_TAIL = 8
"""The scale of the heavy-tailed lengths, which is the least of them."""

Span = tuple[float, float]
"""Begin and end on the monotonic clock, in seconds."""

_SEEDS = 2.0**63
_POLL_S = 0.02


# ------------------------------------------------------------------------ the replica


@dataclass(frozen=True)
class Lengths:
    """The lengths of the responses.

    Attributes:
        kind: equal: all of them have `most` tokens. tail: half of them have less than
            twice `LEAST_OF_TAIL`, a quarter less than four times, and so on up to
            `most`: a Pareto distribution of index 1, cut off there.
        most: The greatest length.
    """

    kind: Literal["equal", "tail"]
    most: int

    def of(self, row_id: int) -> int:
        """Return the length of the response of this row."""
        if self.kind == "equal":
            return self.most
        seed = row_seeds(0, "length", np.array([row_id]))[0]
        uniform = (float(seed) + 1) / _SEEDS
        return min(self.most, math.floor(LEAST_OF_TAIL / uniform))


@dataclass(frozen=True)
class ForcedGeneration(Generation):
    """Generation of responses whose lengths are forced."""

    lengths: Lengths

    def sampling_of(self, row_id: int) -> Sampling:
        """Return the sampling of a row, which stops at its length and at no token."""
        return replace(
            self.sampling, max_tokens=self.lengths.of(row_id), stop_token_ids=()
        )


@dataclass(frozen=True)
class Moment:
    """When some rows began or ended in the replica.

    Attributes:
        at_s: The time on the monotonic clock, which is the machine's.
        row_ids: The rows, int64 [rows].
    """

    at_s: float
    row_ids: Int64


@dataclass(frozen=True)
class ReplicaRecord:
    """Calls that a replica got and rows that it handed on, since it was last asked."""

    begun: list[Moment]
    ended: list[Moment]


class RecordingWorker(RolloutWorker):
    """A replica that remembers when rows came, and when it handed them on."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        self._record = ReplicaRecord([], [])

    @concurrent
    def generate(
        self,
        prompts: Prompts,
        generation: Generation,
        requested_rows: Int64 | None = None,
    ) -> Iterator[Rollouts]:
        """Yield responses as a replica does, and remember when."""
        assert requested_rows is not None
        record = self._record
        record.begun.append(Moment(time.monotonic(), requested_rows))
        for rollouts in super().generate(prompts, generation, requested_rows):
            record.ended.append(Moment(time.monotonic(), rollouts.row_id))
            yield rollouts

    @steering
    def take_record(self) -> ReplicaRecord:
        """Return what was remembered since the last call."""
        record = self._record
        self._record = ReplicaRecord([], [])
        return record


# -------------------------------------------------------- the reactions of the driver


# A reaction begins when the replica hands rows on, so it includes the object store and
# Ray's messages. All processes are on one machine and share its monotonic clock.


@dataclass(frozen=True)
class DriverRecord:
    """Times at which the driver did something, on the monotonic clock.

    Attributes:
        passed_on: When each row was passed on to its graders, by row id.
        drawn: When each prompt was drawn, by ordinal.
        waiting: When it waited for the groups of a step.
        publishing: When it published weights.
    """

    passed_on: dict[int, float] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)
    waiting: list[Span] = field(default_factory=list)
    publishing: list[Span] = field(default_factory=list)

    def phase(self, began_s: float, ended_s: float) -> str:
        """Return what the driver did while it reacted.

        A reaction is of "publishing" if it had to wait for a weight sync, else of
        "waiting" if it began while the groups of a step were waited for. Between these
        the trainer computes.
        """
        if any(began_s < end and begin < ended_s for begin, end in self.publishing):
            return "publishing"
        if any(begin <= began_s < end for begin, end in self.waiting):
            return "waiting"
        return LEARNING


@dataclass(frozen=True)
class Reaction:
    """One reaction of the driver to rows that ended.

    Attributes:
        phase: What the driver did meanwhile.
        seconds: How long the driver took.
    """

    phase: str
    seconds: float


def graded(ended: Sequence[Moment], driver: DriverRecord) -> list[Reaction]:
    """Return how long pieces of rows took until they were passed on to graders.

    Pieces that were abandoned at the end are left out.
    """
    reactions = []
    for piece in ended:
        passed_on_s = driver.passed_on.get(int(piece.row_ids[0]))
        if passed_on_s is not None:
            phase = driver.phase(piece.at_s, passed_on_s)
            reactions.append(Reaction(phase, passed_on_s - piece.at_s))
    return reactions


def replaced(
    replica: ReplicaRecord, driver: DriverRecord, concurrency: int, group_size: int
) -> list[Reaction]:
    """Return how long a group that waited took from free capacity to the replica.

    Groups come in the order in which they wait. A group has capacity once enough rows
    have ended that its own would not exceed `concurrency`. Groups that were drawn later
    than that did not wait, and are left out.
    """
    ended_s = [piece.at_s for piece in replica.ended for _ in piece.row_ids]

    reactions = []
    num_begun = 0
    for call in replica.begun:
        for ordinal, size in _groups(call.row_ids, group_size):
            num_begun += size
            num_to_end = num_begun - concurrency
            if num_to_end <= 0:
                continue
            free_s = ended_s[num_to_end - 1]
            if driver.drawn[ordinal] <= free_s:
                phase = driver.phase(free_s, call.at_s)
                reactions.append(Reaction(phase, call.at_s - free_s))
    return reactions


def _groups(row_ids: Int64, group_size: int) -> list[tuple[int, int]]:
    """Return the ordinal and the number of rows of each group, in their order."""
    ordinals, sizes = np.unique(row_ids // group_size, return_counts=True)
    return list(zip(ordinals.tolist(), sizes.tolist(), strict=True))


def percentiles(reactions: Sequence[Reaction]) -> dict[str, dict[str, float]]:
    """Return count, median, 99th percentile and maximum in ms, by the driver's phase.

    "all" stands for all phases; a phase without reactions is left out.
    """
    by_phase: dict[str, list[float]] = {}
    for reaction in reactions:
        for phase in (reaction.phase, "all"):
            by_phase.setdefault(phase, []).append(1000 * reaction.seconds)

    return {
        phase: {
            "count": len(values),
            "p50_ms": round(float(np.percentile(values, 50)), 2),
            "p99_ms": round(float(np.percentile(values, 99)), 2),
            "max_ms": round(max(values), 2),
        }
        for phase, values in by_phase.items()
    }


# ------------------------------------------------------------------------ the trainer


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
        drawn = super().training_generation()
        return ForcedGeneration(**vars(drawn), lengths=self._lengths)

    def begin(
        self,
        prompts: Prompts,
        generation: Generation,
        buffer: RolloutBuffer,
        step: int,
        failures: ScoreFailures | None = None,
    ) -> None:
        """Begin to generate and score groups, and note when they were drawn."""
        now_s = time.monotonic()
        ordinals = prompts.group_id.tolist()
        self._record.drawn.update(dict.fromkeys(ordinals, now_s))
        super().begin(prompts, generation, buffer, step, failures)


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
        self.learner = Learner(
            config, own_system, sampling, self.timers, producer, len(tokenizer)
        )

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
