"""The report at the end of a run: before and after, outputs, and what to try next.

Invariant: the report is made from the record on disk, so a resumed run reports the same
as a run that was never stopped.

Deliberately not here: the layout of the report (`verl_ray/tracking/report.py`).
"""

from __future__ import annotations

import sys
from typing import Any

from controllers.trainers.base import Task
from controllers.watch.measures import Metrics
from verl_ray.tracking import Sample, Trackers
from verl_ray.tracking.jsonl import METRICS, read_metrics
from verl_ray.tracking.report import report

SHOWN_SAMPLES = 5


def conclude(task: Task[Any, Any], trackers: Trackers, samples: list[Sample]) -> int:
    """Print the report.

    Returns:
        The exit code: 0, or 1 if the run did not reach the gain that it promised.
    """
    before, after = _first_and_last_evaluation(task)
    outputs = {"run": str(task.folder), **trackers.outputs(), **task.outputs()}
    report(before, after, samples[:SHOWN_SAMPLES], outputs, task.next_command())

    shortfall = task.shortfall(before, after)
    if shortfall is None:
        return 0
    print(shortfall, file=sys.stderr)
    return 1


def _first_and_last_evaluation(task: Task[Any, Any]) -> tuple[Metrics, Metrics]:
    """Return the first and the last evaluation of the run; empty if there are none."""
    # Only the lines of evaluated steps have such metrics.
    evaluations = []
    for line in read_metrics(task.folder / METRICS):
        evaluation = {
            name: value for name, value in line.items() if name.startswith("val-")
        }
        if evaluation:
            evaluations.append(evaluation)

    if not evaluations:
        return {}, {}
    return evaluations[0], evaluations[-1]
