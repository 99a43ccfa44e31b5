"""How a run ends for whoever started it: before and after, where everything is, what to try next.

Invariant: it is made of the record on disk, so a resumed run concludes as one that was never stopped.
"""

from __future__ import annotations

import sys
from typing import Any

from controllers.trainers.base import Task
from verl_ray.tracking import Sample, Trackers
from verl_ray.tracking.jsonl import read_metrics
from verl_ray.tracking.report import report

SHOWN_SAMPLES = 5


def conclude(task: Task[Any], trackers: Trackers, samples: list[Sample]) -> int:
    """Print the report. Returns 0, or 1 if the run did not reach what it promised."""
    lines = read_metrics(task.folder / "metrics.jsonl")
    evaluated = [{k: v for k, v in line.items() if k.startswith("val-")} for line in lines]
    evaluated = [line for line in evaluated if line]
    before, after = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
    outputs = {"run": str(task.folder), **trackers.outputs(), **task.outputs()}
    report(before, after, samples[:SHOWN_SAMPLES], outputs, task.next_command())
    shortfall = task.shortfall(before, after)
    if shortfall is not None:
        print(shortfall, file=sys.stderr)
    return 0 if shortfall is None else 1
