"""The command `evaluate`: a single evaluation on held-out data, without training.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is
written. The result goes to a folder of its own in run.dir, and replaces no other one.
Deliberately not here: how a policy or a reward model is measured
(`controllers/trainers`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from controllers.run.best import held_out_metrics
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session
from controllers.system.build import start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.base import read_data, task_of
from controllers.watch.evaluation import Evaluation
from verl_ray.algorithms.intervals import Interval
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.preflight.total_steps import with_total_steps
from verl_ray.tracking.base import HeldOutResponse
from verl_ray.tracking.comparison import intervals
from verl_ray.tracking.console import duration_text
from verl_ray.tracking.durations import TESTING
from verl_ray.tracking.evaluations import write_scores
from verl_ray.tracking.jsonl import finite
from verl_ray.tracking.record import unused_path
from verl_ray.tracking.report import HeldOut, Report, show


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the folder that it was written to."""

    model: str
    """Path of what was measured: a checkpoint or a model."""

    step: int
    evaluation: Evaluation
    intervals: Mapping[str, Interval]
    folder: Path


def evaluate(config: Config) -> int:
    """Measure model.path, or the checkpoint of run.resume, and print the result.

    A policy is measured on held-out problems, a reward model on held-out pairs, and a
    supervised model on held-out demonstrations. The metrics, the score of each problem
    and every response are written to run.dir.
    """
    show_evaluated(config, evaluation_of(config))
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
    resumption = Resumption(requested)

    # Some tasks have nothing to measure before they are trained.
    if resumption.step is None:
        task_of(requested).refuse_untrained()

    # A mistake in the data is reported before any process starts.
    data = read_data(requested, trains=False)

    with open_session(requested) as session:
        # Only the roles that an evaluation needs are planned and started.
        shape = ClusterShape.of(session)
        config = resolve_on(requested, shape, checkpoint=resumption.path, learns=False)
        resumption.settle(config)
        # An evaluation takes no step, so the number does not matter.
        config = with_total_steps(config, num_examples=1)
        task = task_of(config)

        with start(config, session, task.workers, learns=False) as system:
            trainer = task.make_trainer(data, system)
            step = Recovery(resumption).restore(trainer, "measuring")
            trainer.begin(step)
            evaluation = trainer.evaluate()
            # The responses are read from the processes, which end after this block.
            return _write(config, resumption, step, evaluation)


def _write(
    config: Config, resumption: Resumption, step: int, evaluation: Evaluation
) -> Evaluated:
    """Write an evaluation to a new folder, beside older ones of the same step."""
    folder = Path(config.run.dir) / "evaluated" / f"step_{step:06d}"
    of_metrics = {}
    if evaluation.scores is not None:
        of_metrics = intervals(evaluation.scores)

    tree = to_tree(config)
    model = config.model_roles[config.evaluated_role].model.path
    result = {
        "model": model,
        "checkpoint": resumption.path,
        "step": step,
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
    measured = resumption.path or model
    return Evaluated(measured, step, evaluation, of_metrics, folder)


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
