"""Advantages by hand, against naive loops, and in the cases where implementations fail."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import columns_of, rollouts_of
from verl_ray.algorithms.advantages import (
    ADVANTAGES,
    discounted_returns,
    gae,
    length_adaptive_gae,
)
from verl_ray.algorithms.estimators import (
    AgentBaseline,
    CriticBaseline,
    GroupBaseline,
    GroupTokenBaseline,
    NoBaseline,
)
from verl_ray.algorithms.group_baselines import (
    best_and_worst,
    gdpo,
    gpg,
    grpo,
    lite_ppo,
    maxrl,
    opo,
    pass_at_k,
    remax,
    rloo,
    subtract_group_mean,
)
from verl_ray.algorithms.groups import (
    Float64,
    complete_trajectories,
    fraction_without_spread,
    has_spread,
)
from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.columns.stages import Bool, Float32
from verl_ray.ops.masked import Moments, whiten


def opo_of_equal_rows(rewards: Float32, *args: Any, **settings: Any) -> Float32:
    return opo(rewards, *args, **settings, length=np.full(len(rewards), 3))


GROUP_FUNCTIONS = (
    grpo,
    subtract_group_mean,
    rloo,
    maxrl,
    pass_at_k,
    gpg,
    opo_of_equal_rows,
)
"""What one group has does not depend on other groups, but for the scale of gpg."""

ROW_FUNCTIONS = (*GROUP_FUNCTIONS, lite_ppo)


def f32(*values: float) -> Float32:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def valid(count: int, *failed: int) -> Bool:
    mask = np.ones(count, dtype=bool)
    mask[list(failed)] = False
    return mask


# ------------------------------------------------------------------------------ by name


def test_every_advantage_says_what_it_needs() -> None:
    needs = {
        name: (a.level, a.needs_critic, a.needs_group) for name, a in ADVANTAGES.items()
    }
    assert needs["gae"] == ("token", True, False)
    assert needs["reinforce_plus_plus"] == ("token", False, False)
    assert {
        needs[name]
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
    } == {("row", False, True)}


def test_the_kind_of_an_entry_tells_how_to_call_it() -> None:
    for advantage in ADVANTAGES.values():
        usual: dict[str, Any] = {
            setting.name: value for setting, value in advantage.reads.items()
        }
        if isinstance(advantage, GroupBaseline):
            responses = columns_of(rollouts_of([1, 2], groups=[0, 0]))
            usual |= advantage.columns(valid(2), responses, [(1.0, f32(0, 1))])
            found = advantage.function(f32(0, 1), ids(0, 0), valid(2), **usual)
            assert found.shape == (2,)
        elif isinstance(advantage, GroupTokenBaseline):
            energy, offsets, rewards = f32(1, 1, 1), ids(0, 1, 3), f32(0, 1)
            found = advantage.function(
                rewards, ids(0, 0), valid(2), energy, offsets, trajectory=ids(0, 1)
            )
            assert found.shape == (3,)
        elif isinstance(advantage, AgentBaseline):
            rewards, begin = np.array([0.0, 1.0]), np.zeros(1)
            found, end = advantage.function(rewards, ids(2), begin, **usual)
            assert found.shape == (2,) and end.shape == (1,)
        elif isinstance(advantage, CriticBaseline):
            assert advantage.function(f32(0, 1), f32(0, 0), ids(0, 2), f32(0), **usual)[
                0
            ].shape == (2,)
        elif isinstance(advantage, NoBaseline):
            assert advantage.function(f32(0, 1), ids(0, 2), **usual).shape == (2,)


# ---------------------------------------------------------------------------- row level


def test_row_functions_by_hand() -> None:
    rewards, group = (
        f32(1, 10, 3, 20, 5),
        ids(7, 2, 7, 2, 7),
    )  # group 7: 1, 3, 5; group 2: 10, 20
    assert grpo(rewards, group, valid(5)) == pytest.approx(
        [-1, -(0.5**0.5), 0, 0.5**0.5, 1], rel=1e-5
    )
    assert subtract_group_mean(rewards, group, valid(5)).tolist() == [-2, -5, 0, 5, 2]
    assert rloo(rewards, group, valid(5)).tolist() == [
        1 - 4,
        10 - 20,
        3 - 3,
        20 - 10,
        5 - 2,
    ]


def test_newer_baselines_by_hand() -> None:
    # Group 0: 0, 0, 1 and 1; group 1: 1, 1 and 4; group 2 has no spread.
    rewards = f32(0, 1, 0, 1, 1, 1, 4, 2, 2)
    group = ids(0, 0, 0, 0, 1, 1, 1, 2, 2)
    assert maxrl(rewards, group, valid(9)).tolist() == pytest.approx(
        [-1, 1, -1, 1, -0.5, -0.5, 1, 0, 0]
    )
    # The two best of group 0 are equal.
    assert pass_at_k(rewards, group, valid(9)).tolist() == [0, 0, 0, 0, 0, 0, 3, 0, 0]
    # The first of equal ones.
    sides = best_and_worst(rewards, group, valid(9))
    assert sides.tolist() == [-1, 1, 0, 0, -1, 0, 1, 0, 0]
    # Of 0 and 1 in group 0, 1 and 4 in group 1, and a single member of group 2.
    sides = best_and_worst(rewards, group, valid(9, 1, 2, 4, 7))
    assert sides.tolist() == [-1, 0, 0, 1, 0, -1, 1, 0, 0]
    # 9 members, 7 of them in groups with spread.
    assert gpg(rewards, group, valid(9)).tolist() == pytest.approx(
        [x * 9 / 7 for x in (-0.5, 0.5, -0.5, 0.5, -1, -1, 2, 0, 0)]
    )
    # The sample variance of all nine: mean 12/9, sum of squares 28.
    std = ((28 - 144 / 9) / 8) ** 0.5
    assert lite_ppo(rewards, group, valid(9)) == pytest.approx(
        [x / std for x in (-0.5, 0.5, -0.5, 0.5, -1, -1, 2, 0, 0)], rel=1e-5
    )
    # Weighted by length: (1 * 0 + 3 * 1 + 2 * 0 + 2 * 1) / 8 = 5/8; group 1: 23/8.
    length = ids(1, 3, 2, 2, 1, 2, 5, 9, 1)
    baseline = [5 / 8] * 4 + [23 / 8] * 3 + [2] * 2
    assert opo(rewards, group, valid(9), length=length).tolist() == pytest.approx(
        [r - b for r, b in zip(rewards, baseline, strict=True)]
    )


def test_a_group_that_only_fails_teaches_maxrl_nothing() -> None:
    assert not maxrl(f32(-1, 0, 0, -2), ids(0, 0, 0, 0), valid(4)).any()


def test_the_length_of_a_trajectory_is_that_of_its_rows() -> None:
    """Trajectories of 2 + 4 and 2 tokens with rewards 1 and 0: the baseline is 6/8."""
    found = opo(
        f32(0, 1, 0),
        ids(0, 0, 0),
        valid(3),
        trajectory=ids(5, 5, 6),
        length=ids(2, 4, 2),
    )
    assert found.tolist() == pytest.approx([0.25, 0.25, -0.75])


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_a_group_of_one_or_of_equal_rewards_gives_exactly_zero(
    function: Callable[..., Float32],
) -> None:
    rewards = f32(0.1, 0.1, 0.1, 0.7, 0.3, 1e30)
    advantages = function(rewards, ids(0, 0, 0, 1, 2, 3), valid(6))
    assert advantages.tolist() == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@given(value=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 300))
def test_equal_rewards_give_exactly_zero_whatever_they_are(
    function: Callable[..., Float32], value: float, count: int
) -> None:
    assert not function(
        np.full(count, value, dtype=np.float32),
        np.zeros(count, dtype=np.int64),
        valid(count),
    ).any()


def test_rewards_that_differ_by_rounding_do_not_explode() -> None:
    """A leave-one-out standard deviation of equal rewards once divided by almost 0."""
    advantages = grpo(
        f32(0.5, 0.5, 0.5, np.nextafter(np.float32(0.5), np.float32(1))),
        ids(0, 0, 0, 0),
        valid(4),
    )
    assert np.abs(advantages).max() < 0.1
    assert np.abs(
        grpo(f32(0, 0, 0, 1), ids(0, 0, 0, 0), valid(4))
    ).max() == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_a_failed_reward_poisons_nobody_and_gets_zero(
    function: Callable[..., Float32],
) -> None:
    rewards, group = f32(1, np.nan, 3, np.inf, 5, np.nan), ids(0, 0, 0, 0, 0, 1)
    advantages = function(rewards, group, valid(6, 1, 3, 5))
    alone = function(f32(1, 3, 5), ids(0, 0, 0), valid(3))
    assert advantages[[0, 2, 4]].tolist() == alone.tolist()
    assert advantages[[1, 3, 5]].tolist() == [0, 0, 0]
    # One valid row left: no baseline, so nothing to say.
    assert not function(f32(1, np.nan), ids(0, 0), valid(2, 1)).any()


def test_a_trajectory_is_one_member_of_its_group() -> None:
    """Three trajectories have the rewards 0 + 1, 0 and 0.

    Their mean is 1/3 and their sample variance (4 + 1 + 1) / 9 / 2.
    """
    rewards, group, trajectory = f32(0, 1, 0, 0), ids(0, 0, 0, 0), ids(0, 0, 1, 2)
    std = (1 / 3) ** 0.5
    by_hand = {
        grpo: [2 / 3 / std, 2 / 3 / std, -1 / 3 / std, -1 / 3 / std],
        subtract_group_mean: [2 / 3, 2 / 3, -1 / 3, -1 / 3],
        rloo: [1, 1, -0.5, -0.5],
    }
    for function, expected in by_hand.items():
        assert function(
            rewards, group, valid(4), trajectory=trajectory
        ) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "function", [each for each in ROW_FUNCTIONS if each is not opo_of_equal_rows]
)
def test_what_rows_of_a_trajectory_earned_adds_up(
    function: Callable[..., Float32],
) -> None:
    """A reward that is paid once or in parts, on any row, gives the same advantage."""
    group, trajectory = ids(0, 0, 0, 0, 0), ids(8, 8, 8, 3, 5)
    expected = function(f32(6, 1, 2), ids(0, 0, 0), valid(3))[[0, 0, 0, 1, 2]].tolist()
    for paid in ((0, 0, 6), (6, 0, 0), (1, 2, 3)):
        assert (
            function(f32(*paid, 1, 2), group, valid(5), trajectory=trajectory).tolist()
            == expected
        )


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_rounding_of_a_sum_is_no_spread(
    function: Callable[..., Float32], scale: float
) -> None:
    """10.1 + 20.2 in float32 differs from 30.3 in the last digits."""
    rewards = f32(10.1, 20.2, 30.3, 30.3) * np.float32(scale)
    found = function(rewards, ids(0, 0, 0, 0), valid(4), trajectory=ids(0, 0, 1, 2))
    assert found.tolist() == [0, 0, 0, 0]


UP = np.float32(np.inf)
SPREADS = [
    (f32(0.1) + f32(0.2), f32(0.3), False),
    (f32(0.9), np.nextafter(f32(0.9), UP), False),
    (f32(1e6), np.nextafter(f32(1e6), UP), False),
    (f32(1e6), f32(1e6 + 8), True),
    (f32(1e18), f32(-5e17), True),
    (f32(0), f32(1e-30), False),
    (f32(0), f32(-1.1e-16), False),
    (f32(5.55e-17), f32(0), False),
    (f32(0), f32(1e-7), True),
    (f32(0.3), f32(0.300002), True),
]


@pytest.mark.parametrize(("one", "other", "differ"), SPREADS)
def test_a_group_has_spread_exactly_where_baselines_say_something(
    one: Float32, other: Float32, differ: bool
) -> None:
    """Rewards that differ by up to 1e-6 of themselves, or by 1e-12, are equal."""
    rewards, group = np.concatenate([one, other, f32(5)]), ids(4, 4, 2)
    everything = valid(3)
    assert has_spread(rewards, group, everything).tolist() == [differ, differ, False]
    share = fraction_without_spread(rewards, group, everything)
    assert share == (0.5 if differ else 1)
    is_greedy = np.array([False, True, False])
    for found in (
        subtract_group_mean(rewards, group, everything),
        rloo(rewards, group, everything),
        maxrl(rewards, group, everything),
        remax(rewards, group, everything, is_greedy=is_greedy),
    ):
        assert found[:2].any() == differ and not found[2]
        assert whiten(found, Moments.of(found))[:2].any() == differ


def test_the_best_of_equal_rewards_has_no_advantage() -> None:
    """The two best differ in their last digit, so neither is better."""
    two = f32(0.9), np.nextafter(f32(0.9), UP)
    rewards = np.concatenate([*two, f32(0.1)])
    assert not pass_at_k(rewards, ids(0, 0, 0), valid(3)).any()


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_a_trajectory_without_one_reward_is_no_member(
    function: Callable[..., Float32],
) -> None:
    trajectory = ids(8, 8, 3, 5)
    found = function(
        f32(np.nan, 9, 1, 2), ids(0, 0, 0, 0), valid(4, 0), trajectory=trajectory
    )
    assert found.tolist() == [0, 0, *function(f32(1, 2), ids(0, 0), valid(2)).tolist()]
    is_complete = complete_trajectories(valid(4, 0), trajectory)
    assert is_complete.tolist() == [False, False, True, True]


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_one_trajectory_or_equal_ones_give_zero(
    function: Callable[..., Float32],
) -> None:
    assert not function(
        f32(0, 1, 5), ids(0, 0, 0), valid(3), trajectory=ids(4, 4, 4)
    ).any()
    assert not function(
        f32(0.25, 0.5, 0.75), ids(0, 0, 0), valid(3), trajectory=ids(1, 1, 2)
    ).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "choice",
    [each for each in ADVANTAGES.values() if isinstance(each, GroupBaseline)],
    ids=lambda choice: choice.name,
)
def test_a_valid_reward_that_is_not_finite_shows(
    choice: GroupBaseline, bad: float
) -> None:
    """All of its group have NaN, and one that failed has 0."""
    rewards, group = f32(bad, 1, 0, 2, 4, 3), ids(0, 0, 0, 1, 1, 1)
    member = valid(6, 2)
    responses = columns_of(rollouts_of([1] * 6, groups=group.tolist()))
    # What was charged is a part, too, but one that is NaN has nobody given.
    parts = [(1.0, rewards)]
    with np.errstate(invalid="ignore"):
        found = choice.function(
            rewards, group, member, **choice.columns(member, responses, parts)
        )
    assert np.isnan(found[:2]).all() and found[2] == 0
    # Two divide by the deviation of the whole step.
    whole_step = choice.name in ("lite_ppo", "gdpo")
    assert whole_step or np.isfinite(found[3:]).all()


def naive(
    function: Callable[..., Float32], own: float, others: list[float], all_groups: Any
) -> float:
    """Return the advantage of a member with these others in its group.

    Args:
        all_groups: The rewards of the members of each group of the step.
    """
    if not others:
        return 0.0
    group = np.array([own, *others])
    members = np.concatenate([np.array(each) for each in all_groups])
    informative = [len(each) for each in all_groups if np.ptp(each) > 0]
    deviation = own - group.mean()
    advantages = {
        grpo: deviation / (group.std(ddof=1) + 1e-6),
        subtract_group_mean: deviation,
        rloo: own - np.mean(others),
        maxrl: deviation / group.mean() if group.mean() > 0 else 0.0,
        pass_at_k: max(own - max(others), 0.0),
        gpg: deviation * len(members) / max(sum(informative), 1),
        opo_of_equal_rows: deviation,
        lite_ppo: deviation / (members.std(ddof=1) + 1e-6),
    }
    return float(advantages[function])


@given(
    rows=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(0, 12), st.integers(0, 9).map(bool)),
        min_size=1,
        max_size=40,
    ),
    data=st.data(),
)
def test_trajectories_equal_naive_loops_in_any_order(
    rows: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    rewards, trajectory = f32(*(r for r, _, _ in rows)), ids(*(t for _, t, _ in rows))
    ok, group = np.array([v for _, _, v in rows]), trajectory % 3
    totals = {
        t: float(rewards[trajectory == t].sum())
        for t in set(trajectory)
        if ok[trajectory == t].all()
    }
    all_groups = [
        [total for t, total in totals.items() if t % 3 == each] for each in range(3)
    ]
    all_groups = [each for each in all_groups if each]
    # opo weights trajectories by their rows.
    for function in (each for each in ROW_FUNCTIONS if each is not opo_of_equal_rows):
        expected = np.zeros(len(rows))
        for i, t in enumerate(trajectory):
            if t in totals:
                others = [
                    total for u, total in totals.items() if u % 3 == t % 3 and u != t
                ]
                expected[i] = naive(function, totals[t], others, all_groups)
        found = function(rewards, group, ok, trajectory=trajectory)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        order = np.array(data.draw(st.permutations(range(len(rows)))))
        again = function(
            rewards[order], group[order], ok[order], trajectory=trajectory[order]
        )
        np.testing.assert_allclose(again, found[order], atol=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=40,
    ),
    data=st.data(),
)
def test_row_functions_equal_naive_loops_in_any_row_order(
    rows: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    rewards, group = f32(*(r for r, _, _ in rows)), ids(*(g for _, g, _ in rows))
    ok = np.array([v for _, _, v in rows])
    all_groups = [rewards[ok & (group == each)] for each in np.unique(group[ok])]
    for function in ROW_FUNCTIONS:
        expected = np.zeros(len(rows))
        for i in np.flatnonzero(ok):
            others = [
                float(rewards[j])
                for j in np.flatnonzero(ok)
                if group[j] == group[i] and j != i
            ]
            expected[i] = naive(function, float(rewards[i]), others, all_groups)
        found = function(rewards, group, ok)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        order = np.array(data.draw(st.permutations(range(len(rows)))))
        np.testing.assert_allclose(
            function(rewards[order], group[order], ok[order]), found[order], atol=1e-6
        )


# -------------------------------------------------------------------------- token level


def naive_gae(
    rewards: Float32,
    values: Float32,
    offsets: Int64,
    bootstrap: Float32,
    gamma: float,
    lam: float,
) -> Float64:
    advantages = np.zeros(len(rewards))
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        after, advantage = float(bootstrap[row]), 0.0
        for t in reversed(range(start, end)):
            advantage = (
                float(rewards[t])
                + gamma * after
                - float(values[t])
                + gamma * lam * advantage
            )
            advantages[t], after = advantage, float(values[t])
    return advantages


def test_gae_by_hand() -> None:
    """The first row ended by itself, the second was cut where its value was 4."""
    advantages, returns = gae(
        f32(0, 1, 0), f32(0.5, 0.5, 2), ids(0, 2, 3), f32(0, 4), 0.5, 0.5
    )
    # t1: 1 + 0 - 0.5 = 0.5; t0: 0 + 0.25 - 0.5 + 0.25 * 0.5 = -0.125; second row: 0 +
    # 0.5 * 4 - 2 = 0
    assert advantages.tolist() == [-0.125, 0.5, 0] and advantages.dtype == np.float32
    assert returns.tolist() == [0.375, 1, 2] and returns.dtype == np.float32


def test_a_cut_response_without_bootstrap_is_charged_for_what_it_did_not_reach() -> (
    None
):
    rewards, values, offsets = f32(0, 0), f32(1, 1), ids(0, 2)
    assert gae(rewards, values, offsets, f32(1), 1, 1)[0].tolist() == [0, 0]
    assert gae(rewards, values, offsets, f32(0), 1, 1)[0].tolist() == [-1, -1]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(
        st.integers(0, 40) | st.integers(250, 600), min_size=0, max_size=12
    ),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_the_naive_loop(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = rng.normal(size=len(lengths)).astype(np.float32)
    expected = naive_gae(rewards, values, offsets, bootstrap, gamma, lam)
    advantages, returns = gae(rewards, values, offsets, bootstrap, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "lengths", [[32768], [1024] * 4, [16] * 10, [15, 16, 17, 0, 256, 257, 1]]
)
def test_gae_over_block_boundaries(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    offsets = offsets_of(lengths)
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = rng.normal(size=len(lengths)).astype(np.float32)
    expected = naive_gae(rewards, values, offsets, bootstrap, 1.0, 0.999)
    np.testing.assert_allclose(
        gae(rewards, values, offsets, bootstrap, 1.0, 0.999)[0],
        expected,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_alone_in_gae(bad: float) -> None:
    """Blocks of rows are one matrix product.

    Zeros in it would not keep a NaN from its neighbours.
    """
    offsets = offsets_of([5, 33, 16, 3])
    rewards, values = (
        np.random.default_rng(0).normal(size=(2, offsets[-1])).astype(np.float32)
    )
    bootstrap = f32(0, 1, 0, 1)
    expected = gae(rewards, values, offsets, bootstrap, 0.99, 0.95)
    rewards[offsets[1] : offsets[2]] = values[offsets[1]] = bootstrap[1] = bad
    others = np.r_[0 : offsets[1], offsets[2] : offsets[-1]]
    with np.errstate(invalid="ignore"):
        for found, wanted in zip(
            gae(rewards, values, offsets, bootstrap, 0.99, 0.95), expected, strict=True
        ):
            assert np.array_equal(found[others], wanted[others])
        found = discounted_returns(rewards, offsets, 0.99)
    assert (
        np.isfinite(found[others]).all()
        and not np.isfinite(found[offsets[1] : offsets[2]]).any()
    )


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8).filter(any),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    alpha=st.sampled_from([0.05, 0.5, 10.0]),
    seed=st.integers(0, 99),
)
def test_lambda_by_length_equals_gae_row_by_row(
    lengths: list[int], gamma: float, alpha: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    bootstrap = rng.normal(size=len(lengths)).astype(np.float32)
    advantages, returns = length_adaptive_gae(
        rewards, values, offsets, bootstrap, gamma, alpha, 1.0
    )
    for row, length in enumerate(lengths):
        places = slice(offsets[row], offsets[row + 1])
        one = rewards[places], values[places], ids(0, length), bootstrap[row : row + 1]
        lam = max(1 - 1 / (alpha * max(length, 1)), 0.0)
        expected, _ = gae(*one, gamma, lam)
        np.testing.assert_allclose(advantages[places], expected, rtol=1e-5, atol=1e-5)
        _, targets = gae(*one, gamma, 1.0)
        np.testing.assert_allclose(returns[places], targets, rtol=1e-5, atol=1e-5)


def test_inputs_are_not_changed() -> None:
    """Columns arrive as read-only views."""
    arrays = f32(*range(40)), f32(*range(40)), ids(0, 40), f32(1)
    for array in arrays:
        array.flags.writeable = False
    gae(*arrays, 0.9, 0.9)
    discounted_returns(arrays[0], arrays[2], 0.9)


def test_returns_by_hand() -> None:
    assert discounted_returns(f32(1, 2, 4, 8), ids(0, 3, 3, 4), 0.5).tolist() == [
        3,
        4,
        4,
        8,
    ]
    assert discounted_returns(f32(1, 2, 4), ids(0, 3), 1.0).tolist() == [7, 6, 4]
    assert discounted_returns(f32(1, 2, 4), ids(0, 3), 0.0).tolist() == [1, 2, 4]
    assert discounted_returns(f32(5), ids(0, 1), 0.9).tolist() == [5]


@given(st.lists(st.integers(0, 50), max_size=8), st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_are_gae_without_values(lengths: list[int], gamma: float) -> None:
    offsets = offsets_of(lengths)
    rewards = np.random.default_rng(0).normal(size=int(offsets[-1])).astype(np.float32)
    nothing = np.zeros_like(rewards), offsets, np.zeros(len(lengths), dtype=np.float32)
    expected, _ = gae(rewards, *nothing, gamma, 1.0)
    np.testing.assert_allclose(
        discounted_returns(rewards, offsets, gamma), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(1024, 1024), (32, 32768)])
def test_a_million_tokens_take_no_python_loop(shape: tuple[int, int]) -> None:
    """The lines of Python that run are counted.

    A loop over tokens, rows or positions runs a thousand at least.
    """
    offsets = offsets_of([shape[1]] * shape[0])
    rewards, values = (
        np.random.default_rng(0).normal(size=(2, offsets[-1])).astype(np.float32)
    )
    bootstrap = np.zeros(shape[0], dtype=np.float32)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        gae(rewards, values, offsets, bootstrap, 0.99, 0.95)
    finally:
        sys.settrace(before)
    assert 0 < lines < 500


def test_the_share_of_groups_without_spread() -> None:
    # Group 0 differs, 1 does not, 2 has one member, 3 has none.
    rewards, group = f32(1, 0, 0.1, 0.1, 0.1, 5, 7, 9), ids(0, 0, 1, 1, 1, 2, 2, 3)
    valid = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.bool_)
    assert fraction_without_spread(rewards, group, valid) == pytest.approx(2 / 3)
    assert fraction_without_spread(rewards[2:5], group[2:5], valid[2:5]) == 1
    assert math.isnan(fraction_without_spread(rewards[7:], group[7:], valid[7:]))
    # The two rows of trajectory 0 earn 1 together, as much as trajectory 1.
    parts, same_group, everything = f32(0.25, 0.75, 1), ids(0, 0, 0), np.ones(3, bool)
    trajectory = ids(0, 0, 1)
    assert fraction_without_spread(parts, same_group, everything, trajectory) == 1
    assert fraction_without_spread(parts, same_group, everything) == 0


def test_parts_are_normalised_before_they_are_added() -> None:
    """Two groups of two; [0, 1] has the sample deviation 0.5 ** 0.5."""
    group = ids(0, 0, 1, 1)
    helpful, short, rewards = f32(0, 1, 0, 10), f32(5, 5, 1, 0), f32(10, 11, 2, 10)
    parts = [(1.0, helpful), (2.0, short)]
    # helpful: -x x -x x, however large it is, with x = 0.5 ** 0.5; short: 0 0 x -x. The
    # sum is -x x x -x, and four numbers of size x deviate by x * (4 / 3) ** 0.5.
    y = 0.75**0.5
    expected = pytest.approx([-y, y, y, -y], rel=1e-5)
    assert gdpo(rewards, group, valid(4), parts=parts).tolist() == expected
    # Parts that are opposite to each other cancel, but for rounding.
    opposite = [(w, f32(*v)) for w in (0.5, 0.1, 0.3) for v in ((1, 2, 4), (3, 2, 0))]
    assert not gdpo(f32(9, 0, 9), ids(0, 0, 0), valid(3), parts=opposite).any()
    # A failed response is no member of its group, where nothing is left to compare.
    helpful[3] = np.nan
    alone = gdpo(rewards, group, valid(4, 3), parts=parts)
    assert alone[2:].tolist() == [0, 0] and alone[0] == -alone[1] != 0


def test_a_member_without_a_part_is_left_out_of_its_statistics() -> None:
    """Of 0 and 1 the mean is 0.5; the three sums -x, 0 and x deviate by x."""
    part, same = f32(0, np.nan, 1), f32(2, 2, 2)
    rewards, group = f32(2, 2, 3), ids(0, 0, 0)
    found = gdpo(rewards, group, valid(3), parts=[(1.0, part), (1.0, same)])
    assert found.tolist() == pytest.approx([-1, 0, 1], rel=1e-5)


def test_one_part_is_grpo_at_another_scale() -> None:
    rewards, group = f32(1, 2, 4, 0, 3, 3), ids(0, 0, 0, 1, 1, 1)
    unscaled = grpo(rewards, group, valid(6))
    expected = unscaled / unscaled.std(ddof=1)
    for weight in (1.0, 3.0):
        parts = [(weight, rewards / np.float32(weight))]
        found = gdpo(rewards, group, valid(6), parts=parts)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    same = gdpo(f32(2, 2), ids(0, 0), valid(2), parts=[(1.0, f32(2, 2))])
    assert same.tolist() == [0, 0]
