"""The command `evaluate`: evaluations on held-out data, without training.

Several checkpoints are measured one after another on the same processes, on the same
problems and with the same seeds, and are compared with the first.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is
written. Each result goes to a folder of its own in run.dir, and replaces no other one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from controllers.commands.usage import CHECKPOINTS
from controllers.run.best import held_out_metrics
from controllers.run.faults import FaultPolicy
from controllers.run.recovery import load_model
from controllers.run.resumption import Resumption
from controllers.run.session import open_session
from controllers.system.build import restart_lost, start
from controllers.system.plan import ClusterShape, facts_on
from controllers.trainers.base import Trainable, read_data, task_of
from controllers.watch.held_out_measures import Evaluation
from verl_ray.algorithms.intervals import Interval
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import is_checkpoint_name
from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.changes import Change, changed_model
from verl_ray.preflight.resolve import resolutions, resolve, with_total_steps
from verl_ray.preflight.tables import print_resolutions
from verl_ray.tracking.block import duration_text, live_block
from verl_ray.tracking.comparison import (
    ComparedModel,
    ComparedRow,
    as_csv,
    as_json,
    compared_rows,
    intervals,
    show_comparison,
)
from verl_ray.tracking.evaluations import write_scores
from verl_ray.tracking.held_out_responses import HeldOutResponse
from verl_ray.tracking.history import TESTING
from verl_ray.tracking.jsonl import finite, unused_path
from verl_ray.tracking.printed_report import HeldOut, Report, show


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the folder that it was written to."""

    model: str
    """Path of what was measured: a checkpoint or a model."""

    name: str
    """Short name of it, for tables."""

    step: int
    evaluation: Evaluation
    intervals: Mapping[str, Interval]
    folder: Path


def evaluate(config: Config, checkpoints: Sequence[str] = ()) -> int:
    """Measure model.path, or the checkpoint of run.resume, and print the result.

    A policy is measured on held-out problems, a reward model on held-out pairs, and a
    supervised model on held-out demonstrations. The metrics, the score of each problem
    and every response are written to run.dir.

    Args:
        config: Configuration as the user gave it, which may hold `auto`.
        checkpoints: Checkpoints to measure one after another and to compare, see
            `candidates`; none to measure one model.
    """
    if not checkpoints:
        show_evaluated(config, evaluation_of(config))
        return 0

    chosen = candidates(config, checkpoints)
    # The setting stands for one checkpoint, and is not resolved to any.
    compared = list(_measured(with_changes(config, {"run.resume": "none"}), chosen))
    folder = _write_comparison(config, compared)
    title = f"{config.run.name}: {len(compared)} models on the same held-out data"
    show_comparison(_comparison(compared), title)
    for evaluated in compared:
        print(f"evaluation of {evaluated.name}: {evaluated.folder}")
    print(f"comparison: {folder}", flush=True)
    return 0


def show_evaluated(config: Config, evaluated: Evaluated) -> None:
    """Print an evaluation."""
    metrics = evaluated.evaluation.metrics
    held_out = held_out_metrics(metrics)
    title = f"{config.run.name}: {evaluated.model} is measured"
    if TESTING in metrics:
        title += f", which took {duration_text(metrics[TESTING])}"
    report = Report(
        title=title,
        after=HeldOut(evaluated.step, held_out, evaluated.intervals),
        samples=evaluated.evaluation.samples,
        outputs={"evaluation": str(evaluated.folder)},
    )
    show(report)


def evaluation_of(requested: Config) -> Evaluated:
    """Evaluate on a cluster, write the result, and return it.

    Args:
        requested: the configuration as the user gave it, which may hold `auto`.
    """
    (evaluated,) = _measured(requested, [only_candidate(requested)])
    return evaluated


@dataclass(frozen=True)
class Begun:
    """A model that is ready to be measured.

    Attributes:
        config: The configuration without `auto`.
        trainer: The trainer, which has published the model.
    """

    config: Config
    trainer: Trainable


def _measured(requested: Config, chosen: Sequence[Candidate]) -> Iterator[Evaluated]:
    """Measure models one after another on the same processes; yield each as it is done.

    The arguments are the first ones of `measuring`.
    """
    # A mistake in the data is reported before any process starts.
    data = read_data(requested, trains=False)
    folders: set[str] = set()
    with measuring(requested, chosen, data) as begin:
        for candidate in chosen:
            begun = begin(candidate)
            evaluation = begun.trainer.evaluate()
            # The responses are read from the processes, which end with this block.
            name = _folder_name(candidate.step, folders)
            yield _write(begun.config, candidate, evaluation, name)


