"""What a task is, and what its trainer can do: all that the loop around a step asks of either.

Invariant: what sets one task apart from another is in its file (`rl.py`, `sft.py`, `reward_model.py`), beside its
trainer; whoever else would ask for the task of a run asks its configuration or its `Task`. Deliberately not here: how a
name leads to the file (`controllers/tasks.py`), and the loop (`controllers/run/loop.py`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from controllers.system.build import WORKERS, System, Workers
from controllers.tasks import declared, module_of
from controllers.watch.measures import Metrics
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.schema import Config
from verl_ray.profiling.timers import Timers
from verl_ray.tracking.base import Sample

C = TypeVar("C", bound=Config)

Evaluation = tuple[Metrics, list[Sample]]
"""What was found on held-out rows, and samples to read, if there are any."""


class Resumable(Protocol):
    """What a trainer tells, so that it can continue."""

    @property
    def groups(self) -> Mapping[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds, by name."""

    def state(self) -> dict[str, Any]:
        """The driver's part, as JSON."""

    def load_state(self, state: dict[str, Any]) -> None: ...


class Trainable(Resumable, Protocol):
    """One run's trainer, as the loop sees it."""

    timers: Timers

    @property
    def finished(self) -> bool:
        """Whether enough is learned before the last step."""

    def begin(self, done: int) -> None:
        """Before the first step, once `done` steps are restored."""

    def step(self, number: int) -> Metrics:
        """Training step `number`, counted from 1."""

    def evaluate(self) -> Evaluation:
        """What is trained, on held-out rows."""


MakeTrainer = Callable[[System], Trainable]


class Task(ABC, Generic[C]):
    """One kind of run."""

    workers: ClassVar[Workers] = WORKERS
    """The classes of the roles that run a model."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def read(self, *, trains: bool = True) -> MakeTrainer:
        """Read the data; returns what makes the trainer, once its processes are there.

        Args:
            trains: False = for one evaluation alone.
        """

    def refuse_untrained(self) -> None:
        """Raise ConfigError if there is nothing to evaluate unless a checkpoint is named."""

    def conclude(self, trainer: Trainable) -> None:
        """After the last step: what the run leaves besides its record and its checkpoints."""

    def outputs(self) -> dict[str, str]:
        """After the last step: further things to look at, title -> path."""
        return {}

    def shortfall(self, before: Metrics, after: Metrics) -> str | None:
        """What the run promised and did not reach, from its first and last evaluation; None = nothing."""
        return None

    @abstractmethod
    def next_command(self) -> str:
        """Something to try now."""

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.config.run.dir)


def task_of(config: Config) -> Task[Any]:
    """The task of this run."""
    kind: type[Task[Any]] = declared(module_of(config.task), Task)
    return kind(config)


def tell_skipped(count: int, what: str) -> None:
    """What data.overlong = skip, or data.unusable = skip, leaves out."""
    if count:
        print(f"warning: {count} {what} and left out", file=sys.stderr, flush=True)
