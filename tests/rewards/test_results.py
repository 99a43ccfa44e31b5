"""Results of functions as scores, and what they return beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl_ray.rewards.health import Score, ScoreHealth, entries_of, score_of
from verl_ray.rewards.request import scores_fields, scores_from


def test_a_dict_is_a_score_and_its_entries() -> None:
    score = score_of(
        {
            "score": np.float32(0.5), "acc": True, "length": np.int64(3), "none": None,
            "pred": "\ud800 four", "steps": [1, "two"], "late": float("nan"), 7: {1},
            "huge": 10**400, "root": np.complex128(2j),
        }
    )  # fmt: skip
    assert (score.value, score.health) == (0.5, ScoreHealth.OK)
    entries = {
        "acc": 1.0, "length": 3.0, "pred": "\\ud800 four", "steps": '[1, "two"]', "late": "nan", "7": "{1}",
        "huge": str(10**400), "root": "np.complex128(2j)",
    }  # fmt: skip
    assert entries_of(score.entries) == entries
    # They travel as text, and what failed has no number.
    failed = score_of({"score": None, "acc": 0})
    plain = score_of(-0.1)
    sent = scores_from(json.loads(json.dumps(scores_fields([score, failed, plain]))))
    assert (sent[0], sent[2]) == (score, plain) and np.isnan(sent[1].value)
    assert (sent[1].health, sent[1].entries) == (ScoreHealth.NONE, '{"acc": 0.0}')
    json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"reward": 1, "acc": 1}, "a dict with 'reward', 'acc', expected 'score'"),
        ("1.0", "returned str '1.0', expected a number, None, or a dict"),
        ({"score": [1]}, r"returned list \[1\]"),
        (
            np.complex128(1),
            r"returned complex128 np.complex128\(1\+0j\), expected a number",
        ),
        (np.array(1 + 2j, np.complex64), r"returned ndarray array\(1\.\+2\.j"),
    ],
)
def test_other_results_are_refused(result: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        score_of(result)


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        (1e39, "the function returned 1e+39, beyond 1e18"),
        (-1.001e18, "the function returned -1.001e+18, beyond 1e18"),
        (np.float64(-1e300), "the function returned -1e+300, beyond 1e18"),
        (10**400, "the function returned inf"),
        (-(10**400), "the function returned -inf"),
        ({"score": np.nan}, "the function returned nan"),
    ],
)  # fmt: skip
def test_a_number_beyond_the_largest_is_no_score(result: object, detail: str) -> None:
    score = score_of(result)
    assert (score.health, score.detail) == (ScoreHealth.NONFINITE, detail)
    assert np.isnan(score.value)
    # So large one may be, and one that float32 rounds to 0 is a score, too.
    for value in (1e18, -1e18, 1e-300):
        assert score_of(value) == Score(value, ScoreHealth.OK)
