"""Scores of held-out problems: written, read, and compared."""

import json
from math import nan
from pathlib import Path

import numpy as np
import pytest

from verl_ray.errors import TrackingError
from verl_ray.tracking.comparison import (
    LOSS,
    PERPLEXITY,
    intervals,
    paired_differences,
)
from verl_ray.tracking.evaluations import (
    HeldOutScores,
    digest,
    read_scores,
    recorded_evaluations,
    scores_path,
    write_scores,
)
from verl_ray.tracking.jsonl import JsonlTracker

SUMS = "val-core/sums/acc/mean@2"
TEXTS = "val-core/texts/acc/mean@2"


def evaluation(*scores: list[float], digests: str = "abcd") -> HeldOutScores:
    """Scores of problems 0, 2, 4, ..., of which the last one is a text."""
    count = len(scores)
    return HeldOutScores(
        problems=range(0, 2 * count, 2),
        digests=list(digests[:count]),
        metrics=[*[SUMS] * (count - 1), TEXTS],
        scores=np.array(scores, dtype=np.float64),
    )


FIRST = evaluation([0, 1], [0, 0], [1, nan], [0.1, 0.2])


def test_the_file_has_a_short_line_per_problem(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "step_000010.jsonl"
    assert scores_path(tmp_path, 10) == path
    write_scores(path, FIRST)

    lines = path.read_text().splitlines()
    assert (
        lines[0] == '{"problem":0,"digest":"a",'
        '"metric":"val-core/sums/acc/mean@2","scores":[0,1]}'
    )
    assert json.loads(lines[2])["scores"] == [1, None]

    again = read_scores(path)
    assert again.problems == [0, 2, 4, 6] and again.digests == list("abcd")
    np.testing.assert_array_equal(again.scores, FIRST.scores)
    assert np.nanmean(again.of(SUMS)) == pytest.approx(2 / 5)

    path.write_text("{}\n")
    with pytest.raises(TrackingError, match=r"step_000010\.jsonl: cannot be read"):
        read_scores(path)


def test_the_scores_of_steps_that_run_again_are_dropped(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in (0, 2, 4):
        tracker.scores(step, FIRST)
    assert list(recorded_evaluations(tmp_path)) == [0, 2, 4]
    tracker.close(failed=True)
    JsonlTracker(tmp_path, committed_step=3).close(False)
    assert list(recorded_evaluations(tmp_path)) == [0, 2]


def test_the_change_is_that_of_the_same_problems() -> None:
    # The second problem is another one now, and the fourth, a text, is gone.
    last = evaluation([1, 1], [1, 1], [1, 0], digests="axc")
    last = HeldOutScores(last.problems, last.digests, [SUMS] * 3, last.scores)
    changes = paired_differences(FIRST, last)
    # Those of groups are beside it.
    assert {name for name in changes if "mean@" in name} == {SUMS}
    assert changes[SUMS].prompts == 2
    assert changes[SUMS].mean == 0  # (1 - 0.5) and (0.5 - 1)

    by_metric = intervals(FIRST)
    assert by_metric[SUMS].mean == 0.5 and by_metric[SUMS].prompts == 3
    assert by_metric[TEXTS].mean == pytest.approx(0.15)


def test_a_paired_difference_is_surer_than_two_means() -> None:
    hard = np.tile([0.0, 1.0], 50)
    better = hard.copy()
    better[:10:2] = 1
    names = [SUMS] * 100

    def scores(values: np.ndarray) -> HeldOutScores:
        return HeldOutScores(range(100), ["a"] * 100, names, values[:, None])

    change = paired_differences(scores(hard), scores(better))[SUMS]
    assert change.mean == pytest.approx(0.05) and change.low > 0
    assert intervals(scores(better))[SUMS].low < 0.5


def test_a_problem_is_known_by_its_contents() -> None:
    assert digest(b"1+1=", b"2") == digest(b"1+1=", b"2")
    assert digest(b"1+1=", b"2") != digest(b"1+1", b"=2")
    assert len(digest(b"")) == 8


def test_a_loss_counts_by_tokens_and_its_perplexity_has_its_bounds(
    tmp_path: Path,
) -> None:
    def losses(*values: float) -> HeldOutScores:
        return HeldOutScores(
            problems=[0, 0, 1, 1],
            digests=list("aabb"),
            metrics=["acc", LOSS] * 2,
            scores=np.array([1, values[0], 0, values[1]])[:, None],
            weights=np.array([1.0, 3.0, 1.0, 1.0]),
        )

    path = tmp_path / "scores.jsonl"
    write_scores(path, losses(1, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("weight") for line in lines] == [None, 3, None, None]

    before, after = read_scores(path), losses(0.5, 3)
    by_metric = intervals(before)
    loss, perplexity = by_metric[LOSS], by_metric[PERPLEXITY]
    assert by_metric["acc"].mean == 0.5 and loss.mean == (3 * 1 + 2) / 4
    assert [perplexity.mean, perplexity.low] == np.exp([loss.mean, 1]).tolist()
    change = paired_differences(before, after)[LOSS]
    assert change.mean == (3 * -0.5 + 1) / 4
