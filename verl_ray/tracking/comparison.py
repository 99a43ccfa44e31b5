"""Evaluations compared, of one run or of several models: tables and files.

Invariant: a difference is paired: it is that of the same problem in both evaluations,
and several models are compared with the first one. The files have all metrics with
scores of their own; the table has the core ones.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, isnan, nan
from typing import TextIO

import numpy as np
import numpy.typing as npt
from rich.table import Table

from verl_ray.algorithms.intervals import Interval, bootstrap, prompt_means
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.group_metrics import with_group_metrics
from verl_ray.tracking.jsonl import finite
from verl_ray.tracking.printed_report import plain_console

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
    metric_intervals = {
        name: bootstrap(scores.of(name), weights=scores.weights_of(name))
        for name in names
    }
    # The exponential rises, so it maps the bounds of a loss to those of its perplexity.
    if LOSS in metric_intervals:
        loss = metric_intervals[LOSS]
        metric_intervals[PERPLEXITY] = Interval(
            mean=perplexity_of(loss.mean),
            low=perplexity_of(loss.low),
            high=perplexity_of(loss.high),
            prompts=loss.prompts,
        )
    return metric_intervals


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


# ---------------------------------------------------------------------- several models


@dataclass(frozen=True)
class ComparedModel:
    """The evaluation of a model that is compared with others."""

    name: str
    step: int
    metrics: Mapping[str, float]
    """Held-out metrics."""
    intervals: Mapping[str, Interval]
    """Intervals of some of them, by name."""
    scores: HeldOutScores | None
    """Scores of each problem; None for a task that has none to compare."""


@dataclass(frozen=True)
class ComparedRow:
    """A metric of a model, and its difference to that of the first model.

    What cannot be known is NaN: the interval of a metric without scores of each
    problem, and the difference of the first model to itself.
    """

    metric: str
    name: str
    step: int
    value: float
    low: float
    high: float
    """Bounds of the 95 % interval."""
    problems: int
    """Problems that the metric is of; 0 where it has no interval."""
    difference: float
    """Mean difference to the first model on the problems that both have."""
    difference_low: float
    difference_high: float
    """Bounds of its 95 % interval."""
    paired: int
    """Problems that both have; 0 for the first model."""


_UNKNOWN = Interval(nan, nan, nan, 0)


def compared_rows(models: Sequence[ComparedModel]) -> list[ComparedRow]:
    """Return a row per metric and model, metric by metric."""
    first = models[0]
    changes: list[Mapping[str, Interval]] = [{}]
    for model in models[1:]:
        has_scores = first.scores is not None and model.scores is not None
        changes.append({})
        if has_scores:
            assert first.scores is not None and model.scores is not None
            changes[-1] = paired_differences(first.scores, model.scores)

    names = dict.fromkeys(name for model in models for name in model.metrics)
    rows = []
    for metric in names:
        for model, model_changes in zip(models, changes, strict=True):
            interval = model.intervals.get(metric, _UNKNOWN)
            change = model_changes.get(metric, _UNKNOWN)
            row = ComparedRow(
                metric=metric,
                name=model.name,
                step=model.step,
                value=model.metrics.get(metric, nan),
                low=interval.low,
                high=interval.high,
                problems=interval.prompts,
                difference=change.mean,
                difference_low=change.low,
                difference_high=change.high,
                paired=change.prompts,
            )
            rows.append(row)
    return rows


def as_json(rows: Sequence[ComparedRow]) -> str:
    """Return rows as a JSON list of objects; what is unknown is null."""
    objects = [finite(asdict(row)) for row in rows]
    return json.dumps(objects, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[ComparedRow]) -> str:
    """Return rows as CSV with a header; what is unknown is empty."""
    text = io.StringIO()
    columns = [field.name for field in fields(ComparedRow)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(finite(asdict(row)) for row in rows)
    return text.getvalue()


# ------------------------------------------------------------------------------- table


def show_comparison(
    rows: Sequence[ComparedRow],
    title: str,
    stream: TextIO | None = None,
    width: int | None = None,
) -> None:
    """Print the core metrics of each model.

    Args:
        rows: What `compared_rows` has returned.
        title: What is compared.
        stream: Stream to write to; None for stdout.
        width: Number of columns; None for that of the terminal.
    """
    console = plain_console(stream, width)
    console.print()
    console.print(title, soft_wrap=True)
    for metric, metric_rows in _core(rows):
        console.print(_table(metric.removeprefix(HELD_OUT), metric_rows))


def _table(title: str, rows: Sequence[ComparedRow]) -> Table:
    """Return the table of one metric."""
    table = Table(title=title, title_justify="left")
    table.add_column("checkpoint", overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("value, 95 % interval", justify="right", no_wrap=True)
    table.add_column("to the first, paired", justify="right", no_wrap=True)
    for row in rows:
        value = _text(f"{row.value:.3g}", row.low, row.high, "")
        change = "-"
        if row.paired:
            mean = f"{row.difference:+.3g}"
            change = _text(mean, row.difference_low, row.difference_high, "+")
        table.add_row(row.name, str(row.step), value, change)
    return table


def _core(
    rows: Sequence[ComparedRow],
) -> Iterator[tuple[str, list[ComparedRow]]]:
    """Yield each core metric with its rows."""
    for metric in dict.fromkeys(row.metric for row in rows):
        if metric.startswith(HELD_OUT):
            yield metric, [row for row in rows if row.metric == metric]


def _text(mean: str, low: float, high: float, sign: str) -> str:
    """Return a number with its interval, where it is one that says anything."""
    if isnan(low) or low == high:
        return mean
    return f"{mean} [{low:{sign}.3g}, {high:{sign}.3g}]"
