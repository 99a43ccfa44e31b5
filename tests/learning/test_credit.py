"""Scores become advantages, with numbers small enough to compute by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tests.corrections import NO_CORRECTION, NO_LIMIT
from tests.rows import columns_of, log_probs_of, rewards_of, rollouts_of, values_of
from verl_ray.algorithms.estimators import RewardPart
from verl_ray.algorithms.row_statistics import row_statistics
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Finish, Rollouts, RowRewards
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.errors import DataError
from verl_ray.learning.credit import (
    response_divergences,
    response_rewards,
    token_credit,
)

KL = {
    "importance_weighted": False,
    "place": "none",
    "estimator": None,
    "coefficient": None,
    "controller": None,
    "target": None,
    "horizon": None,
}
IN_REWARD = {"importance_weighted": False, "place": "reward", "estimator": "k1", "coefficient": 0.5, "controller": "fixed", "target": None,
             "horizon": None}  # fmt: skip


def algorithm(
    advantage: str, kl: dict[str, object] = KL, **changes: object
) -> AlgorithmConfig:
    values: dict[str, object] = {
        "name": "test", "advantage": advantage, "gamma": None, "lam": None, "whiten_advantages": False,
        "policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "aggregation": "token_mean",
        "aggregation_horizon": None, "entropy_coefficient": 0.0, "kl": kl, "value_loss": None,
        "critic_warmup_steps": 0, "correction": NO_CORRECTION, "mismatch": NO_LIMIT, "truncated": "score", "sequence": "row",
    }  # fmt: skip
    return AlgorithmConfig.model_validate(values | changes)


GAE = algorithm("gae", gamma=1.0, lam=0.5)
GAE_KL = algorithm("gae", IN_REWARD, gamma=1.0, lam=0.5)


def rewarded(
    config: AlgorithmConfig,
    rows: Rollouts,
    score: list[float],
    charge: list[float] | None = None,
    parts: Sequence[RewardPart] = (),
    *,
    cost: float = 1.0,
) -> RowRewards:
    scores = np.array(score, np.float32)
    charged = None if charge is None else (cost, np.array(charge, np.float32))
    return response_rewards(
        config,
        scores,
        ~np.isnan(scores),
        columns_of(rows),
        charged,
        parts,
    )


# ------------------------------------------------------------------------- per response


@pytest.mark.parametrize("cost", [0.001, 0.1, 1.0])
def test_the_divergence_is_a_part_of_the_reward_with_its_coefficient(
    cost: float,
) -> None:
    """In group 8 only the divergence differs, and it counts `cost` times a score."""
    rows = rollouts_of([1, 1, 1, 1], groups=[7, 7, 8, 8])
    score = np.array([1, 0, 1, 1], np.float32)
    config = algorithm("gdpo", IN_REWARD)
    found = rewarded(
        config, rows, score.tolist(), [0, 0, 1, 3], [(1.0, score)], cost=cost
    )
    # Normalised in groups of two, each part is 1 or -1 over the root of 2.
    deviation = (2 * (1 + cost**2) / 3) ** 0.5
    expected = np.array([1, -1, cost, -cost]) / deviation
    assert found.advantage == pytest.approx(expected, rel=1e-4)
    assert found.reward == pytest.approx([1, 0, 1 - cost, 1 - 3 * cost])


def test_the_last_response_of_a_group_is_the_baseline_of_remax() -> None:
    rows = rollouts_of([1] * 7, groups=[7, 7, 7, 8, 8, 9, 9])
    nan = float("nan")
    found = rewarded(algorithm("remax"), rows, [1, 0.5, 0.25, nan, 2, 3, nan])
    # Of group 9 the greedy response has failed: nothing is known of the other one.
    assert found.advantage.tolist() == [0.75, 0.25, 0, 0, 0, 0, 0]
    assert found.in_loss.tolist() == [True, True, False, False, False, True, False]

    # With KL in the reward the divergence of the greedy response counts like others.
    rows = rollouts_of([1] * 3, groups=[7, 7, 7])
    found = rewarded(algorithm("remax", IN_REWARD), rows, [1, 0.5, 0.25], [0, 0.5, 1])
    assert found.advantage.tolist() == [1 + 0.75, 0 + 0.75, 0]


@pytest.mark.parametrize("truncated", ["mask", "drop", "score"])
def test_a_pair_is_of_responses_that_may_be_learned_from(truncated: str) -> None:
    """Not of one that failed or has no token; of a cut one only where it is scored."""
    stop, nan = Finish.STOP, float("nan")
    finish = [*[stop] * 8, Finish.ABORTED, *[stop] * 3, Finish.LENGTH, stop, stop]
    rows = rollouts_of(
        [*[1] * 9, 0, *[1] * 5], groups=[7] * 4 + [8] * 3 + [9] * 5 + [10] * 3, finish=finish
    )  # fmt: skip
    score = [1, nan, 0, 1, 0.5, 0.5, nan, 1, 3, 4, 2, 0, 9, 2, 1]
    config = algorithm("best_and_worst", truncated=truncated)
    found = rewarded(config, rows, score)
    last = [1, 0, -1] if truncated == "score" else [0, 1, -1]
    expected = [1, 0, -1, 0, *[0] * 3, 0, 0, 0, 1, -1, *last]
    assert found.advantage.tolist() == expected
    assert found.in_loss.tolist() == [each != 0 for each in expected]


def test_a_failed_score_is_no_member_of_its_group() -> None:
    rows = rollouts_of([1, 1, 1, 1], groups=[7, 7, 7, 8])
    found = rewarded(algorithm("dr_grpo"), rows, [1.0, 0.0, float("nan"), 5.0])
    assert found.reward.tolist() == [1.0, 0.0, 0.0, 5.0]
    assert found.advantage.tolist() == [
        0.5,
        -0.5,
        0.0,
        0.0,
    ]  # the mean of the group is over two
    assert found.in_loss.tolist() == [True, True, False, True]


def test_what_the_divergence_costs_is_taken_off_before_the_group_is_compared() -> None:
    rows = rollouts_of([1, 1], groups=[0, 0])
    found = rewarded(algorithm("rloo", IN_REWARD), rows, [1.0, 1.0], charge=[0.0, 0.5])
    assert found.reward.tolist() == [1.0, 0.5]
    assert found.advantage.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("truncated", "learned"),
    [("score", [True, True, False]), ("mask", [True, False, False])],
)
def test_cut_responses_are_learned_from_as_configured_and_aborted_ones_never(
    truncated: str, learned: list[bool]
) -> None:
    rows = rollouts_of(
        [1, 1, 1], groups=[0, 0, 0], finish=[Finish.STOP, Finish.LENGTH, Finish.ABORTED]
    )
    found = rewarded(algorithm("dr_grpo", truncated=truncated), rows, [3.0, 0.0, 9.0])
    assert found.in_loss.tolist() == learned
    assert found.advantage.tolist() == [
        1.5,
        -1.5,
        0.0,
    ]  # the mean is over two: what was aborted is no member
    assert found.reward.tolist() == [3.0, 0.0, 0.0]


def test_a_cut_response_that_is_dropped_is_no_member() -> None:
    rows = rollouts_of(
        [1, 1, 1], groups=[0, 0, 0], finish=[Finish.STOP, Finish.LENGTH, Finish.STOP]
    )
    found = rewarded(algorithm("dr_grpo", truncated="drop"), rows, [3.0, 9.0, 1.0])
    assert found.in_loss.tolist() == [True, False, True]
    assert found.advantage.tolist() == [1.0, 0.0, -1.0]


def test_an_aborted_row_takes_its_trajectory_with_it() -> None:
    finish = [Finish.STOP, Finish.ABORTED, Finish.STOP, Finish.STOP]
    rows = rollouts_of([1] * 4, groups=[0] * 4, finish=finish).replace(
        trajectory_id=np.array([5, 5, 6, 7])
    )
    found = rewarded(algorithm("dr_grpo"), rows, [8.0, 8.0, 1.0, 0.0])
    assert found.advantage.tolist() == [0.0, 0.0, 0.5, -0.5]
    assert found.in_loss.tolist() == [False, False, True, True]
    # So does a baseline per token, which would pay a part of the reward otherwise.
    assert rewarded(GAE, rows, [8.0, 8.0, 1.0, 0.0]).in_loss.tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_what_an_aborted_row_cost_reaches_nobody() -> None:
    rows = rollouts_of(
        [1] * 3, groups=[0] * 3, finish=[Finish.STOP, Finish.STOP, Finish.ABORTED]
    )
    found = rewarded(
        algorithm("rloo", IN_REWARD),
        rows,
        [1.0, 0.0, 1.0],
        charge=[0.0, 0.0, float("nan")],
    )
    assert (found.reward.tolist(), found.advantage.tolist()) == (
        [1.0, 0.0, 0.0],
        [1.0, -1.0, 0.0],
    )
    counted = rewarded(
        algorithm("rloo", IN_REWARD),
        rows,
        [1.0, 0.0, 1.0],
        charge=[0.0, float("nan"), 0.0],
    )
    assert np.isnan(
        counted.advantage[:2]
    ).all()  # a NaN that is learned from is not hidden


def test_without_a_group_baseline_there_is_no_advantage_per_response() -> None:
    found = rewarded(GAE, rollouts_of([1, 1], groups=[0, 0]), [1.0, 0.0])
    assert found.advantage.tolist() == [0.0, 0.0]


def test_divergence_is_summed_over_the_response() -> None:
    rows = rollouts_of([2, 0, 1])
    policy, reference = (
        log_probs_of(rows, [-1.0, -2.0, -3.0]),
        log_probs_of(rows, [-1.5, -1.0, -5.0]),
    )
    assert response_divergences(GAE_KL, rows, policy, reference).kl.tolist() == [
        -0.5,
        0.0,
        2.0,
    ]


# ---------------------------------------------------------------------------- per token


def test_gae_by_hand() -> None:
    rows = rollouts_of([2, 1])
    found = token_credit(
        GAE,
        0.0,
        rows,
        rewards_of([1.0, 2.0]),
        None,
        None,
        values_of(rows, [0.5, 0.25, 1.5], [9.0, 9.0]),
    )
    # row 0: delta = (0 + 0.25 - 0.5, 1 - 0.25) = (-0.25, 0.75), A = (-0.25 + 0.5 *
    # 0.75, 0.75); row 1: A = 2 - 1.5
    assert found.advantages.tolist() == [0, 0, 0.125, 0.75, 0, 0, 0.5]
    assert found.returns is not None and found.returns.tolist() == [
        0,
        0,
        0.625,
        1.0,
        0,
        0,
        2.0,
    ]
    assert found.reward.tolist() == [1.0, 2.0]
    assert found.advantage_statistics.tolist() == [
        [0.875, 0.578125, 0.75, 0.125],
        [0.5, 0.25, 0.5, 0.5],
    ]
    assert found.residual_statistics is not None
    assert found.residual_statistics[:, 0].tolist() == [
        0.875,
        0.5,
    ]  # returns - values = advantages


def test_every_token_pays_for_its_divergence_and_the_last_one_earns_the_reward() -> (
    None
):
    rows = rollouts_of([2])
    policy, reference = (
        log_probs_of(rows, [-1.0, -2.0]),
        log_probs_of(rows, [-1.5, -1.0]),
    )
    config = algorithm("reinforce_plus_plus", IN_REWARD, gamma=1.0)
    found = token_credit(config, 0.5, rows, rewards_of([1.0]), policy, reference, None)
    # kl = (0.5, -1); token rewards = (-0.25, 0.5 + 1); returns from each token on
    assert found.advantages.tolist() == [0, 0, 1.25, 1.5]
    assert (found.reward.tolist(), found.kl.tolist()) == ([1.25], [-0.5])
    assert found.returns is None

    # Where no version of the policy has them, the sampler's are compared.
    sampled = rows.replace(rollout_log_probs=policy.log_probs)
    again = token_credit(config, 0.5, sampled, rewards_of([1.0]), None, reference, None)
    assert again.advantages.tolist() == found.advantages.tolist()
    assert again.kl.tolist() == [-0.5]


def test_a_response_that_was_cut_is_worth_what_the_critic_expects_of_its_rest() -> None:
    rows = rollouts_of([1, 1], finish=[Finish.LENGTH, Finish.STOP])
    values = values_of(rows, [0.0, 0.0], [4.0, 4.0])
    for truncated, expected in (("bootstrap", [5.0, 1.0]), ("score", [1.0, 1.0])):
        config = algorithm("gae", gamma=1.0, lam=0.5, truncated=truncated)
        found = token_credit(
            config, 0.0, rows, rewards_of([1.0, 1.0]), None, None, values
        )
        assert found.advantages[rows.response_mask].tolist() == expected


def test_a_group_advantage_goes_to_every_token_of_its_response() -> None:
    rows = rollouts_of([2, 1])
    found = token_credit(
        algorithm("grpo"),
        0.0,
        rows,
        rewards_of([1.0, 0.0], [0.5, -0.5]),
        None,
        None,
        None,
    )
    assert found.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5]
    assert found.return_statistics is None and found.value_statistics is None


def test_a_group_baseline_does_not_pay_for_the_divergence_twice() -> None:
    rows = rollouts_of([2])
    policy, reference = (
        log_probs_of(rows, [-1.0, -2.0]),
        log_probs_of(rows, [-2.0, -4.0]),
    )
    found = token_credit(
        algorithm("rloo", IN_REWARD),
        0.5,
        rows,
        rewards_of([1.0], [0.25]),
        policy,
        reference,
        None,
    )
    assert (found.reward.tolist(), found.kl.tolist()) == ([1.0], [3.0])


def test_empty_responses_and_no_rows() -> None:
    rows = rollouts_of([0, 1])
    found = token_credit(
        GAE,
        0.0,
        rows,
        rewards_of([3.0, 1.0]),
        None,
        None,
        values_of(rows, [0.5], [0.0, 0.0]),
    )
    assert found.advantages.tolist() == [0, 0, 0, 0, 0.5]
    assert found.advantage_statistics.tolist() == [
        [0.0, 0.0, -np.inf, np.inf],
        [0.5, 0.25, 0.5, 0.5],
    ]
    nothing = rollouts_of([])
    assert (
        token_credit(
            GAE, 0.0, nothing, rewards_of([]), None, None, values_of(nothing, [], [])
        ).num_rows
        == 0
    )


def test_a_row_needs_no_other_row() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 20).tolist()
    rows, total = rollouts_of(lengths), sum(lengths)
    policy, reference = (
        log_probs_of(rows, rng.normal(size=total).tolist()) for _ in range(2)
    )
    values = values_of(
        rows, rng.normal(size=total).tolist(), rng.normal(size=20).tolist()
    )
    rewards = rewards_of(rng.normal(size=20).tolist())
    whole = token_credit(GAE_KL, 0.1, rows, rewards, policy, reference, values)
    order = rng.permutation(20)
    for part in (order[:7], order[7:]):
        found = token_credit(
            GAE_KL, 0.1, rows.select(part), rewards.select(part), policy.select(part), reference.select(part),
            values.select(part),
        )  # fmt: skip
        assert np.allclose(found.advantages, whole.select(part).advantages, atol=1e-6)
        assert np.allclose(found.kl, whole.select(part).kl, atol=1e-6)


def test_statistics_by_hand() -> None:
    table = row_statistics(np.array([1, -3, 2], np.float32), np.array([0, 2, 2, 3]))
    assert table.tolist() == [[-2, 10, 1, -3], [0, 0, -np.inf, np.inf], [2, 4, 2, 2]]


def test_what_is_missing_is_named() -> None:
    rows = rollouts_of([1])
    with pytest.raises(DataError, match="gae needs the critic's values"):
        token_credit(GAE, 0.0, rows, rewards_of([1.0]), None, None, None)
    with pytest.raises(DataError, match=r"reinforce_plus_plus needs algorithm\.gamma"):
        token_credit(
            algorithm("reinforce_plus_plus"),
            0.0,
            rows,
            rewards_of([1.0]),
            None,
            None,
            None,
        )
    log_probs = log_probs_of(rows, [-1.0])
    with pytest.raises(DataError, match=r"algorithm.kl.estimator is null"):
        response_divergences(algorithm("grpo"), rows, log_probs, log_probs)


def test_a_trajectory_is_learned_from_as_a_whole_or_not_at_all() -> None:
    """Where it is the sequence that losses judge; else its other rows are."""
    cut = [Finish.STOP, Finish.LENGTH, Finish.STOP, Finish.STOP]
    rows = rollouts_of([1, 1, 1, 1], groups=[7] * 4, finish=cut)
    rows = rows.replace(trajectory_id=np.array([1, 1, 2, 3]))
    for sequence, learned in (
        ("row", [True, False, True, True]),
        ("trajectory", [False, False, True, True]),
    ):
        config = algorithm("dr_grpo", truncated="mask", sequence=sequence)
        found = rewarded(config, rows, [0.0, 3.0, 0.0, 0.0])
        assert found.in_loss.tolist() == learned
        assert found.advantage.tolist() == pytest.approx([2, 2, -1, -1])


# ------------------------------------------------------------------ several rows of one


@pytest.mark.parametrize(
    "config",
    [
        GAE,
        GAE_KL,
        algorithm("gae", gamma=0.5, lam=0.5, truncated="bootstrap"),
        algorithm("length_adaptive_gae", gamma=1.0, lam_alpha=0.5, lam_critic=1.0),
        algorithm("reinforce_plus_plus", IN_REWARD, gamma=0.5),
    ],
)
def test_credit_does_not_depend_on_how_a_trajectory_is_cut(
    config: AlgorithmConfig,
) -> None:
    # Trajectory 4 has five sampled tokens, and trajectory 9 has three.
    numbers = {4: [0, 1, 2, 3, 4], 9: [5, 6, 7]}
    policy = [-1.0, -2.0, -0.5, -1.0, -3.0, -1.0, -0.25, -2.0]
    reference = [-1.5, -1.0, -0.5, -2.0, -1.0, -3.0, -1.25, -2.5]
    values = [0.5, 0.25, 1.5, -0.5, 0.75, 1.0, -1.0, 0.5]

    charges = config.kl.place == "reward"

    def credited(
        trajectories: list[int], lengths: list[int], rewards: list[float]
    ) -> dict[int, list[list[float]]]:
        # The tokens of the rows, in the order of time within each trajectory.
        remaining = {name: list(tokens) for name, tokens in numbers.items()}
        order = [
            remaining[name].pop(0)
            for name, length in zip(trajectories, lengths, strict=True)
            for _ in range(length)
        ]
        cut = Finish.LENGTH
        rows = rollouts_of(lengths, finish=[cut] * len(lengths))
        rows = rows.replace(trajectory_id=np.array(trajectories))

        def pick(column: list[float]) -> list[float]:
            return [column[token] for token in order]

        # Only the value after the last row counts.
        lasts = (
            len(trajectories) - 1 - np.unique(trajectories[::-1], return_index=True)[1]
        )
        final = [2.0 if row in lasts else 99.0 for row in range(len(lengths))]
        credit = token_credit(
            config,
            0.5,
            rows,
            rewards_of(rewards),
            log_probs_of(rows, pick(policy)),
            log_probs_of(rows, pick(reference)) if charges else None,
            values_of(rows, pick(values), final),
        )
        columns = [credit.advantages] + (
            [] if credit.returns is None else [credit.returns]
        )
        token_values = [
            dict(zip(order, c[rows.response_mask].tolist(), strict=True))
            for c in columns
        ]
        total = np.bincount(trajectories, weights=credit.reward)
        return {
            name: [[column[token] for token in tokens] for column in token_values]
            + [[total[name]]]
            for name, tokens in numbers.items()
        }

    whole = credited([4, 9], [5, 3], [3.0, -1.0])
    # Rows of two trajectories in turn; the reward stands on one row, or in parts.
    cut = credited([9, 4, 9, 4, 4], [1, 2, 2, 0, 3], [-1.0, 1.0, 0.0, 1.5, 0.5])
    for name, columns in whole.items():
        for column, same in zip(columns, cut[name], strict=True):
            assert same == pytest.approx(column, abs=1e-6)


def test_a_trajectory_is_positive_on_each_of_its_rows() -> None:
    rows = rollouts_of([1] * 5, groups=[7] * 5)
    rows = rows.replace(trajectory_id=np.array([1, 1, 2, 2, 3]))
    found = rewarded(algorithm("grpo"), rows, [0.0, 2.0, 0.0, -1.0, float("nan")])
    assert found.is_positive.tolist() == [True, True, False, False, False]


def test_the_reward_of_a_turn_is_paid_where_it_was_earned() -> None:
    rows = rollouts_of([3, 2, 1]).replace(
        trajectory_id=np.array([5, 5, 6]),
        end=np.zeros(3, np.int8),
        # Rows begin with two tokens of their prompts.
        turn_rewards=Ragged.of_rows(
            [
                [[2, 0.5, 0], [4, 0, 1]],
                [[2, 0.25, 2], [3, 0, 3]],
                [[2, 8.0, 0]],
            ],
            np.float64,
        ),
    )
    config = algorithm("reinforce_plus_plus", gamma=1.0)
    rewards = rewards_of([0.5, 0.5, 0.0])
    is_member = np.array([True, True, False])
    credit = token_credit(
        config,
        0.0,
        rows,
        dataclasses.replace(rewards, is_member=is_member),
        None,
        None,
        None,
    )
    # 0.5 at the first token, 0.25 at the fourth, and the rest, 0.25, at the last one.
    assert credit.advantages[rows.response_mask].tolist() == [
        1.0, 0.5, 0.5, 0.5, 0.25, 0.0,
    ]  # fmt: skip
    assert credit.reward.tolist() == [0.5, 0.5, 0.0]

    # A turn counts what the environment's score counts beside others: 0.6 of game. The
    # rest of the reward of 1 is 1 - 0.6 * 0.75.
    game_rows = rows.replace(data_source=Ragged.of_texts(["game", "game", "other"]))
    weighed = token_credit(
        config, 0.0, game_rows, rewards, None, None, None, {"game": 0.6, "default": 0.0}
    )
    assert weighed.advantages[rows.response_mask].tolist() == pytest.approx(
        [1.0, 0.7, 0.7, 0.7, 0.55, 0.0]
    )
    # Of a score that no environment made, all is paid at the end.
    at_end = token_credit(
        config, 0.0, game_rows, rewards, None, None, None, {"game": 0.0, "default": 1.0}
    )
    assert at_end.advantages[rows.response_mask].tolist() == [1.0] * 5 + [0.0]

    wrong = rows.replace(
        turn_rewards=Ragged.of_rows(
            [[[1, 0.5, 0], [4, 0, 1]], [[3, 0, 2]], [[2, 0, 0]]], np.float64
        )
    )
    with pytest.raises(DataError, match="was not sampled"):
        token_credit(config, 0.0, wrong, rewards, None, None, None)


def test_branches_are_one_sequence_in_the_order_of_their_turns() -> None:
    """The first branch has turns 0 and 2, of two tokens and one, the second turn 1."""
    config = algorithm("gae", gamma=0.5, lam=0.5, truncated="bootstrap")
    cut, values = Finish.LENGTH, [0.5, 0.25, 1.5, -0.5, 0.75]
    whole = rollouts_of([5], finish=[cut])
    expected = token_credit(
        config, 0.0, whole, rewards_of([3.0]), None, None, values_of(whole, values, [2])
    )

    # Rows are in the order of their last turns.
    rows = rollouts_of([2, 3], finish=[cut, cut]).replace(
        trajectory_id=np.array([5, 5]),
        end=np.zeros(2, np.int8),
        turn_rewards=Ragged.of_rows(
            [[[3, 0.0, 1]], [[3, 0.0, 0], [4, 0.0, 2]]], np.float64
        ),
    )
    time = [2, 3, 0, 1, 4]
    row_values = [values[token] for token in time]
    found = token_credit(
        config, 0.0, rows, rewards_of([0.0, 3.0]), None, None, values_of(rows, row_values, [9, 2])
    )  # fmt: skip
    for name in ("advantages", "returns"):
        in_time = getattr(expected, name)[whole.response_mask]
        assert getattr(found, name)[rows.response_mask] == pytest.approx(in_time[time])
