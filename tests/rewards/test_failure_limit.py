"""When failed scores stop a step: by hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ray.rewards.failure_limit import FailureLimit, FruitlessRun


def is_ever_exceeded(limit: float, num_responses: int, failed: list[int]) -> bool:
    """Whether a step is stopped whose scores come one by one; 1 is a failed one."""
    found = FailureLimit(limit, num_responses)
    exceeded = []
    for failure in failed:
        found.add(np.array([failure], np.bool_))
        exceeded.append(found.is_exceeded)
    assert (found.scored, found.failed) == (len(failed), sum(failed))
    return any(exceeded)


@pytest.mark.parametrize(
    ("limit", "allowed"), [(0.1, 12), (0.0, 0), (0.5, 64), (1.0, 128)]
)
def test_the_order_of_scores_decides_nothing(limit: float, allowed: int) -> None:
    """Of 128 scores as many as are allowed may fail, first, last or between."""
    for failed, is_exceeded in ((allowed, False), (allowed + 1, True)):
        if failed > 128:
            continue
        first = [1] * failed + [0] * (128 - failed)
        shuffled = np.random.default_rng(0).permutation(first).tolist()
        for order in (first, first[::-1], shuffled):
            assert is_ever_exceeded(limit, 128, order) is is_exceeded


def test_a_step_ends_with_the_first_score_that_is_too_many() -> None:
    limit = FailureLimit(0.05, 256)  # 5 % are 12.8
    limit.add(np.ones(12, np.bool_))
    assert not limit.is_exceeded
    limit.add(np.ones(1, np.bool_))
    assert limit.is_exceeded


def test_the_first_responses_are_fruitless() -> None:
    run = FruitlessRun(0.2)
    for _ in range(8):
        run.add("the first prompt")
        run.add("another prompt")
        assert not run.is_too_long  # 0.2 ** 2 = 0.04
    run.add("a third prompt")
    assert run.is_too_long and run.responses == 17  # 0.2 ** 3 = 0.008
    never = FruitlessRun(1.0)
    never.add("prompt")
    assert not never.is_too_long


def test_what_has_ever_given_a_score_is_not_fruitless() -> None:
    run = FruitlessRun(0.2)
    run.add("the first prompt")
    run.end()
    for number in range(100):
        run.add(f"prompt {number}")
    assert not run.is_too_long
