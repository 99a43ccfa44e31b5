"""Evaluations of several models side by side: rows, files and table."""

from __future__ import annotations

import csv
import io
import json
from math import isnan

import numpy as np

from verl_ray.tracking.comparison import (
    ComparedModel,
    ComparedRow,
    as_csv,
    as_json,
    compared_rows,
    intervals,
    show_comparison,
)
from verl_ray.tracking.evaluations import HeldOutScores

SUMS = "val-core/sums/acc/mean@1"


def model(name: str, step: int, *scores: float) -> ComparedModel:
    held_out = HeldOutScores(
        problems=range(len(scores)),
        digests=list("abcdefgh"[: len(scores)]),
        metrics=[SUMS] * len(scores),
        scores=np.array(scores, float)[:, None],
    )
    metrics = {SUMS: float(np.mean(scores)), "val-aux/num_prompts": float(len(scores))}
    return ComparedModel(name, step, metrics, intervals(held_out), held_out)


BASE = model("base", 0, 0, 0, 1, 1)
BETTER = model("first/step_10", 10, 1, 0, 1, 1)
WHOLE = model("first/step_20", 20, 1, 1, 1, 1)


def by_hand() -> list[ComparedRow]:
    return compared_rows([BASE, BETTER, WHOLE])


def test_differences_are_paired_with_the_first() -> None:
    rows = [row for row in by_hand() if row.metric == SUMS]
    assert [row.value for row in rows] == [0.5, 0.75, 1.0]
    assert [row.problems for row in rows] == [4, 4, 4]
    assert isnan(rows[0].difference) and rows[0].paired == 0
    assert [row.difference for row in rows[1:]] == [0.25, 0.5]
    assert rows[1].paired == 4
    # No problem became worse, so no draw of problems has a lower bound below 0.
    assert rows[1].difference_low == 0 < rows[1].difference_high < 1
    # It is of the differences, whose spread is not that of the values.
    assert rows[0].low == 0 and rows[0].high == 1

    (count,) = {row.value for row in by_hand() if row.metric == "val-aux/num_prompts"}
    assert count == 4


def test_files_have_every_metric_and_no_nan() -> None:
    rows = by_hand()
    objects = json.loads(as_json(rows))
    assert objects[0]["metric"] == SUMS and objects[0]["difference"] is None
    assert len(objects) == 6

    table = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["name"] for row in table[:3]] == [BASE.name, BETTER.name, WHOLE.name]
    assert [row["difference"] for row in table[:3]] == ["", "0.25", "0.5"]


def test_the_table_shows_core_metrics() -> None:
    stream = io.StringIO()
    show_comparison(by_hand(), "three models", stream, width=80)
    lines = [line.replace("│", " ").split() for line in stream.getvalue().splitlines()]
    assert ["sums/acc/mean@1"] in lines and "num_prompts" not in stream.getvalue()
    assert ["base", "0", "0.5", "[0,", "1]", "-"] in lines
    # All problems are right in each draw, so its interval says nothing.
    last = next(line for line in lines if line[:2] == ["first/step_20", "20"])
    assert last[2:4] == ["1", "+0.5"]


def test_a_task_without_scores_has_no_intervals() -> None:
    bare = ComparedModel("base", 0, {SUMS: 0.5}, {}, None)
    first, second = compared_rows([bare, BETTER])[:2]
    assert (first.value, first.problems) == (0.5, 0) and isnan(first.low)
    assert second.value == 0.75 and isnan(second.difference)
    missing = compared_rows([bare, ComparedModel("other", 1, {}, {}, None)])[1]
    assert isnan(missing.value)
