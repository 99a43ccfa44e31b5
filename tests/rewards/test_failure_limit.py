"""When failed scores stop a step: by hand-computed numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from verl_ray.rewards.failure_limit import (
    FailureLimit,
    FruitlessRun,
    chance_at_limit,
)


def piece(limit: FailureLimit, groups: Sequence[int], failed: Sequence[int]) -> bool:
    limit.add(np.array(groups), np.array(failed, np.bool_))
    return limit.is_exceeded


@pytest.mark.parametrize(
    ("mean", "count", "limit", "chance"),
    [
        (1.0, 2, 0.05, 0.05**2),  # all of them: the product of the probabilities
        (1.0, 3, 0.1, 0.001),
        (0.5, 16, 0.05, (4 * 0.05 * 0.95) ** 8),  # half: (4 p (1 - p)) ** (n / 2)
        (0.05, 100, 0.05, 1.0),
        (0.01, 100, 0.05, 1.0),
        (0.5, 1, 0.0, 0.0),
        (1.0, 100, 1.0, 1.0),
    ],
)
def test_the_bound_on_how_probable_so_many_failures_are(
    mean: float, count: int, limit: float, chance: float
) -> None:
    assert chance_at_limit(mean, count, limit) == pytest.approx(chance)


def test_more_failures_than_the_step_may_have_exceed_the_limit() -> None:
    # 5 % of 256 are 12.8, all of one prompt, which tells nothing else.
    limit = FailureLimit(0.05, 256, proven=False)
    assert not piece(limit, [0] * 12, [1] * 12)
    assert piece(limit, [0], [1])
    assert (limit.failed, limit.scored) == (13, 13)


def test_a_failure_in_a_small_first_piece_is_within_the_limit() -> None:
    assert not piece(FailureLimit(0.05, 256, proven=False), [0, 1, 2, 3], [0, 1, 0, 0])


def test_half_of_the_rows_exceed_the_limit_in_the_first_piece() -> None:
    # 16 prompts: 0.19 ** 8 = 1.7e-6, which is enough for a grader not yet proven.
    half = [0, 1] * 8
    assert piece(FailureLimit(0.05, 256, proven=False), range(16), half)
    assert not piece(FailureLimit(0.05, 256, proven=True), range(16), half)


def test_one_bad_record_is_no_broken_grader() -> None:
    # All 8 responses to the first prompt fail; then those to a second one: 0.05 ** 2.
    limit = FailureLimit(0.05, 1024, proven=False)
    assert not piece(limit, [7] * 8, [1] * 8)
    assert piece(limit, [3] * 8, [1] * 8)


def test_a_proven_grader_needs_five_prompts_that_fail() -> None:
    # 0.05 ** 4 = 6e-6 and 0.05 ** 5 = 3e-7, around one in a million.
    limit = FailureLimit(0.05, 1024, proven=True)
    assert not piece(limit, [0, 1, 2, 3], [1] * 4)
    assert piece(limit, [4], [1])


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.3, 1.0])
def test_a_step_without_failures_is_within_any_limit(limit: float) -> None:
    assert not piece(FailureLimit(limit, 8, proven=False), range(8), [0] * 8)


def test_fruitless_responses_in_a_row() -> None:
    run = FruitlessRun(0.2)
    for _ in range(8):
        run.add("the first prompt")
        run.add("another prompt")
        assert not run.is_too_long  # 0.2 ** 2 = 0.04
    run.add("a third prompt")
    assert run.is_too_long and run.responses == 17  # 0.2 ** 3 = 0.008
    run.end()
    for number in range(8):
        run.add(f"prompt {number}")
        assert not run.is_too_long  # 0.2 ** 8 = 2.6e-6
    run.add("prompt 8")
    assert run.is_too_long and run.responses == 9  # 0.2 ** 9 = 5.1e-7
    never = FruitlessRun(1.0)
    never.add("prompt")
    assert not never.is_too_long
