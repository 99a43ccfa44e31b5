"""Metrics of groups of responses: pass@k, best@k and maj@k beside an average.

Invariant: they follow from the scores and answers in the file of an evaluation, so
their intervals and differences can be computed afterwards. Each is one value per
problem, and is computed once for an evaluation in memory.
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

Float64s = npt.NDArray[np.float64]

_MEAN = "/mean@"
_ACCURACY = "acc"

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
        prefix, _, group_size = name.rpartition(_MEAN)
        if not prefix or int(group_size) == 1:
            continue
        selected = scores.select(np.flatnonzero(names == name))
        for metric, values in _values(prefix, int(group_size), selected).items():
            parts.append(selected.of_metric(metric, values))
    return parts


def group_metric_means(scores: HeldOutScores) -> dict[str, float]:
    """Return the mean over problems of each group metric; NaN where nothing counts."""
    metric_means = {}
    for part in group_metrics(scores):
        values = part.scores[~np.isnan(part.scores)]
        metric_means[part.metrics[0]] = float(values.mean()) if len(values) else nan
    return metric_means


def _values(
    prefix: str, group_size: int, scores: HeldOutScores
) -> Mapping[str, Float64s]:
    """Return the value of each problem in each metric, [problems], by name."""
    aside = prefix.replace("val-core/", "val-aux/", 1)
    values = scores.scores
    is_right_or_wrong = np.isin(values[~np.isnan(values)], (0, 1)).all()
    is_accuracy = prefix.rpartition("/")[2] == _ACCURACY and is_right_or_wrong
    answers = scores.answers
    has_answers = answers is not None and bool((answers != NO_ANSWER).any())

    of_metrics: dict[str, Float64s] = {}
    for k in sample_sizes(group_size):
        if is_accuracy:
            of_metrics[f"{aside}/pass@{k}/mean"] = pass_at(values, k)
        if k == 1:
            continue
        place = prefix if k == group_size else aside
        of_metrics[f"{place}/best@{k}/mean"] = best_of(values, k)
        if has_answers:
            assert answers is not None
            of_metrics[f"{place}/maj@{k}/mean"] = majority_of(values, answers, k)
    return of_metrics
