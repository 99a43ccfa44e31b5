"""Advantages: by hand, against naive loops, and in the corners where implementations go wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ray.algorithms.advantages import (
    ADVANTAGES,
    CriticBaseline,
    Float64,
    GroupBaseline,
    NoBaseline,
    discounted_returns,
    gae,
    grpo,
    rloo,
    subtract_group_mean,
)
from verl_ray.config.algorithm import AdvantageName
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import Bool, Float32

ROW_FUNCTIONS = (grpo, subtract_group_mean, rloo)


def f32(*values: float) -> Float32:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def valid(count: int, *failed: int) -> Bool:
    mask = np.ones(count, dtype=bool)
    mask[list(failed)] = False
    return mask


# ------------------------------------------------------------------------------------------------------- by name


def test_every_configured_name_exists_and_says_what_it_needs() -> None:
    assert set(ADVANTAGES) == set(get_args(AdvantageName))
    needs = {name: (a.level, a.needs_critic, a.needs_group) for name, a in ADVANTAGES.items()}
    assert needs["gae"] == ("token", True, False)
    assert needs["reinforce_plus_plus"] == ("token", False, False)
    assert {needs[name] for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")} == {
        ("row", False, True)
    }


def test_the_kind_of_an_entry_tells_how_to_call_it() -> None:
    for advantage in ADVANTAGES.values():
        if isinstance(advantage, GroupBaseline):
            assert advantage.function(f32(0, 1), ids(0, 0), valid(2)).shape == (2,)
        elif isinstance(advantage, CriticBaseline):
            assert advantage.function(f32(0, 1), f32(0, 0), ids(0, 2), f32(0), 1.0, 1.0)[0].shape == (2,)
        elif isinstance(advantage, NoBaseline):
            assert advantage.function(f32(0, 1), ids(0, 2), 1.0).shape == (2,)


# ------------------------------------------------------------------------------------------------------- row level


def test_row_functions_by_hand() -> None:
    rewards, group = f32(1, 10, 3, 20, 5), ids(7, 2, 7, 2, 7)  # group 7: 1, 3, 5; group 2: 10, 20
    assert grpo(rewards, group, valid(5)) == pytest.approx([-1, -(0.5**0.5), 0, 0.5**0.5, 1], rel=1e-5)
    assert subtract_group_mean(rewards, group, valid(5)).tolist() == [-2, -5, 0, 5, 2]
    assert rloo(rewards, group, valid(5)).tolist() == [1 - 4, 10 - 20, 3 - 3, 20 - 10, 5 - 2]


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_a_group_of_one_or_of_equal_rewards_gives_exactly_zero(function: Callable[..., Float32]) -> None:
    rewards = f32(0.1, 0.1, 0.1, 0.7, 0.3, 1e30)
    advantages = function(rewards, ids(0, 0, 0, 1, 2, 3), valid(6))
    assert advantages.tolist() == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@given(value=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 300))
def test_equal_rewards_give_exactly_zero_whatever_they_are(
    function: Callable[..., Float32], value: float, count: int
) -> None:
    assert not function(np.full(count, value, dtype=np.float32), np.zeros(count, dtype=np.int64), valid(count)).any()


def test_rewards_that_differ_by_rounding_do_not_explode() -> None:
    """A leave-one-out standard deviation of three equal rewards once divided by nearly nothing."""
    advantages = grpo(f32(0.5, 0.5, 0.5, np.nextafter(np.float32(0.5), np.float32(1))), ids(0, 0, 0, 0), valid(4))
    assert np.abs(advantages).max() < 0.1
    assert np.abs(grpo(f32(0, 0, 0, 1), ids(0, 0, 0, 0), valid(4))).max() == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_a_failed_reward_poisons_nobody_and_gets_zero(function: Callable[..., Float32]) -> None:
    rewards, group = f32(1, np.nan, 3, np.inf, 5, np.nan), ids(0, 0, 0, 0, 0, 1)
    advantages = function(rewards, group, valid(6, 1, 3, 5))
    alone = function(f32(1, 3, 5), ids(0, 0, 0), valid(3))
    assert advantages[[0, 2, 4]].tolist() == alone.tolist()
    assert advantages[[1, 3, 5]].tolist() == [0, 0, 0]
    # One valid row left: no baseline, so nothing to say.
    assert not function(f32(1, np.nan), ids(0, 0), valid(2, 1)).any()


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_rows_of_one_trajectory_count_once(function: Callable[..., Float32]) -> None:
    """A trajectory of three rows against two of one: as if there were three rows in all."""
    rewards, trajectory = f32(4, 4, 4, 1, 1), ids(8, 8, 8, 3, 5)
    advantages = function(rewards, ids(0, 0, 0, 0, 0), valid(5), trajectory=trajectory)
    expected = function(f32(4, 1, 1), ids(0, 0, 0), valid(3))
    assert advantages.tolist() == expected[[0, 0, 0, 1, 2]].tolist()
    # The first row failed: the second stands for the trajectory.
    advantages = function(f32(np.nan, 4, 4, 1, 1), ids(0, 0, 0, 0, 0), valid(5, 0), trajectory=trajectory)
    assert advantages.tolist() == [0, *expected[[0, 0, 1, 2]].tolist()]


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=40),
    data=st.data(),
)
def test_row_functions_equal_naive_loops_in_any_row_order(
    rows: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    rewards, group = f32(*(r for r, _, _ in rows)), ids(*(g for _, g, _ in rows))
    ok = np.array([v for _, _, v in rows])
    for function in ROW_FUNCTIONS:
        expected = np.zeros(len(rows))
        for i in np.flatnonzero(ok):
            members = [j for j in np.flatnonzero(ok) if group[j] == group[i]]
            peers = rewards[members].astype(np.float64)
            others = rewards[[j for j in members if j != i]].astype(np.float64)
            if len(others) and function is rloo:
                expected[i] = rewards[i] - others.mean()
            elif len(others):
                scale = peers.std(ddof=1) + 1e-6 if function is grpo else 1
                expected[i] = (rewards[i] - peers.mean()) / scale
        found = function(rewards, group, ok)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        order = np.array(data.draw(st.permutations(range(len(rows)))))
        np.testing.assert_allclose(function(rewards[order], group[order], ok[order]), found[order], atol=1e-6)


# ----------------------------------------------------------------------------------------------------- token level


def naive_gae(
    rewards: Float32, values: Float32, offsets: Int64, bootstrap: Float32, gamma: float, lam: float
) -> Float64:
    advantages = np.zeros(len(rewards))
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        after, advantage = float(bootstrap[row]), 0.0
        for t in reversed(range(start, end)):
            advantage = float(rewards[t]) + gamma * after - float(values[t]) + gamma * lam * advantage
            advantages[t], after = advantage, float(values[t])
    return advantages


def test_gae_by_hand() -> None:
    """Two rows; the first ended by itself, the second was cut where its value was 4."""
    advantages, returns = gae(f32(0, 1, 0), f32(0.5, 0.5, 2), ids(0, 2, 3), f32(0, 4), 0.5, 0.5)
    # t1: 1 + 0 - 0.5 = 0.5; t0: 0 + 0.25 - 0.5 + 0.25 * 0.5 = -0.125; second row: 0 + 0.5 * 4 - 2 = 0
    assert advantages.tolist() == [-0.125, 0.5, 0] and advantages.dtype == np.float32
    assert returns.tolist() == [0.375, 1, 2] and returns.dtype == np.float32


def test_a_cut_response_without_bootstrap_is_charged_for_what_it_did_not_reach() -> None:
    rewards, values, offsets = f32(0, 0), f32(1, 1), ids(0, 2)
    assert gae(rewards, values, offsets, f32(1), 1, 1)[0].tolist() == [0, 0]
    assert gae(rewards, values, offsets, f32(0), 1, 1)[0].tolist() == [-1, -1]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(250, 600), min_size=0, max_size=12),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_the_naive_loop(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = rng.normal(size=len(lengths)).astype(np.float32)
    expected = naive_gae(rewards, values, offsets, bootstrap, gamma, lam)
    advantages, returns = gae(rewards, values, offsets, bootstrap, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [[32768], [1024] * 4, [16] * 10, [15, 16, 17, 0, 256, 257, 1]])
def test_gae_over_block_boundaries(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    offsets = offsets_of(lengths)
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = rng.normal(size=len(lengths)).astype(np.float32)
    expected = naive_gae(rewards, values, offsets, bootstrap, 1.0, 0.999)
    np.testing.assert_allclose(gae(rewards, values, offsets, bootstrap, 1.0, 0.999)[0], expected, rtol=1e-6, atol=1e-6)


def test_inputs_are_not_changed() -> None:
    """Columns arrive as read-only views."""
    arrays = f32(*range(40)), f32(*range(40)), ids(0, 40), f32(1)
    for array in arrays:
        array.flags.writeable = False
    gae(*arrays, 0.9, 0.9)
    discounted_returns(arrays[0], arrays[2], 0.9)


def test_returns_by_hand() -> None:
    assert discounted_returns(f32(1, 2, 4, 8), ids(0, 3, 3, 4), 0.5).tolist() == [3, 4, 4, 8]
    assert discounted_returns(f32(1, 2, 4), ids(0, 3), 1.0).tolist() == [7, 6, 4]
    assert discounted_returns(f32(1, 2, 4), ids(0, 3), 0.0).tolist() == [1, 2, 4]
    assert discounted_returns(f32(5), ids(0, 1), 0.9).tolist() == [5]


@given(st.lists(st.integers(0, 50), max_size=8), st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_are_gae_without_values(lengths: list[int], gamma: float) -> None:
    offsets = offsets_of(lengths)
    rewards = np.random.default_rng(0).normal(size=int(offsets[-1])).astype(np.float32)
    nothing = np.zeros_like(rewards), offsets, np.zeros(len(lengths), dtype=np.float32)
    expected, _ = gae(rewards, *nothing, gamma, 1.0)
    np.testing.assert_allclose(discounted_returns(rewards, offsets, gamma), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1024, 1024), (32, 32768)])
def test_a_million_tokens_take_no_python_loop(shape: tuple[int, int]) -> None:
    """Some 15 ms on one thread; a loop over tokens takes a second, one over the positions of long rows 0.2 s."""
    offsets = offsets_of([shape[1]] * shape[0])
    rewards, values = np.random.default_rng(0).normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = np.zeros(shape[0], dtype=np.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        gae(rewards, values, offsets, bootstrap, 0.99, 0.95)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.15
