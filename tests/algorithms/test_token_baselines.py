"""Baselines of single tokens: by hand, and against a plain loop."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learning.test_credit import algorithm
from tests.rows import columns_of, log_probs_of, on_responses, rollouts_of
from verl_ray.algorithms.group_baselines import optimal_token_baseline
from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.columns.stages import Bool, Float32
from verl_ray.errors import DataError
from verl_ray.learning.credit import response_rewards, token_credit


def baseline(
    rewards: list[float],
    lengths: list[int],
    energy: list[float],
    *,
    group: list[int] | None = None,
    valid: list[bool] | None = None,
    trajectory: list[int] | None = None,
) -> list[float]:
    rows = len(rewards)
    found = optimal_token_baseline(
        np.array(rewards, np.float32),
        np.array([0] * rows if group is None else group, np.int64),
        np.array([True] * rows if valid is None else valid, bool),
        np.array(energy, np.float32),
        offsets_of(lengths),
        trajectory=np.arange(rows) if trajectory is None else np.array(trajectory),
    )
    assert found.dtype == np.float32
    return [float(each) for each in found]


def test_baselines_by_hand() -> None:
    """Energies 1, 1, 2 and 3, 1: sums 1, 2, 4 and 3, 4; rewards 1 and 0.

    So the baselines are 1 / 4 at the first place, 2 / 6 at the second, and 1 at the
    third, which one member alone has.
    """
    found = baseline([1, 0], [3, 2], [1, 1, 2, 3, 1])
    assert found == pytest.approx([3 / 4, 2 / 3, 0, -1 / 4, -1 / 3])
    # Equal energies: the group mean; a failed row is no member.
    found = baseline([1, 0, 9], [1, 1, 1], [1, 1, 1], valid=[True, True, False])
    assert found == pytest.approx([0.5, -0.5, 0])
    # A group of its own, and rewards that are equal, have no advantage.
    found = baseline([1, 5, 5], [2, 1, 1], [1, 2, 3, 4], group=[7, 3, 3])
    assert found == [0, 0, 0, 0]
    # A reward that is not finite shows at every token of its group, and at no other.
    for bad in (np.nan, np.inf, -np.inf):
        with np.errstate(invalid="ignore"):
            found = baseline([bad, 1, 2, 0], [1, 2, 1, 1], [1] * 5, group=[0, 0, 1, 1])
        assert np.isfinite(found).tolist() == [False] * 3 + [True] * 2
    # No energy: nothing to learn, and nothing that is not finite.
    assert np.isfinite(baseline([1, 0], [1, 1], [0, 0])).all()
    assert baseline([], [], []) == []


def test_the_rows_of_a_trajectory_are_one_sequence() -> None:
    """Rows 0 and 2 are one trajectory of reward 0 + 1, with three tokens."""
    alone = baseline([1, 0], [3, 2], [1, 1, 2, 3, 1])
    parts = baseline(
        [0, 0, 1], [1, 2, 2], [1, 3, 1, 1, 2], trajectory=[4, 5, 4]
    )  # fmt: skip
    assert parts == pytest.approx([alone[0], *alone[3:], *alone[1:3]])
    failed = baseline(
        [0, 0, 1], [1, 2, 2], [1, 3, 1, 1, 2], trajectory=[4, 5, 4], valid=[True, True, False]
    )  # fmt: skip
    assert failed == [0] * 5


def plainly(
    rewards: Float32, group: Int64, valid: Bool, energy: Float32, offsets: Int64
) -> list[float]:
    """The definition, place by place; every row is a trajectory."""
    weights: dict[tuple[int, int], float] = defaultdict(float)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    total = [
        np.cumsum(part.astype(np.float64)) for part in np.split(energy, offsets[1:-1])
    ]
    for row, sum_so_far in enumerate(total):
        for place, weight in enumerate(sum_so_far):
            if valid[row]:
                weights[group[row], place] += weight
                sums[group[row], place] += weight * rewards[row]
    return [
        rewards[row] - sums[group[row], place] / weights[group[row], place] if valid[row] else 0
        for row, sum_so_far in enumerate(total)
        for place in range(len(sum_so_far))
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_plain_loop_finds_the_same_in_any_order(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    rows, offsets = len(lengths), offsets_of(lengths)
    rewards = random.normal(size=rows).astype(np.float32)
    group, valid = random.integers(0, 4, rows), random.random(rows) < 0.8
    energy = random.uniform(0.1, 2, int(offsets[-1])).astype(np.float32)
    found = optimal_token_baseline(
        rewards, group, valid, energy, offsets, trajectory=np.arange(rows)
    )
    expected = plainly(rewards, group, valid, energy, offsets)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    order = np.array(data.draw(st.permutations(range(rows))))
    parts = np.split(energy, offsets[1:-1])
    again = optimal_token_baseline(
        rewards[order], group[order], valid[order], np.concatenate([parts[row] for row in order]),
        offsets_of(np.array(lengths)[order]), trajectory=order,
    )  # fmt: skip
    mine = np.split(found, offsets[1:-1])
    np.testing.assert_allclose(again, np.concatenate([mine[row] for row in order]), atol=1e-6)  # fmt: skip


def test_energies_come_from_the_policy_before_the_step() -> None:
    """Probabilities 1/2 of two tokens, then 3/4: energies 0.5, 0.5, 0.125."""
    rows = rollouts_of([2, 1], groups=[7, 7])
    config = algorithm("optimal_token_baseline")
    rewards = response_rewards(
        config, np.array([1, 0], np.float32), np.array([True, True]), columns_of(rows), None
    )  # fmt: skip
    assert rewards.advantage.tolist() == [0, 0]
    policy = log_probs_of(rows, [float(np.log(each)) for each in (0.5, 0.5, 0.75)])
    with pytest.raises(DataError, match="squared probabilities of the policy"):
        token_credit(config, 0.0, rows, rewards, policy, None, None)
    squares = on_responses(rows, [0.5, 0.5, 0.625])
    policy = policy.replace(squared_probs=squares)
    credit = token_credit(config, 0.0, rows, rewards, policy, None, None)
    # The first place: 0.5 / (0.5 + 0.125) of the reward; the second has one member.
    expected = on_responses(rows, [0.2, 0, -0.8])
    assert credit.advantages == pytest.approx(expected, abs=1e-6)
    assert credit.reward.tolist() == [1, 0]
