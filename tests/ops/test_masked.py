"""Moments: additive over any split, indifferent to masked values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.ops.masked import Moments, explained_variance, whiten


def test_by_hand() -> None:
    moments = Moments.of(np.array([1, 2, 3, 6], dtype=np.float32))
    assert moments == Moments(4, 12, 50)
    assert (
        moments.mean == 3
        and moments.variance == 3.5
        and moments.std == pytest.approx(1.870829)
    )


def test_masked_values_are_not_looked_at() -> None:
    values = np.array([1, math.nan, 3, math.inf], dtype=np.float32)
    assert Moments.of(values, np.array([True, False, True, False])) == Moments(2, 4, 10)


def test_a_nan_that_counts_is_no_zero_variance() -> None:
    values = np.array([1, math.nan, 3], dtype=np.float32)
    moments = Moments.of(values)
    assert math.isnan(moments.variance) and np.isnan(whiten(values, moments)).all()


def test_weights_count_as_repetitions() -> None:
    values = np.array([1, 5], dtype=np.float32)
    assert Moments.of(values, np.array([3, 1])) == Moments.of(
        np.array([1, 1, 1, 5], dtype=np.float32)
    )


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50),
    st.lists(st.integers(0, 50), max_size=5),
)
def test_any_split_in_any_order_gives_the_same(
    values: list[float], cuts: list[int]
) -> None:
    array = np.array(values, dtype=np.float32)
    whole = Moments.of(array)
    shuffled = np.sort(array)
    parts = np.split(shuffled, sorted(min(cut, len(values)) for cut in cuts))
    total = sum((Moments.of(part) for part in parts), Moments(0, 0, 0))
    assert total.count == whole.count
    assert total.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9)
    assert total.std == pytest.approx(
        float(array.astype(np.float64).std()), rel=1e-5, abs=1e-4
    )


@given(st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=50, unique=True))
def test_whitened_values_have_mean_zero_and_standard_deviation_one(
    values: list[float],
) -> None:
    array = np.array(values, dtype=np.float32)
    whitened = whiten(array, Moments.of(array)).astype(np.float64)
    if Moments.of(array).std > 0:
        assert whitened.mean() == pytest.approx(0, abs=1e-5)
        assert whitened.std() == pytest.approx(1, abs=1e-4)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 1000))
def test_equal_values_whiten_to_zero_not_to_rounding(value: float, count: int) -> None:
    array = np.full(count, value, dtype=np.float32)
    # What should add up to 0 does not quite.
    around_zero = np.resize(np.float32([0, -1.1e-16, 5.55e-17]), count)
    for same in (array, around_zero):
        assert Moments.of(same).std == 0
        assert not whiten(same, Moments.of(same)).any()


def test_nothing() -> None:
    nothing = Moments.of(np.empty(0, dtype=np.float32))
    assert (
        nothing == Moments(0, 0, 0)
        and math.isnan(nothing.mean)
        and math.isnan(nothing.std)
    )
    assert whiten(np.empty(0, dtype=np.float32), nothing).shape == (0,)


def test_explained_variance() -> None:
    returns = np.array([0, 2, 4, 6], dtype=np.float32)
    of = Moments.of
    assert explained_variance(of(returns - returns), of(returns)) == 1
    assert explained_variance(of(returns - 3), of(returns)) == 0
    assert explained_variance(
        of(returns - np.array([1, 1, 5, 5])), of(returns)
    ) == pytest.approx(0.8)
    assert math.isnan(explained_variance(of(returns), of(np.ones(4))))
