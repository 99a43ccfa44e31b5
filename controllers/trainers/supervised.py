"""Learning from a data set, step by step: what SFT, reward models and DPO share.

Invariant: a step is one optimizer step on the next batch of the source, so the source's
cursor, the model and the optimizer are all that a resumed run needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from controllers.system.build import System
from controllers.trainers.base import Resumable, Task, Trainable, warn_skipped
from controllers.watch import update_measures
from controllers.watch.example_record import ExampleRecord
from controllers.watch.gradients import GradientWatch
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import pass_point_of_no_return
from verl_ray.cluster.waiting import put
from verl_ray.columns.packing import assignment_of_units
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.run import RolloutTrackingConfig
from verl_ray.config.schema import Config
from verl_ray.data.cursor import CursorState
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.learning.objectives import Objective
from verl_ray.profiling.phases import Timers, phase
from verl_ray.report.evidence import NUM_EXAMPLES
from verl_ray.tracking.evaluations import HeldOutScores, digest
from workers.model_worker import ModelWorker, UpdateReport

W = TypeVar("W", bound=ModelWorker)

_NO_EVALUATION = "there are held-out rows wherever there is an evaluation"


class Source(Protocol):
    """A data set, read batch by batch."""

    def next_batch(self, count: int, /) -> TrainingBatch:
        """Return the next `count` units: rows, or pairs of rows."""

    def __len__(self) -> int:
        """Return the number of units in the data set."""

    @property
    def epoch(self) -> int:
        """Number of times that the whole data set has been read."""

    @property
    def passed_over(self) -> int:
        """Number of streamed records without use so far; 0 if nothing is streamed."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Number of records that are left out, by reason."""

    def all(self, limit: int | None, /) -> TrainingBatch:
        """Return the first `limit` units in the order of the files; None: all."""

    def state(self) -> CursorState:
        """Return the position in the data set."""

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state` was taken."""


@dataclass(frozen=True)
class Examples:
    """The rows of a run, tokenized.

    Attributes:
        train: The rows to learn from; None for an evaluation alone.
        held_out: The rows of an evaluation; None for a run without one.
    """

    train: Source | None
    held_out: TrainingBatch | None


R = TypeVar("R", bound=Config)


class SupervisedTrainer(ABC, Generic[W]):
    """The trainer of one role on the rows of a data set."""

    def __init__(
        self,
        role: str,
        group: WorkerGroup[W],
        objective: Objective,
        examples: Examples,
        batch_size: int,
        max_skipped_steps: int,
        memory: MemoryRecord | None = None,
        record: ExampleRecord | None = None,
    ) -> None:
        """Take the role and its rows; held-out rows go into the object store.

        Args:
            role: Name of the role, under which its metrics are reported.
            group: Workers of the role.
            objective: The loss of the rows.
            examples: Rows to learn from, and to evaluate on.
            batch_size: Rows, or pairs of rows, of one optimizer step.
            max_skipped_steps: Optimizer steps that may be skipped one after another
                because their gradients are not finite.
            memory: Record of the processes' memory, which adds its metrics to each
                step.
            record: Where rows are kept for people to read; None keeps none.
        """
        self.role = role
        self.group = group
        self.objective = objective
        self.timers = Timers()
        self.finished = False

        self._source = examples.train
        self._batch_size = batch_size
        self._gradients = GradientWatch(max_skipped_steps)
        self._memory = memory
        self._record = record

        self._held_out_rows = examples.held_out
        # Every evaluation reads the same object from the store.
        self._held_out: Sharded[TrainingBatch] | None = None
        self._digests: list[str] = []
        if examples.held_out is not None:
            self._held_out = put(examples.held_out)
            self._digests = _digests(examples.held_out)

    def complete(self, rows: TrainingBatch) -> TrainingBatch:
        """Return the rows of a step with what other models say of them."""
        return rows

    def update(self, rows: TrainingBatch) -> Call[list[UpdateReport]]:
        """Start one optimizer step on these rows, each unit of them on one rank."""
        assignment = None
        if rows.unit is not None:
            partition = self.group.partition
            assignment = assignment_of_units(partition, rows.lengths, rows.unit)
        return self.group.scatter(
            ModelWorker.learn, put(rows), self.objective, assignment=assignment
        )

    @abstractmethod
    def measure(self) -> Evaluation:
        """Measure the model on the held-out rows; may set `finished`."""

    def evaluate(self) -> Evaluation:
        """Evaluate the model on the held-out rows, and time it."""
        # The timers of the steps are taken once per step.
        timers = Timers()
        with timers.timed("evaluating", "testing"):
            evaluation = self.measure()
        return replace(evaluation, metrics={**evaluation.metrics, **timers.take()})

    def begin(self, done: int) -> None:
        """Do nothing: the ranks hold all state already."""

    def step(self, number: int) -> Metrics:
        """Run one optimizer step on the next batch. Return its metrics."""
        if self._memory is not None:
            # The peaks of the step before are reported while this one is computed.
            self._memory.request_peaks()

        with self.timers("step"):
            # From here on a stop waits for the end of the step.
            pass_point_of_no_return()
            rows = self.complete(self._train.next_batch(self._batch_size))
            reports = self._updated(number, rows)
        # This stops the run if the weights are broken, or too many steps were skipped.
        self._gradients.observe(self.role, number, [reports])

        timings = self.timers.take()
        tokens_per_s = rows.num_tokens / timings["timing_s/step"]

        metrics = update_measures.update_metrics(self.role, [reports])
        metrics |= timings
        metrics |= {
            "perf/total_num_tokens": float(rows.num_tokens),
            "perf/throughput": tokens_per_s / self.group.num_ranks,
            "training/epoch": float(self._train.epoch),
            "training/records_passed_over": float(self._train.passed_over),
            NUM_EXAMPLES: float(len(self._train)),
        }
        if self._memory is not None:
            metrics |= self._memory.metrics()
        if self._record is not None:
            metrics |= self._record.metrics
        return metrics

    def _updated(self, number: int, rows: TrainingBatch) -> list[UpdateReport]:
        """Make the optimizer step of a step, and record some of its rows."""
        if self._record is not None:
            rows = self._record.mark(number, rows)
        with self.timers.timed("updating", f"update_{self.role}", waits=True):
            call = self.update(rows)
            if self._record is not None:
                with self.timers("record_rollouts"):
                    units_before = (number - 1) * self._batch_size
                    marked = self._record.read(number, rows, units_before)
            reports = call.result()
        if self._record is not None:
            with self.timers("record_rollouts"):
                self._record.write(number, marked, reports)
        return reports

    def export(self, path: str) -> None:
        """Write the trained model as a Hugging Face directory."""
        with phase("writing the model"):
            self.group.broadcast(ModelWorker.export, path).result()

    @property
    def _train(self) -> Source:
        """The rows to learn from."""
        assert self._source is not None, (
            "there are rows to learn from wherever there is training"
        )
        return self._source

    @property
    def held_out(self) -> Sharded[TrainingBatch]:
        """The rows to evaluate on, in the object store."""
        assert self._held_out is not None, _NO_EVALUATION
        return self._held_out

    @property
    def held_out_rows(self) -> TrainingBatch:
        """The rows to evaluate on."""
        assert self._held_out_rows is not None, _NO_EVALUATION
        return self._held_out_rows

    def scores_of(
        self,
        scores: Mapping[str, npt.NDArray[np.floating]],
        weights: Mapping[str, npt.NDArray[np.floating]] | None = None,
        rows_per_problem: int = 1,
    ) -> HeldOutScores:
        """Return the scores of each held-out row, or pair of rows, for the record.

        Args:
            scores: One score per problem, [problems], by the name of the metric that
                they count towards.
            weights: Weight of each problem, [problems], in metrics where the problems
                do not weigh the same.
            rows_per_problem: Number of neighbouring rows that are one problem.
        """
        digests = self._digests[::rows_per_problem]
        ones = np.ones(len(digests))
        by_problem = np.stack([scores[name] for name in scores], axis=1)
        weighed = np.stack([(weights or {}).get(name, ones) for name in scores], axis=1)
        # The scores of a problem are neighbours.
        return HeldOutScores(
            problems=np.repeat(np.arange(len(digests)), len(scores)).tolist(),
            digests=[digest for digest in digests for _ in scores],
            metrics=list(scores) * len(digests),
            scores=by_problem.astype(np.float64).reshape(-1, 1),
            weights=weighed.astype(np.float64).reshape(-1),
        )

    # ------------------------------------------------------------------------- recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[W]]:
        """The role whose state a checkpoint holds, by name."""
        return {self.role: self.group}

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON."""
        return {
            "cursor": self._train.state(),
            "finished": self.finished,
            "gradients": self._gradients.state(),
        }

    def draw_ahead(self) -> None:
        """A step draws its own rows."""

    @property
    def background(self) -> None:
        """Nothing goes on between steps."""

    @property
    def supply_memory(self) -> None:
        """Nothing belongs to a state."""

    def inherit(self, former: Resumable, supply_memory: None) -> None:
        """Take over nothing: the state is all that a trainer knows."""

    def files(self, step: int) -> None:
        """Return None: the state is small."""

    def load_files(self, checkpoint: Path) -> None:
        """Read nothing, since there are no files."""

    def take_back(self, snapshot: Path) -> None:
        """Read nothing, since there are no files."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        # A trainer that only evaluates has no source.
        if self._source is not None:
            self._source.load_state(state["cursor"])
        self.finished = state["finished"]
        self._gradients.load_state(state["gradients"])


def _digests(rows: TrainingBatch) -> list[str]:
    """Return the digest of each row's tokens."""
    return [
        digest(tokens.tobytes()) for tokens in np.split(rows.tokens, rows.offsets[1:-1])
    ]


class SupervisedTask(Task[R, Examples]):
    """A run that learns from a data set alone, and writes a model directory."""

    @property
    def noun(self) -> str:
        """Plural of what the data sets hold, for messages."""
        return "rows"

    @abstractmethod
    def source(self, data_sets: Sequence[DataSet], *, may_stream: bool) -> Source:
        """Read and tokenize some data sets."""

    def held_out_source(self, data_sets: Sequence[DataSet]) -> Source:
        """Read and tokenize the data sets of an evaluation."""
        return self.source(data_sets, may_stream=False)

    @property
    @abstractmethod
    def num_held_out(self) -> int | None:
        """Number of units of an evaluation, the first ones; None: all."""

    def read(self, *, trains: bool = True) -> Examples:
        """Read the rows to learn from, and those of an evaluation if there is one."""
        data = self.config.data
        # The command `evaluate` evaluates whatever run.evaluate_every is.
        evaluates = self.config.run.evaluate_every > 0 or not trains

        train: Source | None = None
        if trains:
            train = self.source(data.train_sets, may_stream=True)
            warn_skipped(train.skipped, f"{self.noun} of the training data")

        # Without held-out rows the run trains for all of its steps.
        held_out: TrainingBatch | None = None
        if data.validation_sets and evaluates:
            source = self.held_out_source(data.validation_sets)
            warn_skipped(source.skipped, f"{self.noun} of the held-out data")
            held_out = source.all(self.num_held_out)
        return Examples(train, held_out)

    def num_examples(self, data: Examples) -> int | None:
        """Return the number of units to learn from."""
        return None if data.train is None else len(data.train)

    def memory_record(self, data: Examples, system: System) -> MemoryRecord | None:
        """Return the record of a run's memory, which an evaluation alone has not."""
        if data.train is None:
            return None
        return MemoryRecord(self.config, system.groups, on_gpus=system.has_gpus)

    def example_record(self, data: Examples) -> ExampleRecord | None:
        """Return the record of rows, where a run learns and keeps any."""
        tracking = self.config.tracking
        assert isinstance(tracking, RolloutTrackingConfig), "rows are recorded"
        if data.train is None or tracking.rollouts == "none":
            return None
        return ExampleRecord(self.folder, tracking, policy_tokenizer(self.config))

    @property
    def model_folder(self) -> Path:
        """The directory of the trained model."""
        return self.folder / "model"

    def conclude(self, trainer: Trainable) -> None:
        """Write the trained model."""
        assert isinstance(trainer, SupervisedTrainer)
        trainer.export(str(self.model_folder))

    def outputs(self) -> dict[str, str]:
        """Return the trained model, once it is written."""
        if not self.model_folder.is_dir():
            return {}
        return {"model": str(self.model_folder)}
