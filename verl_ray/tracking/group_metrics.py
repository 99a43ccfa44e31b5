"""Metrics of groups of responses to held-out problems: pass@k, best@k and maj@k.

Invariant: they follow from the scores and answers of an evaluation alone, so their
intervals and differences can be computed afterwards. Each is one value per problem, and
is computed once for an evaluation in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.subsets import (
    NO_ANSWER,
    best_of,
    majority_of,
    pass_at,
    sample_sizes,
)
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.held_out_names import ACCURACY, ScoreName

Float64s = npt.NDArray[np.float64]

_COMPUTED: WeakKeyDictionary[HeldOutScores, list[HeldOutScores]] = WeakKeyDictionary()
"""Group metrics of the evaluations that are in memory, which nothing changes."""


def with_group_metrics(scores: HeldOutScores) -> HeldOutScores:
    """Return scores together with those of `group_metrics`."""
    return HeldOutScores.joined([scores, *group_metrics(scores)])


def group_metrics(scores: HeldOutScores) -> list[HeldOutScores]:
    """Return pass@k, best@k and maj@k of each problem, a part per metric.

    They belong to val-{core,aux}/<data source>/{acc,reward}/mean@N with N above 1, and
    a problem that counts there has one value of each. Names are verl's: of best@k and
    maj@k those with k = N are core metrics, and k is 2, 4, 8 and so on up to N. pass@k
    is there for accuracies of 0 and 1, from k = 1 on. maj@k is there for data sources
    with at least one answer.
    """
    if scores not in _COMPUTED:
        _COMPUTED[scores] = _computed(scores)
    return _COMPUTED[scores]


def _computed(scores: HeldOutScores) -> list[HeldOutScores]:
    """Return what `group_metrics` returns, computed anew."""
    names = np.array(scores.metrics)
    parts = []
    for name in dict.fromkeys(scores.metrics):
        parsed = ScoreName.parse(name)
        if parsed is None or parsed.group_size in (None, 1):
            continue
        selected = scores.select(np.flatnonzero(names == name))
        for metric, values in _values(parsed, selected).items():
            parts.append(selected.of_metric(str(metric), values))
    return parts


def group_metric_means(scores: HeldOutScores) -> dict[str, float]:
    """Return the mean over problems of each group metric; NaN where nothing counts."""
    metric_means = {}
    for part in group_metrics(scores):
        values = part.scores[~np.isnan(part.scores)]
        metric_means[part.metrics[0]] = float(values.mean()) if len(values) else nan
    return metric_means


def _values(name: ScoreName, scores: HeldOutScores) -> Mapping[ScoreName, Float64s]:
    """Return the value of each problem in each metric, [problems], by name.

    Args:
        name: The name of the mean over all responses to a problem.
        scores: What counts in it.
    """
    group_size = name.group_size
    assert group_size is not None
    values = scores.scores
    is_right_or_wrong = np.isin(values[~np.isnan(values)], (0, 1)).all()
    is_accuracy = name.kind == ACCURACY and is_right_or_wrong
    answers = scores.answers
    has_answers = answers is not None and bool((answers != NO_ANSWER).any())

    metric_values: dict[ScoreName, Float64s] = {}
    for k in sample_sizes(group_size):
        if is_accuracy:
            pass_k = name.aside.with_statistic(f"pass@{k}/mean")
            metric_values[pass_k] = pass_at(values, k)
        if k == 1:
            continue
        place = name if k == group_size else name.aside
        metric_values[place.with_statistic(f"best@{k}/mean")] = best_of(values, k)
        if has_answers:
            assert answers is not None
            maj_k = place.with_statistic(f"maj@{k}/mean")
            metric_values[maj_k] = majority_of(values, answers, k)
    return metric_values
