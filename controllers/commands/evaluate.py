"""The command `evaluate`: evaluations on held-out data, without training.

Several checkpoints are measured one after another on the same processes, on the same
problems and with the same seeds, and are compared with the first.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is
written. Each result goes to a folder of its own in run.dir, and replaces no other one.
Deliberately not here: which models are compared (`candidates.py`), and how a policy or
a reward model is measured (`controllers/trainers`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from controllers.commands.candidates import Candidate, candidates, only_candidate
from controllers.run.best import held_out_metrics
from controllers.run.faults import FaultPolicy
from controllers.run.restoring import load_model
from controllers.run.session import open_session
from controllers.system.build import start
from controllers.system.plan import ClusterShape, facts_on
from controllers.system.restart import restart_lost
from controllers.trainers.base import read_data, task_of
from controllers.watch.evaluation import Evaluation
from verl_ray.algorithms.intervals import Interval
from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resolved_table import print_resolutions
from verl_ray.preflight.total_steps import with_total_steps
from verl_ray.tracking.base import HeldOutResponse
from verl_ray.tracking.comparison import (
    ComparedModel,
    ComparedRow,
    as_csv,
    as_json,
    compared_rows,
    comparison_picture,
    intervals,
    show_comparison,
)
from verl_ray.tracking.console import duration_text
from verl_ray.tracking.evaluations import write_scores
from verl_ray.tracking.history import TESTING
from verl_ray.tracking.jsonl import finite
from verl_ray.tracking.record import unused_path
from verl_ray.tracking.report import HeldOut, Report, show


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


def _measured(requested: Config, chosen: Sequence[Candidate]) -> Iterator[Evaluated]:
    """Measure models one after another on the same processes; yield each as it is done.

    Args:
        requested: The configuration as the user gave it.
        chosen: The models. The base model can only be the first.
    """
    # A mistake in the data is reported before any process starts.
    data = read_data(requested, trains=False)

    with open_session(requested) as session:
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
            folders: set[str] = set()
            for number, candidate in enumerate(chosen):
                # The processes stay; what they hold is replaced as at a resume.
                if number:
                    restart_lost(config, system)
                trainer = task.make_trainer(data, system)
                if candidate.checkpoint is not None:
                    role = config.evaluated_role
                    load_model(candidate.checkpoint, trainer, role)
                trainer.begin(candidate.step)
                evaluation = trainer.evaluate()
                # The responses are read from the processes, which end with this block.
                name = _folder_name(candidate.step, folders)
                yield _write(config, candidate, evaluation, name)


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
    of_metrics = {}
    if evaluation.scores is not None:
        of_metrics = intervals(evaluation.scores)

    tree = to_tree(config)
    model = config.model_roles[config.evaluated_role].model.path
    result = {
        "model": model,
        "checkpoint": None if candidate.checkpoint is None else candidate.model,
        "step": candidate.step,
        "data": [data_set.path for data_set in config.data.validation_sets],
        "settings": tree.get("evaluation"),
        "metrics": finite(evaluation.metrics),
        "intervals": {name: finite(asdict(of)) for name, of in of_metrics.items()},
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
        intervals=of_metrics,
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
    """Write the comparison as a table and a picture; return its folder."""
    rows = _comparison(compared)
    folder = Path(config.run.dir) / "evaluated" / "comparison"
    with _whole_folder(folder) as unfinished:
        replace_file(unfinished / "comparison.json", as_json(rows).encode())
        replace_file(unfinished / "comparison.csv", as_csv(rows).encode())
        replace_file(unfinished / "comparison.png", comparison_picture(rows))
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
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    finally:
        if file is not None:
            file.close()
