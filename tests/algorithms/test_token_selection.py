"""Tokens that are chosen from a whole mini-batch: by hand, and whatever the ranks are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from verl_ray.algorithms.token_selection import (
    SelectableTokens,
    largest_covariance,
    largest_entropy,
    random_of_tokens,
    smallest_second_moment,
    some_of_covariance,
)
from verl_ray.columns.stages import Bool
from verl_ray.ops.order_statistics import end_of_prefix, keys_of

Values = NDArray[Any]


class Ranks:
    """Threads in the place of ranks, whose sums wait for each other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[Values] = []
        self._sum: Values | None = None
        self._barrier = threading.Barrier(count)
        self._lock = threading.Lock()

    def total(self, values: Values) -> Values:
        with self._lock:
            self._parts.append(values)
        if self._barrier.wait() == 0:
            self._sum = np.sum(self._parts, axis=0)
            self._parts = []
        self._barrier.wait()
        found = self._sum
        assert found is not None
        self._barrier.wait()
        return found

    def run(self, functions: list[Callable[[], Bool]]) -> list[Bool]:
        with ThreadPoolExecutor(self._count) as pool:
            return [call.result() for call in [pool.submit(each) for each in functions]]


def tokens_of(
    advantages: list[float],
    log_probs: list[float],
    sampler: list[float] | None = None,
    row: int = 0,
) -> SelectableTokens:
    count = len(log_probs)
    return SelectableTokens(
        np.array(advantages, np.float32),
        np.array(log_probs, np.float32),
        np.array(sampler or [0.0] * count, np.float32),
        None,
        random_of_tokens((1, 2), np.full(count, row), np.arange(count)),
        total=lambda values: values,
    )


def test_the_second_moment_by_hand() -> None:
    # Squares of log ratios: 0.01, 0.04, 0.25, 0 and 0.09; from the smallest on their
    # means are 0, 0.005, 0.0167, 0.035 and 0.078.
    tokens = tokens_of([0] * 5, [-1.0] * 5, [-1.1, -1.2, -0.5, -1.0, -0.7])
    for limit, expected in (
        (0.04, [1, 1, 0, 1, 1]),
        (0.03, [1, 1, 0, 1, 0]),
        (0.001, [0, 0, 0, 1, 0]),
        (0.1, [1, 1, 1, 1, 1]),
    ):
        found = smallest_second_moment(tokens, second_moment=limit)
        assert found.tolist() == [bool(each) for each in expected]


def test_covariances_by_hand() -> None:
    # Means 0 and -1.8: the covariances are 3.6, 0, -0.8, 0.8 and 6.4.
    tokens = tokens_of([2, 0, -1, 1, -2], [0.0, -2.0, -1.0, -1.0, -5.0])
    share = {0.2: [4], 0.4: [0, 4], 0.6: [0, 3, 4]}
    for cov_share, places in share.items():
        found = largest_covariance(tokens, cov_share=cov_share)
        assert np.flatnonzero(found).tolist() == places
    # At least one token is chosen.
    assert largest_covariance(tokens, cov_share=1e-4).sum() == 1

    found = some_of_covariance(tokens, cov_share=0.9, cov_min=0.5, cov_max=5.0)
    assert np.flatnonzero(found).tolist() == [0, 3]
    one = some_of_covariance(tokens, cov_share=0.2, cov_min=0.5, cov_max=5.0)
    assert one.sum() == 1 and not (one & ~found).any()
    none = some_of_covariance(tokens, cov_share=0.2, cov_min=7.0, cov_max=9.0)
    assert not none.any()


CHOICES: dict[str, Callable[[SelectableTokens], Bool]] = {
    "m2po": lambda tokens: smallest_second_moment(tokens, second_moment=0.2),
    "entropy": lambda tokens: largest_entropy(tokens, share=0.2),
    "kl_cov": lambda tokens: largest_covariance(tokens, cov_share=0.1),
    "clip_cov": lambda tokens: some_of_covariance(
        tokens, cov_share=0.1, cov_min=-1.0, cov_max=1.0
    ),
}


