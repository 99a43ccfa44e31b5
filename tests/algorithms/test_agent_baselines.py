"""Baselines of agents by hand, in the order of ordinals, and across a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import columns_of, rewards_of, rollouts_of
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.agent_baselines import AgentBaselines, rae
from verl_ray.algorithms.estimators import AgentBaseline


def advantages(
    baselines: AgentBaselines,
    reward: list[float],
    agents: list[str],
    groups: list[int],
    trajectories: list[int] | None = None,
    members: list[bool] | None = None,
    decay: float = 0.5,
) -> list[float]:
    rows = rollouts_of([1] * len(reward), groups=groups)
    if trajectories is not None:
        rows = rows.replace(trajectory_id=np.array(trajectories))
    rewards = rewards_of(reward)
    if members is not None:
        rewards = rewards.replace(is_member=np.array(members))
    estimator = ADVANTAGES["rae"]
    assert isinstance(estimator, AgentBaseline)
    found = baselines.with_advantages(
        estimator, {"ema_decay": decay}, rewards, columns_of(rows), agents
    )
    return [float(each) for each in found.advantage]


def test_each_agent_has_its_own_mean() -> None:
    """White wins: 1 - 0, then 1 - 1/2, then 1 - 3/4; black: -1, -1 + 1/2, -1 + 3/4."""
    baselines = AgentBaselines()
    agents = ["white", "black"] * 2
    found = advantages(baselines, [1, -1, 1, -1], agents, [0, 0, 1, 1])
    assert found == [1, -1, 0.5, -0.5]
    assert baselines.state() == {"white": 0.75, "black": -0.75}
    found = advantages(baselines, [1, 1], ["white", "none yet"], [2, 2])
    assert found == [0.25, 1]
    assert baselines.state() == {"white": 0.875, "black": -0.75, "none yet": 0.5}


def test_rewards_count_in_the_order_of_ordinals() -> None:
    """Whatever order rows stand in; one without a reward moves nothing."""
    first, second = AgentBaselines(), AgentBaselines()
    a = advantages(first, [1, 0, 3], ["x"] * 3, [4, 5, 6])
    b = advantages(
        second, [3, 9, 1, 0], ["x"] * 4, [6, 5, 4, 5], members=[True, False, True, True]
    )
    assert b == [a[2], 0, a[0], a[1]] and first.state() == second.state()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_shows_and_moves_no_baseline(bad: float) -> None:
    """A baseline of NaN would be one for the rest of the run."""
    baselines = AgentBaselines()
    with np.errstate(invalid="ignore"):
        found = advantages(baselines, [1, bad, 3], ["x"] * 3, [0, 1, 2])
    assert np.isnan(found).tolist() == [False, True, False]
    assert found[::2] == [1, 2.5] and baselines.state() == {"x": 1.75}


def test_a_trajectory_is_one_reward() -> None:
    baselines = AgentBaselines()
    found = advantages(baselines, [1, 2, 5], ["x"] * 3, [0, 0, 1], [7, 7, 8])
    assert found == [3, 3, 5 - 1.5]
    assert baselines.state() == {"x": 3.25}


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.lists(st.floats(-5, 5), max_size=40), min_size=1, max_size=4),
    decay=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_a_loop_finds_the_same_and_a_checkpoint_keeps_the_bits(
    steps: list[list[float]], decay: float
) -> None:
    never_stopped, expected = AgentBaselines(), {"a": 0.0, "b": 0.0}
    ordinal = 0
    for rewards in steps:
        agents = ["a" if number % 3 else "b" for number in range(len(rewards))]
        groups = list(range(ordinal, ordinal + len(rewards)))
        ordinal += len(rewards)
        resumed = AgentBaselines()
        resumed.load_state(json.loads(json.dumps(never_stopped.state())))
        found = advantages(never_stopped, rewards, agents, groups, decay=decay)
        assert advantages(resumed, rewards, agents, groups, decay=decay) == found
        assert resumed.state() == never_stopped.state()
        for value, agent, advantage in zip(rewards, agents, found, strict=True):
            exact = float(np.float32(value))
            assert advantage == pytest.approx(exact - expected[agent], abs=1e-5)
            expected[agent] = decay * expected[agent] + (1 - decay) * exact
    for agent, baseline in never_stopped.state().items():
        assert baseline == pytest.approx(expected[agent], abs=1e-9)


def test_agents_without_rewards_keep_their_baselines() -> None:
    found, end = rae(
        np.array([2.0]), np.array([0, 1, 0]), np.array([1.0, 4.0, 3.0]), ema_decay=0.75
    )
    assert found.tolist() == [-2] and end.tolist() == [1, 3.5, 3]
