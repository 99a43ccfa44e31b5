"""Intervals of held-out scores, by hand and by enumeration."""

import itertools
from math import nan

import numpy as np
import pytest

from verl_ray.algorithms.intervals import bootstrap, prompt_means


def exact(means: list[float], level: float) -> list[float]:
    """The interval over every possible resample, each as likely as any other."""
    resampled = [np.mean(draw) for draw in itertools.product(means, repeat=len(means))]
    return np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2]).tolist()


@pytest.mark.parametrize(
    ("means", "level"),
    [([0.0, 1.0, 1.0], 0.8), ([0.1, 0.9, 0.4, 0.3], 0.75), ([0, 0, 0, 1, 1, 1], 0.95)],
)
def test_the_interval_is_that_of_all_resamples(
    means: list[float], level: float
) -> None:
    interval = bootstrap(np.array(means), level=level, resamples=200_000)
    assert interval.mean == pytest.approx(np.mean(means))
    assert [interval.low, interval.high] == pytest.approx(exact(means, level), abs=1e-9)
    assert interval.prompts == len(means)


def test_a_large_sample_is_nearly_normal() -> None:
    # 400 right of 1,000: the standard error is sqrt(0.4 * 0.6 / 1000) = 0.01549.
    scores = np.repeat([1.0, 0.0], [400, 600])
    interval = bootstrap(scores)
    assert interval.mean == 0.4
    assert interval.low == pytest.approx(0.4 - 1.96 * 0.01549, abs=0.002)
    assert interval.high == pytest.approx(0.4 + 1.96 * 0.01549, abs=0.002)


def test_prompts_are_drawn_and_not_responses() -> None:
    # 16 responses per prompt that are all alike tell no more than one.
    one = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    assert bootstrap(np.repeat(one[:, None], 16, axis=1)) == bootstrap(one)


def test_neither_the_order_nor_a_second_call_changes_it() -> None:
    scores = np.random.default_rng(3).random((50, 4))
    assert bootstrap(scores) == bootstrap(scores) == bootstrap(scores[::-1])
    assert bootstrap(scores, seed=1) != bootstrap(scores)


def test_a_missing_score_is_left_out() -> None:
    scores = np.array([[1.0, nan], [nan, nan], [0.0, 1.0]])
    assert prompt_means(scores).tolist() == pytest.approx([1, nan, 0.5], nan_ok=True)
    assert bootstrap(scores).mean == 0.75 and bootstrap(scores).prompts == 2


def test_what_has_no_interval() -> None:
    assert np.isnan(bootstrap(np.array([])).mean)
    alone = bootstrap(np.array([0.5]))
    assert alone.mean == 0.5 and np.isnan([alone.low, alone.high]).all()
    equal = bootstrap(np.ones(5))
    assert (equal.low, equal.high) == (1, 1)
    assert not equal.is_telling and not alone.is_telling
    assert bootstrap(np.array([0.0, 1.0])).is_telling


def test_a_mean_over_tokens_weighs_prompts_and_draws_them_with_their_weights() -> None:
    losses, tokens = [1.0, 3.0, 2.0], [4.0, 1.0, 2.0]
    interval = bootstrap(
        np.array(losses), weights=np.array(tokens), level=0.8, resamples=200_000
    )
    assert interval.mean == pytest.approx((4 + 3 + 4) / 7)
    resampled = [
        np.average([losses[i] for i in draw], weights=[tokens[i] for i in draw])
        for draw in itertools.product(range(3), repeat=3)
    ]
    exact_bounds = np.quantile(resampled, [0.1, 0.9])
    assert [interval.low, interval.high] == pytest.approx(exact_bounds, abs=1e-9)
    backwards = bootstrap(np.array(losses[::-1]), weights=np.array(tokens[::-1]))
    assert backwards == bootstrap(np.array(losses), weights=np.array(tokens))

    # A prompt without a score takes its weight along.
    with_missing = bootstrap(np.array([*losses, nan]), weights=np.array([*tokens, 9]))
    assert with_missing.mean == interval.mean
