"""The result of one evaluation on held-out rows, of any task.

Invariant: metrics, samples and scores are whole when the evaluation returns; responses
are read from the cluster only when somebody goes through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controllers.watch.measures import Metrics
from verl_ray.tracking.base import HeldOutResponse, Sample
from verl_ray.tracking.evaluations import HeldOutScores


@dataclass(frozen=True)
class Evaluation:
    """The findings of an evaluation."""

    metrics: Metrics

    samples: Sequence[Sample] = ()
    """Rollouts to read; none for a task that generates nothing."""

    scores: HeldOutScores | None = None
    """Scores of each problem; None for a task that has none to compare."""

    responses: Iterable[HeldOutResponse] = ()
    """Every response with its score. They can be read while the processes run."""
