"""Two evaluations of a run, compared on the problems that both have.

Invariant: a difference is paired: it is that of the same problem in both evaluations.

Deliberately not here: reading the scores (`evaluations.py`), and showing the result
(`report.py`).
"""

from __future__ import annotations

from math import isnan

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.intervals import Interval, bootstrap, prompt_means
from verl_ray.tracking.evaluations import HeldOutScores

LOWER_IS_BETTER = ("loss", "log_loss", "perplexity")
"""Last parts of the names of held-out metrics that should fall."""


def intervals(scores: HeldOutScores) -> dict[str, Interval]:
    """Return the interval of each metric of an evaluation, by its name."""
    names = dict.fromkeys(scores.metrics)
    return {name: bootstrap(scores.of(name)) for name in names}


def paired_differences(
    before: HeldOutScores, after: HeldOutScores
) -> dict[str, Interval]:
    """Return after less before, by metric, on the problems that both have.

    A metric without such problems is left out.
    """
    old = _means_by_problem(before)
    new = _means_by_problem(after)

    differences: dict[str, list[float]] = {}
    for key, mean in new.items():
        if key in old:
            metric = key[0]
            differences.setdefault(metric, []).append(mean - old[key])

    return {
        metric: bootstrap(np.array(values)) for metric, values in differences.items()
    }


def is_lower_better(name: str) -> bool:
    """Return whether a held-out metric should fall."""
    return name.rpartition("/")[2] in LOWER_IS_BETTER


def _means_by_problem(
    scores: HeldOutScores,
) -> dict[tuple[str, int, str], float]:
    """Return the mean score of each problem that has one, by metric and problem."""
    means: npt.NDArray[np.float64] = prompt_means(scores.scores)
    keys = zip(scores.metrics, scores.problems, scores.digests, strict=True)
    return {
        key: mean
        for key, mean in zip(keys, means.tolist(), strict=True)
        if not isnan(mean)
    }
