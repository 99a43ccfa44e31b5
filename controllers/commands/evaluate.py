"""The command `evaluate`: a single evaluation on held-out data, without training.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is
written. The result goes to a folder of its own in run.dir, and replaces no other one.
Deliberately not here: how a policy or a reward model is measured
(`controllers/trainers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session
from controllers.system.build import start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.base import read_data, task_of
from controllers.watch.evaluation import Evaluation
from verl_ray.algorithms.intervals import Interval
from verl_ray.config.load import to_tree
from verl_ray.config.resolve import with_total_steps
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.tracking.base import HeldOutResponse
from verl_ray.tracking.comparison import intervals
from verl_ray.tracking.evaluations import write_scores
from verl_ray.tracking.jsonl import finite
from verl_ray.tracking.record import unused_path


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the folder that it was written to."""

    evaluation: Evaluation
    intervals: Mapping[str, Interval]
    folder: Path


def evaluate(config: Config) -> int:
    """Measure model.path, or the checkpoint of run.resume, and print the result.

    A policy is measured on held-out problems, a reward model on held-out pairs, and a
    supervised model on held-out demonstrations. The metrics, the score of each problem
    and every response are written to run.dir.
    """
    evaluated = evaluation_of(config)

    for name, value in evaluated.evaluation.metrics.items():
        print(f"{name}: {value:.4f}{_in_words(evaluated.intervals.get(name))}")

    for sample in evaluated.evaluation.samples:
        print(
            f"{sample.prompt!r} -> {sample.response!r} (answer {sample.answer!r}, score"
            f" {sample.score:g})"
        )

    print(f"written to {evaluated.folder}")
    return 0


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
            step = Recovery(resumption).restore(trainer)
            trainer.begin(step)
            evaluation = trainer.evaluate()
            # The responses are read from the processes, which end after this block.
            return _write(config, resumption, step, evaluation)


def _write(
    config: Config, resumption: Resumption, step: int, evaluation: Evaluation
) -> Evaluated:
    """Write an evaluation to a new folder, beside older ones of the same step."""
    folder = Path(config.run.dir) / "evaluated" / f"step_{step:06d}"
    if folder.exists():
        folder.rename(unused_path(folder))
    folder.mkdir(parents=True)

    of_metrics = {}
    if evaluation.scores is not None:
        of_metrics = intervals(evaluation.scores)
        write_scores(folder / "scores.jsonl", evaluation.scores)
    _write_responses(folder / "responses.jsonl", evaluation.responses)

    tree = to_tree(config)
    result = {
        "model": config.model_roles[config.evaluated_role].model.path,
        "checkpoint": resumption.path,
        "step": step,
        "data": config.data.validation_path,
        "settings": tree.get("evaluation"),
        "metrics": finite(evaluation.metrics),
        "intervals": {name: finite(asdict(of)) for name, of in of_metrics.items()},
    }
    content = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    # The metrics come last: a folder that has them is whole.
    replace_file(folder / "metrics.json", content.encode())
    return Evaluated(evaluation, of_metrics, folder)


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


def _in_words(interval: Interval | None) -> str:
    """Return the interval of a metric in words; empty if it has none."""
    if interval is None or not interval.is_telling:
        return ""
    return (
        f"  (95 % interval {interval.low:.4f} to {interval.high:.4f},"
        f" {interval.prompts} problems)"
    )
