"""The loop around every step: evaluate, record, save, step, until there is nothing left to do.

Invariant: what comes next is a value, `decide` of where the run stands; every line of metrics.jsonl and every
checkpoint belongs to a finished step. Deliberately not here: what a step does (`controllers/trainers`), what a
checkpoint holds (`recovery.py`), and what a stop means (`stopping.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from controllers.trainers.base import Trainable
from controllers.watch.measures import Metrics
from verl_ray.cluster.signals import heed_signals
from verl_ray.config.run import RunConfig
from verl_ray.tracking.base import Sample, Tracker


class Move(Enum):
    """What a run does next."""

    RECORD = auto()
    """Evaluate if that is due, and write the line of the last finished step; of step 0 there is one if it is due."""
    SAVE = auto()
    """Write a checkpoint."""
    STEP = auto()
    """Train one step more."""
    END = auto()


@dataclass
class Position:
    """Where a run stands."""

    step: int
    """Finished steps."""
    unrecorded: Metrics | None
    """What is known of the last finished step while its line is not written; None = it is."""
    saved: int
    """The last step of which a checkpoint is written, or under way; 0 = none."""
    finished: bool = False
    """Whether enough is learned."""


def decide(run: RunConfig, at: Position) -> Move:
    """What comes next."""
    ends = at.finished or at.step >= run.total_steps
    if at.unrecorded is not None:
        return Move.RECORD
    if at.step > at.saved and run.checkpoint_every and (ends or at.step % run.checkpoint_every == 0):
        return Move.SAVE
    return Move.END if ends else Move.STEP


def evaluation_due(run: RunConfig, step: int) -> bool:
    """Before the first step, every run.evaluate_every steps, and after the last one; never where that is 0."""
    return run.evaluate_every > 0 and (step % run.evaluate_every == 0 or step == run.total_steps)


class Keeping(Protocol):
    """What outlives a run: `Recovery`, or `NothingKept`."""

    unrecorded: Metrics | None
    """The metrics of the last finished step while its evaluation is not made; None = its line is written."""

    def restore(self, trainer: Trainable, /) -> int:
        """Bring the trainer to where it is to go on. Returns the number of finished steps."""

    def kept(self, trainer: Trainable, trackers: Tracker, /) -> AbstractContextManager[None]:
        """Around everything after that: what is kept if it is stopped."""

    def commit(self, number: int, trainer: Trainable, /, unrecorded: Mapping[str, float] | None = None) -> None:
        """Step `number` is finished."""

    def commit_evaluation(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """The evaluation that the checkpoint lacked is made, and its line written."""

    def save(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """Write a checkpoint, or begin to."""

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""


class Heeding(Protocol):
    """Where signals are heeded: `Stopping`, or `NothingKept`."""

    def step(self, number: int, /) -> AbstractContextManager[None]:
        """Around one step, up to its commit."""


class NothingKept:
    """Of a run that begins anew after a stop."""

    unrecorded: Metrics | None = None

    def restore(self, _: Trainable) -> int:
        return 0

    def kept(self, _: Trainable, __: Tracker) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def commit(self, _: int, __: Trainable, unrecorded: Mapping[str, float] | None = None) -> None: ...

    def commit_evaluation(self, _: Trainable, __: Tracker) -> None: ...

    def save(self, _: Trainable, __: Tracker) -> None: ...

    def finish(self) -> None: ...

    @contextlib.contextmanager
    def step(self, _: int) -> Iterator[None]:
        """A stop may come before each step."""
        heed_signals()
        yield


class Loop:
    """One run, from where its checkpoint left it to its end."""

    def __init__(
        self, run: RunConfig, trainer: Trainable, trackers: Tracker, recovery: Keeping, stopping: Heeding
    ) -> None:
        self._run, self._trainer, self._trackers = run, trainer, trackers
        self._recovery, self._stopping = recovery, stopping
        self.samples: list[Sample] = []
        """Of the newest evaluation."""

    def run(self) -> None:
        """All that is left to do."""
        done = self._recovery.restore(self._trainer)
        with self._recovery.kept(self._trainer, self._trackers):
            self._trainer.begin(done)
            at = self._begin(done)
            while (move := decide(self._run, at)) is not Move.END:
                match move:
                    case Move.RECORD:
                        self._record(at)
                    case Move.SAVE:
                        self._save(at)
                    case Move.STEP:
                        self._step(at)
            self._recovery.finish()

    def _begin(self, done: int) -> Position:
        """A run begins with an evaluation; one that goes on makes the evaluation that a stop has left undone."""
        unrecorded = self._recovery.unrecorded
        if done == 0 and self._run.evaluate_every:
            unrecorded = {}
        return Position(done, unrecorded, saved=done, finished=self._trainer.finished)

    def _step(self, at: Position) -> None:
        number = at.step + 1
        with self._stopping.step(number):
            metrics = self._trainer.step(number)
            self._recovery.commit(number, self._trainer, unrecorded=metrics)
            self._recovery.finish()
        at.step, at.unrecorded = number, metrics

    def _record(self, at: Position) -> None:
        """A stop gives up an evaluation, and then there is no line yet."""
        assert at.unrecorded is not None
        metrics = at.unrecorded
        if evaluation_due(self._run, at.step):
            heed_signals()
            found, self.samples = self._trainer.evaluate()
            metrics = metrics | found
            if self.samples:
                self._trackers.samples(at.step, self.samples)
        self._trackers.log(at.step, metrics)
        at.unrecorded, at.finished = None, self._trainer.finished
        if at.step == at.saved:
            self._recovery.commit_evaluation(self._trainer, self._trackers)
        else:
            self._recovery.commit(at.step, self._trainer)

    def _save(self, at: Position) -> None:
        with self._trainer.timers("save_checkpoint"):  # on the next step's line: this one's is written first
            self._recovery.save(self._trainer, self._trackers)
        at.saved = at.step
