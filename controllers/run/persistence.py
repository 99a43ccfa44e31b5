"""The interfaces through which the loop saves a run and protects its steps.

Invariant: the loop knows no more about checkpoints and stops than these protocols say.
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
from verl_ray.cluster.waiting import Background
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

    @property
    def saved_step(self) -> int | None:
        """Last step that a checkpoint holds; None where there is no checkpoint."""

    def save(self, trainer: Trainable, trackers: Tracker, /) -> bool:
        """Write a checkpoint of the step that was committed last, or begin to.

        Returns:
            Whether that was possible.
        """

    def finish_save(self, background: Background | None = None) -> bool:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            background: Work that goes on meanwhile.

        Returns:
            Whether there is no checkpoint that could not be written.
        """

    def rescue_save(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole."""

    def take_snapshot(self, trainer: Trainable, /) -> None:
        """Begin a snapshot of the step that was committed last, if one is due."""

    def go_back(self, former: Trainable, /) -> None:
        """Prepare to forget what came after the last state; `restore` follows.

        Args:
            former: The trainer that failed.
        """

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


class Healing(Protocol):
    """The way back of a run after the failure of a process (`open_run.py`)."""

    def note_finished(self, step: int, /) -> None:
        """Note that a step is finished, for the first time or again."""

    def may_cure(self, failure: BaseException, step: int, /) -> bool:
        """Return whether the run goes on after a failure in this step; say so."""

    def heal(self, trainer: Trainable, /) -> Trainable:
        """Start lost processes again.

        Args:
            trainer: The trainer that failed.

        Returns:
            A new trainer, whose state has to be restored.
        """


class NoPersistence:
    """Persistence of a run that starts anew whenever it was ended early."""

    unrecorded: Metrics | None = None
    best = None
    saved_step = None

    def restore(self, _: Trainable) -> int:
        return 0

    def commit(
        self, _: int, __: Trainable, unrecorded: Mapping[str, float] | None = None
    ) -> None: ...

    def commit_line(self, _: int, __: Trainable, ___: Tracker) -> None: ...

    def save(self, _: Trainable, __: Tracker) -> bool:
        return True

    def finish_save(self, _: Background | None = None) -> bool:
        return True

    def rescue_save(self) -> None: ...

    def take_snapshot(self, _: Trainable) -> None: ...

    def go_back(self, _: Trainable) -> None: ...

    def save_finished_step(self, _: Trainable, __: Tracker) -> None: ...


class UnguardedSteps:
    """Steps that a stop gives up at any point, since none of them is saved."""

    def step(self, _: int) -> AbstractContextManager[None]:
        heed_signals()
        return contextlib.nullcontext()
