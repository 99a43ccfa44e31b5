"""pass@k, best@k and maj@k of an evaluation: names, means, intervals, differences."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest

from verl_ray.algorithms.subsets import NO_ANSWER
from verl_ray.tracking.comparison import intervals, paired_differences
from verl_ray.tracking.evaluations import HeldOutScores, read_scores, write_scores
from verl_ray.tracking.group_metrics import group_metric_means, group_metrics
from verl_ray.tracking.held_out_names import ScoreName

N = NO_ANSWER

SCORES = HeldOutScores(
    problems=[0, 1, 2],
    digests=["a", "b", "c"],
    metrics=["val-core/sums/acc/mean@4"] * 2 + ["val-core/texts/reward/mean@4"],
    scores=np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0.5, 0, nan, 0.25]]),
    answers=np.array([[0, 0, 2, 3], [0, 1, N, N], [N, N, N, N]], np.int32),
)


def test_names_and_values_by_hand() -> None:
    assert group_metric_means(SCORES) == pytest.approx(
        {
            "val-aux/sums/acc/pass@1/mean": 1 / 4,
            "val-aux/sums/acc/pass@2/mean": (1 - 1 / 6) / 2,
            "val-aux/sums/acc/best@2/mean": (1 - 1 / 6) / 2,
            "val-aux/sums/acc/maj@2/mean": (3 / 6) / 2,
            "val-aux/sums/acc/pass@4/mean": 1 / 2,
            "val-core/sums/acc/best@4/mean": 1 / 2,
            "val-core/sums/acc/maj@4/mean": 1 / 2,
            # No answers, no accuracies, and no four scores.
            "val-aux/texts/reward/best@2/mean": (0.5 + 0.5 + 0.25) / 3,
            "val-core/texts/reward/best@4/mean": nan,
        },
        nan_ok=True,
    )


@pytest.mark.parametrize(
    "source",
    [
        "a\u2028b",
        "a\u2029b",
        "a\x85b",
        "a\nb",
        "val-core/",
        "x/acc/mean@1",
        "x/mean@y",
        "",
    ],
)
def test_a_data_source_may_have_any_name(tmp_path: Path, source: str) -> None:
    core = ScoreName.of_means(source, "reward", 4)
    assert (str(core), core.group_size) == (f"val-core/{source}/reward/mean@4", 4)
    assert ScoreName.parse(str(core)) == core
    best = core.aside.with_statistic("best@2/mean")
    assert str(best) == f"val-aux/{source}/reward/best@2/mean"
    assert ScoreName.parse(str(best)) == best and best.group_size is None
    # Lengths are no scores, whatever the source is called.
    length = f"val-aux/{source}/response_length/mean"
    assert ScoreName.parse(length) is None

    path = tmp_path / "scores.jsonl"
    scores = replace(SCORES, metrics=[str(core), str(core), length])
    write_scores(path, scores)
    again = read_scores(path)
    assert again.metrics == scores.metrics
    assert group_metric_means(again)[str(best)] == pytest.approx((1 - 1 / 6) / 2)
    assert len(group_metric_means(again)) == 4


def test_one_response_per_problem_makes_no_group() -> None:
    alone = replace(
        SCORES,
        metrics=["val-core/sums/acc/mean@1"] * 3,
        scores=SCORES.scores[:, :1],
        answers=None,
    )
    assert group_metric_means(alone) == {}
    losses = replace(alone, metrics=["val-core/held_out/loss"] * 3)
    assert group_metric_means(losses) == {}


def test_their_intervals_are_over_problems() -> None:
    found = intervals(SCORES)
    best = found["val-core/sums/acc/best@4/mean"]
    # Two problems, of which one is solved: the means of the draws are 0, 1/2 and 1.
    assert (best.mean, best.low, best.high, best.prompts) == (0.5, 0, 1, 2)
    assert found["val-core/sums/acc/mean@4"].mean == 1 / 4
    assert isnan(found["val-core/texts/reward/best@4/mean"].mean)


def test_a_file_keeps_what_they_are_made_of(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    write_scores(path, SCORES)
    lines = path.read_text().splitlines()
    assert lines[1].endswith('"scores":[0,0,0,0],"answers":[0,1,-1,-1]}')
    assert "answers" not in lines[2]
    again = read_scores(path)
    assert group_metric_means(again) == pytest.approx(
        group_metric_means(SCORES), nan_ok=True
    )

    better = replace(SCORES, scores=np.ones((3, 4)))
    change = paired_differences(again, better)["val-core/sums/acc/maj@4/mean"]
    assert (change.mean, change.prompts) == (1 / 2, 2)


def test_they_are_computed_once_for_an_evaluation() -> None:
    first = group_metrics(SCORES)
    intervals(SCORES)
    paired_differences(SCORES, SCORES)
    assert group_metrics(SCORES) is first
    # Other scores have metrics of their own.
    better = replace(SCORES, scores=np.ones((3, 4)))
    assert group_metric_means(better)["val-core/sums/acc/maj@4/mean"] == 1
