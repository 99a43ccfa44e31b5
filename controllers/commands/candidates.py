"""The models that one call of `evaluate` measures: checkpoints, and the base model.

Invariant: all of them are found, whole, and of the configured model before anything
starts; every problem is reported at once. The runs that wrote them may differ in
everything else. Deliberately not here: measuring them (`evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.commands.usage import CHECKPOINTS
from controllers.run.resumption import Resumption
from controllers.trainers.base import task_of
from verl_ray.checkpoint.changes import Change, changed_model
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import is_checkpoint_name
from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem

BASE = "base"
"""Word for the model of model.path, as it is before training."""

ALL = "all"
"""Word for all checkpoints in run.dir, by their steps."""


class MeasuredCheckpoint(Resumption):
    """Finds the checkpoint that run.resume names, to measure its model and no more.

    Raises:
        ConfigError: As for `Resumption`, but only a setting of the measured model may
            not have changed.
    """

    def settle(self, resolved: Config) -> None:
        """Replace the configuration by the resolved one.

        Raises:
            ConfigError: An `auto` setting of the model now stands for another value.
        """
        self.config = resolved
        if self.checkpoint is not None:
            self._changes(self.checkpoint)

    def check_cursor(self, step: int, state: Mapping[str, Any]) -> None:
        """Compare nothing: a measurement draws no rows of the training data."""

    def _changes(self, checkpoint: Checkpoint) -> list[Change]:
        """Return nothing to report, since only the model matters.

        Raises:
            ConfigError: The measured model is another one.
        """
        saved = migrated(checkpoint.config)
        role = self.config.evaluated_role
        self._refuse_changes(
            changed_model(saved, to_tree(self.config), role), checkpoint
        )
        return []


@dataclass(frozen=True)
class Candidate:
    """A model to measure."""

    name: str
    """Name in tables and pictures."""

    model: str
    """Path of the model, or of the checkpoint."""

    resumption: MeasuredCheckpoint | None
    """How its checkpoint was found; None for the base model."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint; None for the base model."""
        return None if self.resumption is None else self.resumption.checkpoint

    @property
    def step(self) -> int:
        """Finished steps; 0 for the base model."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def only_candidate(config: Config) -> Candidate:
    """Return the checkpoint of run.resume, or else the base model.

    Raises:
        ConfigError: The checkpoint cannot be used, or the base model cannot be measured
            before it is trained.
    """
    resumption = MeasuredCheckpoint(config)
    if resumption.path is None:
        return _base(config)
    return Candidate(_name(resumption), resumption.path, resumption)


def candidates(config: Config, words: Sequence[str]) -> list[Candidate]:
    """Return what is to be compared: the base model first, if it is asked for.

    Args:
        config: The configuration as the user gave it.
        words: Paths of checkpoints, or of runs, which stand for their newest one;
            `base`; and `all`.

    Raises:
        ConfigError: All problems of all words.
    """
    problems: list[Problem] = []
    if config.run.resume != "auto":
        rule = f"names one checkpoint, and {CHECKPOINTS} names others"
        fix = "Leave out one of them."
        problems.append(Problem("run.resume", config.run.resume, rule, fix))

    chosen = []
    for word in sorted(dict.fromkeys(words), key=lambda word: word != BASE):
        try:
            if word == BASE:
                chosen.append(_base(config))
            else:
                for path in _paths(config, word):
                    chosen.append(_of_checkpoint(config, path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return [*{candidate.model: candidate for candidate in chosen}.values()]


def _base(config: Config) -> Candidate:
    task_of(config).refuse_untrained()
    model = config.model_roles[config.evaluated_role].model.path
    return Candidate(BASE, model, None)


def _paths(config: Config, word: str) -> Iterator[Path]:
    """Yield the absolute paths that a word stands for."""
    if word != ALL:
        yield Path(word).expanduser().absolute()
        return

    folder = Path(config.run.dir) / "checkpoints"
    paths = sorted(path for path in folder.glob("*") if is_checkpoint_name(path.name))
    if not paths:
        rule = f"{folder} has no checkpoints"
        fix = "Name the run with run.dir, or the paths of checkpoints."
        raise ConfigError([Problem(CHECKPOINTS, word, rule, fix)])
    yield from paths


def _of_checkpoint(config: Config, path: Path) -> Candidate:
    """Return the checkpoint at a path, which the configuration fits."""
    try:
        named = with_changes(config, {"run.resume": str(path)})
        resumption = MeasuredCheckpoint(named)
    except ConfigError as error:
        problems = [_renamed(problem, path) for problem in error.problems]
        raise ConfigError(problems) from error

    if resumption.path is None:
        rule = "is no checkpoint, and a run without any"
        fix = "Give the paths of checkpoints, or of runs that have written some."
        raise ConfigError([Problem(CHECKPOINTS, str(path), rule, fix)])
    return Candidate(_name(resumption), resumption.path, resumption)


def _renamed(problem: Problem, path: Path) -> Problem:
    """Return a problem of a checkpoint as one of the option that names it."""
    if problem.key in ("run.resume", "run.dir"):
        return Problem(CHECKPOINTS, str(path), problem.rule, problem.fix)
    rule = f"{path.name}: {problem.rule}"
    fix = "Leave out this checkpoint, or set the key as it was."
    return Problem(problem.key, problem.value, rule, fix)


def _name(resumption: Resumption) -> str:
    """Return run and step of a checkpoint, as in `first/step_10`."""
    assert resumption.checkpoint is not None, "the caller has found it"
    run = resumption.checkpoint.path.parent.parent.name
    return f"{run}/step_{resumption.checkpoint.step}"
