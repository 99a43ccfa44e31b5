"""Rewards of lengths by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.learning.test_objectives import algorithm
from verl_ray.algorithms.estimators import RewardPart
from verl_ray.algorithms.reward_shaping import (
    LENGTH_REWARDS,
    brevity,
    efficiency,
    overlong_penalty,
)
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.rewards.shaping import length_rewards


def test_the_last_share_of_the_limit_is_penalised() -> None:
    length = np.array([0, 80, 81, 90, 100, 120])
    found = overlong_penalty(length, 100, 0.2)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    # DAPO's own numbers.
    found = overlong_penalty(np.array([16_384, 18_432, 20_480]), 20_480, 0.2)
    assert found.tolist() == pytest.approx([0, -0.5, -1])


def test_short_right_responses_gain_and_wrong_ones_do_not() -> None:
    group = np.array([5, 5, 5, 5, 2, 2, 9])
    length = np.array([10, 20, 30, 10, 7, 7, 3])
    score = np.array([1, 1, 1, 0, 1, 0, 1], np.float32)
    ok = np.ones(7, bool)
    found = brevity(score, ok, length, group)
    assert found.tolist() == pytest.approx([0.5, 0, -0.5, 0, 0, 0, 0])
    # A wrong long one loses.
    score[2] = 0
    assert brevity(score, ok, length, group)[2] == pytest.approx(-0.5)
    # A response without a score is in no group.
    ok[2] = False
    assert brevity(score, ok, length, group).tolist() == pytest.approx(
        [0.5, -0.5, 0, 0, 0, 0, 0]
    )


def test_each_is_returned_with_its_weight() -> None:
    score, ok = np.array([1, np.nan], np.float32), np.array([True, False])
    length, group = np.array([9, 10]), np.array([0, 0])

    def rewards(**settings: float) -> dict[str, RewardPart]:
        return length_rewards(algorithm(**settings), score, ok, length, group, 10)

    assert rewards() == {}
    found = rewards(overlong_share=0.5, brevity=0.1, efficiency=0.5)
    weights = {name: weight for name, (weight, _) in found.items()}
    assert weights == {"overlong_penalty": 1, "brevity": 0.1, "efficiency": 0.5}
    values = {name: values.tolist() for name, (_, values) in found.items()}
    assert values["overlong_penalty"] == pytest.approx([-0.8, 0])
    assert values["brevity"] == values["efficiency"] == [0, 0]


def test_right_responses_gain_by_what_they_are_shorter_than_the_mean() -> None:
    group = np.array([5, 5, 5, 5, 5, 2, 2, 9, 9])
    length = np.array([10, 20, 30, 1, 10, 4, 8, 0, 0])
    score = np.array([2, 2, 2, 1, 3, 0, 0, 1, 1], np.float32)
    ok = np.ones(9, bool)
    # The best response alone is right, and as long as the mean of right ones.
    assert efficiency(score, ok, length, group).tolist() == [0] * 9
    # Without it the mean is 20; a long one loses nothing, and others are not compared.
    ok[4] = False
    found = efficiency(score, ok, length, group)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([2 * (1 - 10 / 20), 0, 0, 0, 0, 0, 0, 0, 0])
    # What differs from the best by rounding is as right.
    score[0] = np.nextafter(np.float32(2), np.float32(0))
    assert efficiency(score, ok, length, group)[0] == pytest.approx(1)


def test_every_reward_of_a_length_has_a_weight() -> None:
    for name in LENGTH_REWARDS:
        assert AlgorithmConfig.model_fields[name].default is None
