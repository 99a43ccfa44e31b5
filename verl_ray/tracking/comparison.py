"""Two evaluations of a run, compared on the problems that both have.

Invariant: a difference is paired: it is that of the same problem in both evaluations.

Deliberately not here: reading the scores (`evaluations.py`), and showing the result
(`report.py`).
"""

from __future__ import annotations

from math import exp, isnan

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.intervals import Interval, bootstrap, prompt_means
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.group_metrics import with_group_metrics

LOSS = "val-core/held_out/loss"
"""Held-out loss of SFT: the mean over response tokens."""

PERPLEXITY = "val-aux/held_out/perplexity"
"""Exponential of `LOSS`."""

LOWER_IS_BETTER = ("loss", "log_loss", "perplexity")
"""Last parts of the names of held-out metrics that should fall."""


def intervals(scores: HeldOutScores) -> dict[str, Interval]:
    """Return the interval of each metric of an evaluation, by its name.

    Those of groups, such as pass@k, are among them (`group_metrics.py`).
    """
    scores = with_group_metrics(scores)
    names = dict.fromkeys(scores.metrics)
    of_metrics = {
        name: bootstrap(scores.of(name), weights=scores.weights_of(name))
        for name in names
    }
    # The exponential rises, so it maps the bounds of a loss to those of its perplexity.
    if LOSS in of_metrics:
        loss = of_metrics[LOSS]
        of_metrics[PERPLEXITY] = Interval(
            mean=perplexity_of(loss.mean),
            low=perplexity_of(loss.low),
            high=perplexity_of(loss.high),
            prompts=loss.prompts,
        )
    return of_metrics


def paired_differences(
    before: HeldOutScores, after: HeldOutScores
) -> dict[str, Interval]:
    """Return after less before, by metric, on the problems that both have.

    A metric without such problems is left out. Metrics of groups are among them.
    """
    old = _means_by_problem(with_group_metrics(before))
    new = _means_by_problem(with_group_metrics(after))

    # A problem with the same contents has the same weight in both.
    differences: dict[str, list[tuple[float, float]]] = {}
    for key, (mean, weight) in new.items():
        if key in old:
            metric = key[0]
            differences.setdefault(metric, []).append((mean - old[key][0], weight))

    changes = {}
    for metric, pairs in differences.items():
        values, weights = np.array(pairs).T
        changes[metric] = bootstrap(values, weights=weights)
    return changes


def is_lower_better(name: str) -> bool:
    """Return whether a held-out metric should fall."""
    return name.rpartition("/")[2] in LOWER_IS_BETTER


def perplexity_of(loss: float) -> float:
    """Return the exponential of a loss; above 700 it would overflow float64."""
    return exp(min(loss, 700))


def _means_by_problem(
    scores: HeldOutScores,
) -> dict[tuple[str, int, str], tuple[float, float]]:
    """Return the mean score and the weight of each problem, by metric and problem.

    A problem without a score is left out.
    """
    means: npt.NDArray[np.float64] = prompt_means(scores.scores)
    keys = zip(scores.metrics, scores.problems, scores.digests, strict=True)
    values = zip(means.tolist(), scores.row_weights.tolist(), strict=True)
    return {
        key: (mean, weight)
        for key, (mean, weight) in zip(keys, values, strict=True)
        if not isnan(mean)
    }
