"""What is added to scores, and what baselines make of it, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from controllers.trainers.learner import response_columns
from controllers.watch.measures import Metrics, addition_metrics
from scripts.configuration import compose
from tests.rows import columns_of, rollouts_of
from verl_ray.agents.contract import End
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import NO_EPISODE, Finish, Rollouts, RowRewards, Scores
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.learning.credit import response_rewards
from verl_ray.rewards.shaping import ResponseScores, Shaping, with_additions


def config(algorithm: str, *changes: str) -> RLConfig:
    composed = compose(
        "grpo",
        [
            "model.path=m", "data.train_path=t", "data.validation_path=v", "rollout.max_response_tokens=10",
            f"algorithm={algorithm}", *changes,
        ],
    )  # fmt: skip
    assert isinstance(composed, RLConfig)
    return composed


def shaped(
    config: RLConfig, score: Sequence[float], rows: Rollouts
) -> tuple[ResponseScores, Metrics]:
    values = np.array(score, np.float32)
    scores = ResponseScores(values, np.zeros(len(score), np.int8), parts=((1.0, values),))  # fmt: skip
    length = rows.response_length.astype(np.int64)
    rewards = with_additions(
        config, scores, Sharded.stored(None, Receipt.of(rows)), length
    )
    return rewards.scores, addition_metrics(rewards)


def rewarded(config: RLConfig, scores: ResponseScores, rows: Rollouts) -> RowRewards:
    return response_rewards(
        config.algorithm, scores.score, scores.ok, columns_of(rows), None, scores.parts, scores.as_graded
    )  # fmt: skip


@pytest.mark.parametrize("weight", [0.001, 0.1, 1.0])
def test_gdpo_weights_each_reward_of_a_length_after_it_is_normalised(
    weight: float,
) -> None:
    """Brevity is 0.5, -0.5, 0 and 0, so its deviation is the root of 1 / 6.

    That of the scores is the root of 1 / 3. So the first two have (0.5 / root(1 / 3))
    +- weight * (0.5 / root(1 / 6)): their difference is weight * root(2) of their sum.
    """
    rows = rollouts_of([1, 3, 2, 2], groups=[0, 0, 0, 0])
    settings = config("gdpo", f"algorithm.brevity={weight}")
    scores, metrics = shaped(settings, [1, 1, 0, 0], rows)
    assert scores.score == pytest.approx([1 + weight / 2, 1 - weight / 2, 0, 0])
    assert metrics == {"reward/brevity/mean": 0}

    short, long, *wrong = rewarded(settings, scores, rows).advantage
    assert (short - long) / (short + long) == pytest.approx(weight * 2**0.5, rel=1e-3)
    assert wrong == pytest.approx([-(short + long) / 2] * 2)


def test_gdpo_normalises_each_addition_by_itself() -> None:
    rows = rollouts_of([6, 10, 6, 8], groups=[0, 0, 1, 1])
    both = config("gdpo", "algorithm.brevity=0.5", "algorithm.overlong_share=0.5")
    scores, metrics = shaped(both, [1, 1, 1, 1], rows)
    assert [weight for weight, _ in scores.parts] == [1, 1, 0.5]
    # The last five tokens are penalised: 0.2, 1, 0.2 and 0.6 of 1.
    assert scores.parts[1][1] == pytest.approx([-0.2, -1, -0.2, -0.6])
    assert scores.parts[2][1] == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert scores.score == pytest.approx([1.05, -0.25, 1.05, 0.15])
    assert metrics == {
        "reward/overlong_penalty/mean": pytest.approx(-0.5), "reward/brevity/mean": 0
    }  # fmt: skip
    # Four numbers x, -x, x and -x deviate by x * root(4 / 3).
    size = 0.75**0.5
    found = rewarded(both, scores, rows).advantage
    assert found == pytest.approx([size, -size, size, -size], rel=1e-4)


@pytest.mark.parametrize("left_out", [Finish.ABORTED, Finish.LENGTH])
def test_what_is_no_member_of_its_group_has_no_length_among_it(
    left_out: Finish,
) -> None:
    """The first is the shortest, and scored all the same."""
    finish = [left_out, Finish.STOP, Finish.STOP]
    rows = rollouts_of([1, 4, 8], groups=[0, 0, 0], finish=finish)
    lengths = ("algorithm.brevity=1.0", "algorithm.efficiency=1.0", "algorithm.truncated=drop")  # fmt: skip
    scores, metrics = shaped(config("grpo", *lengths), [1, 1, 1], rows)
    # 0.5 of brevity, and 1 - 4 / 6 of efficiency.
    assert scores.score == pytest.approx([1, 1 + 0.5 + 1 / 3, 1 - 0.5])
    assert metrics["reward/efficiency/mean"] == pytest.approx(1 / 6)


def test_the_greedy_response_of_remax_is_a_member_where_lengths_are_compared() -> None:
    """With a group of two there would be nothing to compare otherwise."""
    rows = rollouts_of([2, 6, 6, 2], groups=[0, 0, 1, 1])
    settings = config("remax", "rollout.group_size=2", "algorithm.brevity=0.5")
    scores, _ = shaped(settings, [1, 1, 1, 1], rows)
    assert scores.score == pytest.approx([1.25, 0.75, 0.75, 1.25])
    # A sample is worth more than the greedy one by its length alone.
    found = rewarded(settings, scores, rows).advantage
    assert found == pytest.approx([0.5, 0, -0.5, 0])


def test_what_is_right_is_judged_by_the_scores_of_the_graders() -> None:
    """The normalised scores are -1, -1, 1 and 1.

    Brevity takes 0.5 off a long response, and gives a short one 0.5 if it is right.
    Efficiency gives 1 - 2 / 4 of the score of a right one. At the limit of 10 tokens
    DAPO's penalty takes 1 off.
    """
    rows = rollouts_of([2, 6, 2, 6], groups=[0, 0, 1, 1])
    settings = config(
        "vapo", "reward.normalise=batch", "algorithm.brevity=1.0", "algorithm.efficiency=1.0"
    )  # fmt: skip
    for raw, expected, positive in (
        ([-3, -3, -1, -1], [-1, -1.5, 1, 0.5], [False] * 4),
        ([1, 1, 3, 3], [-1 + 0.5 + 0.5, -1.5, 1 + 0.5 + 1.5, 0.5], [True] * 4),
    ):
        graded = ResponseScores(np.array(raw, np.float32), np.zeros(4, np.int8))
        scores = Shaping(settings).shape({"reward": graded})
        length = rows.response_length.astype(np.int64)
        scores = with_additions(settings, scores, Sharded.stored(None, Receipt.of(rows)), length).scores  # fmt: skip
        assert scores.score == pytest.approx(expected)
        assert rewarded(settings, scores, rows).is_positive.tolist() == positive

    # Of 20 tokens that all turns of an episode may have, 10 are before the last fifth.
    game = ["agent.environments.default=my_env.py:Game", "agent.max_tokens=20"]
    at_limit = rollouts_of([10, 2], groups=[0, 0])
    settings = config("vapo", "algorithm.overlong_share=0.2", *game)
    episodes = at_limit.replace(end=np.zeros(2, np.int8))
    assert shaped(settings, [1, 0], episodes)[0].score.tolist() == [1, 0]
    # A single response beside episodes may have 10, and is penalised as without them.
    mixed = at_limit.replace(end=np.array([NO_EPISODE, 0], np.int8))
    assert shaped(settings, [1, 0], mixed)[0].score.tolist() == [0, 0]
    # And no treatment of an end is about it.
    masking = config("vapo", *game, *(f"agent.ends.{end}=mask" for end in End))
    stored = Sharded.stored(None, Receipt.of(mixed))
    assert response_columns(stored, masking).is_masked.tolist() == [False, True]  # type: ignore[union-attr]
    settings = config("vapo", "algorithm.overlong_share=0.2")
    scores, _ = shaped(settings, [1, 0], at_limit)
    assert scores.score.tolist() == [0, 0]
    assert rewarded(settings, scores, at_limit).is_positive.tolist() == [True, False]


def test_a_trajectory_of_two_rows_has_one_reward_and_the_length_of_both() -> None:
    """The rows have 5, 2, 4 and 9 tokens; the first two are one trajectory.

    Of up to 10 tokens the last 5 cost: 7 tokens 0.4, 4 tokens nothing, 9 tokens 0.8.
    """
    rows = rollouts_of([5, 2, 4, 9], groups=[0, 0, 0, 0])
    rows = rows.replace(trajectory_id=np.array([0, 0, 1, 2]))
    scores = Scores.ok(np.array([np.nan, 1, 1, 1], np.float32))
    groups = Experience(
        Sharded.stored(None, Receipt.of(rows)), {"reward": Sharded.stored(None, Receipt.of(scores))}
    )  # fmt: skip
    settings = config("grpo", "algorithm.overlong_share=0.5")
    rewards = Shaping(settings).rewards(groups)
    assert rewards.scores.score == pytest.approx([0.6, 1, 0.2])
    assert rewards.is_member.tolist() == [True] * 3
    mean = addition_metrics(rewards)["reward/overlong_penalty/mean"]
    assert mean == pytest.approx(-1.2 / 3)
