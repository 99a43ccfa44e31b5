"""The interfaces through which the loop saves a run and protects its steps.

Invariant: the loop knows no more about checkpoints and stops than these protocols say.

Deliberately not here: the implementations that write checkpoints (`recovery.py`) and
that answer signals (`stopping.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from controllers.run.best import BestEvaluation
from controllers.trainers.base import Trainable
from controllers.watch.measures import Metrics
from verl_ray.cluster.signals import heed_signals
from verl_ray.tracking.base import Tracker


class Persistence(Protocol):
    """The part of a run that outlives its processes.

    `Recovery` writes checkpoints; `NoPersistence` writes nothing.
    """

    unrecorded: Metrics | None
    """Metrics of the last finished step until its line is written, then None."""

    @property
    def best(self) -> BestEvaluation | None:
        """Best evaluation so far; None for a run that does not look for it."""

    def restore(self, trainer: Trainable, /) -> int:
        """Restore the trainer and return the number of finished steps."""

    def commit(
        self,
        number: int,
        trainer: Trainable,
        /,
        unrecorded: Mapping[str, float] | None = None,
    ) -> None:
        """Note that step `number` is finished.

        Args:
            number: Number of the step, counted from 1.
            trainer: Trainer whose state belongs to this step.
            unrecorded: Metrics of the step while its line is not written yet.
        """

    def commit_line(
        self, number: int, trainer: Trainable, trackers: Tracker, /
    ) -> None:
        """Note that the metrics line of step `number` is written."""

    def save(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """Write a checkpoint of the step that was committed last, or begin to."""

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""

    def rescue_save(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole."""

    def save_finished_step(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """Save the last finished step after a signal.

        This does nothing if a checkpoint holds the step and its line is written.
        """


class StepGuard(Protocol):
    """The rule by which a stop finishes or gives up the current step.

    `Stopping` finishes a step whose update has begun; `UnguardedSteps` gives up every
    step.
    """

    def step(self, number: int, /) -> AbstractContextManager[None]:
        """Return a context manager around step `number`, up to its commit."""


class NoPersistence:
    """Persistence of a run that starts anew whenever it was ended early."""

    unrecorded: Metrics | None = None
    best = None

    def restore(self, _: Trainable) -> int:
        return 0

    def commit(
        self, _: int, __: Trainable, unrecorded: Mapping[str, float] | None = None
    ) -> None: ...

    def commit_line(self, _: int, __: Trainable, ___: Tracker) -> None: ...

    def save(self, _: Trainable, __: Tracker) -> None: ...

    def finish_save(self) -> None: ...

    def rescue_save(self) -> None: ...

    def save_finished_step(self, _: Trainable, __: Tracker) -> None: ...


class UnguardedSteps:
    """Steps that a stop gives up at any point, since none of them is saved."""

    def step(self, _: int) -> AbstractContextManager[None]:
        heed_signals()
        return contextlib.nullcontext()
