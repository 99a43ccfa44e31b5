"""The kinds of health, their numbers and their metric names."""

from __future__ import annotations

import math
import pickle

from verl_ray.rewards.health import Score, ScoreHealth, health_metrics


def test_numbers_are_stable() -> None:
    assert [(h.name, h.value) for h in ScoreHealth] == [
        ("OK", 0),
        ("TIMEOUT", 1),
        ("EXCEPTION", 2),
        ("NONFINITE", 3),
        ("NONE", 4),
        ("UNAVAILABLE", 5),
        ("UNPARSED", 6),
        ("TOO_LONG", 7),
        ("DROPPED", 8),
    ]


def test_metrics_count_every_kind() -> None:
    # uint8 columns arrive as plain integers
    assert health_metrics([ScoreHealth.OK, 0, 0, 1, ScoreHealth.NONE]) == {
        "reward_health/ok": 3.0,
        "reward_health/timeout": 1.0,
        "reward_health/exception": 0.0,
        "reward_health/nonfinite": 0.0,
        "reward_health/none": 1.0,
        "reward_health/unavailable": 0.0,
        "reward_health/unparsed": 0.0,
        "reward_health/too_long": 0.0,
        "reward_health/dropped": 0.0,
    }


def test_score_survives_pickling() -> None:
    score = pickle.loads(pickle.dumps(Score(math.nan, ScoreHealth.TIMEOUT, "late")))
    assert math.isnan(score.value)
    assert (score.health, score.detail) == (ScoreHealth.TIMEOUT, "late")