@contextlib.contextmanager
def measuring(
    requested: Config, chosen: Sequence[Candidate], data: Any
) -> Iterator[Callable[[Candidate], Begun]]:
    """Start the processes of an evaluation, and yield what puts a model into them.

    Args:
        requested: The configuration as the user gave it.
        chosen: The models. The base model can only be the first.
        data: What the task has read.
    """
    shown = live_block(requested.run.name, enabled=requested.tracking.console)
    with shown, open_session(requested) as session:
        # Only the roles that an evaluation needs are planned and started.
        shape = ClusterShape.of(session)
        path = None if chosen[0].checkpoint is None else chosen[0].model
        facts = facts_on(requested, shape, checkpoint=path, learns=False)
        config = resolve(requested, facts)
        for candidate in chosen:
            if candidate.resumption is not None:
                candidate.resumption.settle(config)
        print_resolutions(resolutions(requested, facts))
        # An evaluation takes no step, so the number does not matter.
        config = with_total_steps(config, num_examples=1)
        task = task_of(config)

        policy = FaultPolicy(config.run.recovery, Path(config.run.dir))
        with start(
            config,
            session,
            task.workers,
            learns=False,
            may_restart=policy.may_restart,
        ) as system:

            def begin(candidate: Candidate) -> Begun:
                # The processes stay; what they hold is replaced as at a resume.
                if candidate is not chosen[0]:
                    restart_lost(config, system)
                trainer = task.make_trainer(data, system)
                if candidate.checkpoint is not None:
                    role = config.evaluated_role
                    load_model(candidate.checkpoint, trainer, role)
                trainer.begin(candidate.step)
                return Begun(config, trainer)

            yield begin


def _folder_name(step: int, used: set[str]) -> str:
    """Return a name for the results of a step, and note it; runs share steps."""
    first = f"step_{step:06d}"
    names = (first if number == 1 else f"{first}_{number}" for number in count(1))
    name = next(name for name in names if name not in used)
    used.add(name)
    return name


def _write(
    config: Config, candidate: Candidate, evaluation: Evaluation, name: str
) -> Evaluated:
    """Write an evaluation to a new folder, beside older ones of the same name."""
    folder = Path(config.run.dir) / "evaluated" / name
    metric_intervals = {}
    if evaluation.scores is not None:
        metric_intervals = intervals(evaluation.scores)

    tree = to_tree(config)
    model = config.model_roles[config.evaluated_role].model.path
    result = {
        "model": model,
        "checkpoint": None if candidate.checkpoint is None else candidate.model,
        "step": candidate.step,
        "data": [data_set.path for data_set in config.data.validation_sets],
        "settings": tree.get("evaluation"),
        "metrics": finite(evaluation.metrics),
        "intervals": {
            name: finite(asdict(of)) for name, of in metric_intervals.items()
        },
    }
    content = json.dumps(result, indent=1, ensure_ascii=False) + "\n"

    with _whole_folder(folder) as unfinished:
        if evaluation.scores is not None:
            write_scores(unfinished / "scores.jsonl", evaluation.scores)
        _write_responses(unfinished / "responses.jsonl", evaluation.responses)
        replace_file(unfinished / "metrics.json", content.encode())
    return Evaluated(
        model=candidate.model,
        name=candidate.name,
        step=candidate.step,
        evaluation=evaluation,
        intervals=metric_intervals,
        folder=folder,
    )


def _comparison(compared: Sequence[Evaluated]) -> list[ComparedRow]:
    """Return the rows that compare evaluations with the first one."""
    return compared_rows(
        [
            ComparedModel(
                evaluated.name,
                evaluated.step,
                held_out_metrics(evaluated.evaluation.metrics),
                evaluated.intervals,
                evaluated.evaluation.scores,
            )
            for evaluated in compared
        ]
    )


def _write_comparison(config: Config, compared: Sequence[Evaluated]) -> Path:
    """Write the comparison as a table; return its folder."""
    rows = _comparison(compared)
    folder = Path(config.run.dir) / "evaluated" / "comparison"
    with _whole_folder(folder) as unfinished:
        replace_file(unfinished / "comparison.json", as_json(rows).encode())
        replace_file(unfinished / "comparison.csv", as_csv(rows).encode())
    return folder


@contextlib.contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which takes its place once the block has ended.

    A block that fails leaves nothing. An older folder in this place is renamed.
    """
    unfinished = folder.with_name(f"{folder.name}.partial")
    # A process that was killed may have left it.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(unused_path(folder))
    unfinished.rename(folder)


def _write_responses(path: Path, responses: Iterable[HeldOutResponse]) -> None:
    """Write a line per response; no file where the task generates none."""
    file = None
    try:
        for response in responses:
            if file is None:
                file = path.open("w", encoding="utf-8", errors="backslashreplace")
            fields = finite(asdict(response))
            # They say what the text says, many times as long.
            del fields["tokens"]
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    finally:
        if file is not None:
            file.close()


# ------------------------------------------------------------------ what is evaluated

# The models that one call measures: checkpoints, and the base model. All of them are
# found, whole, and of the configured model before anything starts; every problem is
# reported at once. The runs that wrote them may differ in everything else.


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