def part_of(
    values: Values, numbers: Values, places: Bool | slice, total: Any
) -> SelectableTokens:
    """The tokens at some places, of one rank."""
    advantages, log_probs, sampler = (each[places] for each in values)
    return SelectableTokens(
        advantages, log_probs, sampler, advantages, numbers[places], total
    )


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_choose_as_one_would(name: str, ranks: int) -> None:
    """Values repeat, and one rank has no tokens in the last round."""
    random = np.random.default_rng(3)
    for count in (1, 7, 300):
        row, position = random.integers(0, 9, count), np.arange(count)
        values = random.integers(-4, 4, (3, count)).astype(np.float32) / 4
        rank_of = random.integers(0, ranks, count)
        numbers = random_of_tokens((5,), row, position)

        whole = CHOICES[name](part_of(values, numbers, slice(None), lambda each: each))
        group = Ranks(ranks)
        parts = [
            part_of(values, numbers, rank_of == rank, group.total)
            for rank in range(ranks)
        ]
        found = group.run([partial(CHOICES[name], part) for part in parts])
        together = np.zeros(count, np.bool_)
        for rank in range(ranks):
            together[rank_of == rank] = found[rank]
        assert together.tolist() == whole.tolist()


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=60), st.data())
def test_the_largest_are_chosen_exactly(
    values: list[float], data: st.DataObject
) -> None:
    """With log-probs of mean 0 and advantages of ones and minus ones."""
    count = len(values)
    share = data.draw(st.floats(0.02, 0.9))
    tokens = tokens_of(
        [*values, *(-each for each in values)], [1] * count + [-1] * count
    )
    covariance = np.array([*values, *values], np.float32)
    found = largest_covariance(tokens, cov_share=share)
    k = max(int(share * 2 * count), 1)
    assert found.sum() == k
    assert covariance[found].min() >= covariance[~found].max(initial=-np.inf) - 1e-5


def test_random_numbers_follow_from_seed_row_and_position() -> None:
    row, position = np.repeat(np.arange(200), 50), np.tile(np.arange(50), 200)
    numbers = random_of_tokens((7, 3), row, position)
    order = np.random.default_rng(0).permutation(len(row))
    again = random_of_tokens((7, 3), row[order], position[order])
    assert again.tolist() == numbers[order].tolist()
    other = random_of_tokens((7, 4), row, position)
    assert (other != numbers).mean() > 0.999
    # Uniform: ten thousand numbers in ten bins.
    counts = np.histogram(numbers.astype(float), bins=10, range=(0, 2.0**64))[0]
    assert counts.min() > 850 and counts.max() < 1150


def test_no_two_of_a_million_tokens_have_the_same_number() -> None:
    """Of 32 bits, about 116 pairs would."""
    row, position = np.repeat(np.arange(1000), 1000), np.tile(np.arange(1000), 1000)
    assert len(np.unique(random_of_tokens((0, 1, 0, 0), row, position))) == 1_000_000

    # Numbers that differ in their second halves alone are told apart.
    numbers = (np.uint64(7) << np.uint64(32)) + np.arange(4, dtype=np.uint64)
    tokens = replace(tokens_of([1, -1] * 2, [1.0, -1.0] * 2), random=numbers)
    found = some_of_covariance(tokens, cov_share=0.25, cov_min=0.5, cov_max=5.0)
    assert found.tolist() == [False, False, False, True]


def test_a_limit_that_only_rounding_meets_leaves_something_out() -> None:
    """Sums of one round may differ in their last digits from those of the round before."""
    values = np.array([1.0, 1.0, 1.0], np.float32)
    keys = keys_of(values, np.array([1, 2, 3], np.uint32))
    sums = iter([3.3, 3.0, 3.0, 3.0])

    def total(numbers: Values) -> Values:
        # Counts are exact; the first sum of values is a little too large.
        is_count = numbers.sum() == 3 and next(turn)
        return (
            numbers if is_count else numbers * (next(sums) / max(numbers.sum(), 1e-9))
        )

    turn = itertools.cycle([True, False])
    end = end_of_prefix(keys, values.astype(np.float64), 1.05, total)
    assert end == keys.max()
