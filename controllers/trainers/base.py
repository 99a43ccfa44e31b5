"""The interface of a task and of its trainer, as the loop around the steps uses them.

Invariant: what sets one task apart from another is in its own file (`rl.py`, `sft.py`,
`reward_model.py`), next to its trainer. All other code that depends on the task of a
run uses its configuration or its `Task`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from controllers.system.build import System
from controllers.system.plan import WORKERS, Workers
from controllers.tasks import task_module
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import Background
from verl_ray.config.schema import Config
from verl_ray.config.tasks import declared_class
from verl_ray.errors import ConfigError, DataError
from verl_ray.preflight.data_files import data_problem
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import machine_of
from verl_ray.preflight.resolve import resolve
from verl_ray.profiling.phases import Timers, phase

C = TypeVar("C", bound=Config)
D = TypeVar("D")


class StateFiles(Protocol):
    """The larger part of the driver's state, as it was when this was made."""

    def write(self, checkpoint: Path) -> None:
        """Write it to the folder of a checkpoint, and what belongs beside it."""

    def keep(self, snapshot: Path) -> None:
        """Write it to the folder of a snapshot, which stays there alone."""


class Resumable(Protocol):
    """The state of a trainer that a checkpoint holds."""

    @property
    def groups(self) -> Mapping[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds, by name."""

    @property
    def background(self) -> Background | None:
        """Return what goes on between steps; None if nothing does.

        If it fails, the next step does, and no checkpoint.
        """

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    @property
    def supply_memory(self) -> object:
        """Memory that belongs to the last state, for `inherit` in the same driver."""

    def inherit(self, former: Resumable, supply_memory: Any) -> None:
        """Take over what a former trainer of this process knows beyond its state.

        Args:
            former: The other trainer, which was in the state that this one has loaded.
            supply_memory: Those of the state.
        """

    def files(self, step: int) -> StateFiles | None:
        """Return the larger part of the driver's state; None if there is none.

        Args:
            step: The last finished step.
        """

    def load_files(self, checkpoint: Path) -> None:
        """Take back what `StateFiles.write` wrote to the folder of a checkpoint."""

    def take_back(self, snapshot: Path) -> None:
        """Take back what `StateFiles.keep` wrote to the folder of a snapshot."""


class Trainable(Resumable, Protocol):
    """The trainer of one run, as the loop uses it."""

    timers: Timers

    @property
    def finished(self) -> bool:
        """Whether the trainer has reached its goal before the last step."""

    def begin(self, done: int) -> None:
        """Prepare the first step, after `done` steps have been restored."""

    def step(self, number: int) -> Metrics:
        """Run training step `number`, counted from 1. Return its metrics."""

    def draw_ahead(self) -> None:
        """Begin what the next steps need, once a step is committed.

        If that fails, the next step does.
        """

    def evaluate(self) -> Evaluation:
        """Evaluate the trained model on held-out rows."""


class Task(ABC, Generic[C, D]):
    """One kind of run. A subclass declares everything that sets the task apart.

    `C` is the type of its configuration, and `D` what it reads of the data files.
    """

    workers: ClassVar[Workers] = WORKERS
    """The classes of the roles that run a model."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def read(self, *, trains: bool = True) -> D:
        """Read and tokenize the data, before any process starts.

        Args:
            trains: False for a run that only evaluates once.

        Raises:
            DataError: The data cannot be used.
        """

    def num_examples(self, data: D) -> int | None:
        """Return the number of examples to learn from, for run.total_epochs.

        A task without this answer takes only run.total_steps.
        """
        return None

    @abstractmethod
    def make_trainer(self, data: D, system: System) -> Trainable:
        """Make the trainer of a run from what `read` returned and running processes."""

    def refuse_untrained(self) -> None:
        """Check that the model can be evaluated where no checkpoint is named.

        Raises:
            ConfigError: The model has not been trained for this task.
        """

    def conclude(self, trainer: Trainable) -> None:
        """Write further results after the last step.

        The record of the run and its checkpoints are written elsewhere.
        """

    def outputs(self) -> dict[str, str]:
        """Return where a person finds the further results, as title -> path."""
        return {}

    def shortfall(self, before: Metrics, after: Metrics) -> str | None:
        """Return what the run promised and did not reach, or None.

        Args:
            before: Metrics of the first evaluation.
            after: Metrics of the last evaluation.
        """
        return None

    @property
    def folder(self) -> Path:
        """The directory that the run writes to."""
        return Path(self.config.run.dir)


def task_of(config: Config) -> Task[Any, Any]:
    """Return the task of a run."""
    module = task_module(config.task)
    task_class: type[Task[Any, Any]] = declared_class(module, Task)
    return task_class(config)


def read_data(config: Config, *, trains: bool = True) -> Any:
    """Read the data of a run whose cluster is not known yet.

    What is read follows from files alone. The settings of the cluster, which are
    assumed to be those of this machine, change nothing.

    Args:
        config: Configuration of the run, which may hold `auto`.
        trains: False for a run that only evaluates once.

    Raises:
        ConfigError: The data cannot be used.
    """
    facts = facts_here(config, machine_of(config), learns=trains)
    try:
        with phase("reading the data"):
            return task_of(resolve(config, facts)).read(trains=trains)
    except DataError as error:
        # Both are read.
        key = "data.train_path"
        data_sets = config.data.train_sets
        held_out = config.data.validation_sets
        if any(error.is_about(data_set.path) for data_set in held_out):
            key = "data.validation_path"
            data_sets = held_out
        problem = data_problem(key, data_sets, error)
        raise ConfigError([problem]) from error


def warn_skipped(skipped: Mapping[str, int], what: str) -> None:
    """Report records that are left out by data.overlong=skip or data.unusable=skip.

    Args:
        skipped: Number of records by the reason. Nothing is printed for 0.
        what: The records, such as "rows of the training data".
    """
    for reason, count in skipped.items():
        if count:
            defect = reason.replace("_", " ")
            warning = f"warning: {count} {what} are {defect} and left out"
            print(warning, file=sys.stderr, flush=True)
