"""What the loop asks of whatever keeps a run, and the variants that keep nothing.

Invariant: the loop knows no more of checkpoints and of stops than stands here. Deliberately not here: the run that is
kept (`recovery.py`, `stopping.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from controllers.trainers.base import Trainable
from controllers.watch.measures import Metrics
from verl_ray.cluster.signals import heed_signals
from verl_ray.tracking.base import Tracker


class Keeping(Protocol):
    """What outlives the processes of a run: `Recovery`, or `NothingKept`."""

    unrecorded: Metrics | None
    """The metrics of the last finished step while its line is not written; None = it is."""

    def restore(self, trainer: Trainable, /) -> int:
        """Bring the trainer to where it goes on. Returns the number of finished steps."""

    def commit(self, number: int, trainer: Trainable, /, unrecorded: Mapping[str, float] | None = None) -> None:
        """Step `number` is finished; `unrecorded`: its metrics, while its line is not written."""

    def commit_line(self, number: int, trainer: Trainable, trackers: Tracker, /) -> None:
        """The line of step `number` is written."""

    def save(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """Write a checkpoint of the step that was committed last, or begin to."""

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""

    def rescue_save(self) -> None:
        """After a failure: let the checkpoint that is being written count if it is whole."""

    def keep_finished(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """After a signal: save the last finished step, if no checkpoint holds it, and write its line."""


class Stepping(Protocol):
    """What a stop means to a step under way: `Stopping`, or `GivenUpAnywhere`."""

    def step(self, number: int, /) -> AbstractContextManager[None]:
        """Around step `number`, up to its commit."""


class NothingKept:
    """Of a run that begins anew after whatever ended it."""

    unrecorded: Metrics | None = None

    def restore(self, _: Trainable) -> int:
        return 0

    def commit(self, _: int, __: Trainable, unrecorded: Mapping[str, float] | None = None) -> None: ...

    def commit_line(self, _: int, __: Trainable, ___: Tracker) -> None: ...

    def save(self, _: Trainable, __: Tracker) -> None: ...

    def finish_save(self) -> None: ...

    def rescue_save(self) -> None: ...

    def keep_finished(self, _: Trainable, __: Tracker) -> None: ...


class GivenUpAnywhere:
    """Steps that a stop gives up wherever they are, since nothing of them is kept."""

    def step(self, _: int) -> AbstractContextManager[None]:
        heed_signals()
        return contextlib.nullcontext()
