"""Scores that are normalised, clipped, weighted and added up, by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from scripts.configuration import compose
from verl_ray.config.reward import MixedReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import (
    ResponseScores,
    Shaping,
    failures,
    turn_weights,
)

INPUTS = [
    "model.path=/m",
    "data.train_path=/t.jsonl",
    "data.validation_path=/v.jsonl",
    "run.dir=/r",
]


def composed(*changes: str) -> RLConfig:
    config = compose("ppo", [*INPUTS, *changes])
    assert isinstance(config, RLConfig)
    return config


def shaping(*changes: str) -> Shaping:
    return Shaping(composed(*changes))


def scored(*scores: float, failed: ScoreHealth = ScoreHealth.TIMEOUT) -> ResponseScores:
    values = np.array(scores, np.float32)
    return ResponseScores(
        values, np.where(np.isnan(values), failed, ScoreHealth.OK).astype(np.int8)
    )


def test_a_single_grader_without_shaping_is_what_it_says() -> None:
    found = shaping().shape({"reward": scored(1.0, math.nan, 0.25)})
    np.testing.assert_array_equal(
        found.score, np.array([1.0, math.nan, 0.25], np.float32)
    )
    assert found.health.tolist() == [
        ScoreHealth.OK,
        ScoreHealth.TIMEOUT,
        ScoreHealth.OK,
    ]


def test_a_batch_is_normalised_by_itself_and_failed_scores_count_nothing() -> None:
    one = shaping("reward.normalise=batch")
    for scores in ((1.0, 3.0, math.nan), (10.0, 30.0, math.nan)):
        found = one.shape({"reward": scored(*scores)})
        np.testing.assert_allclose(found.score[:2], [-1, 1], rtol=1e-6)
        assert math.isnan(found.score[2])


@pytest.mark.parametrize("normalise", ["batch", "running"])
def test_an_aborted_score_counts_in_no_moments(normalise: str) -> None:
    aborted = np.array([False, False, True])
    found = shaping(f"reward.normalise={normalise}").shape(
        {"reward": scored(1.0, 3.0, 50.0)}, aborted
    )
    np.testing.assert_allclose(found.score, [-1, 1, 48], rtol=1e-6)


def test_running_moments_are_those_of_all_steps_so_far_and_survive_a_resume() -> None:
    one = shaping("reward.normalise=running")
    np.testing.assert_allclose(
        one.shape({"reward": scored(1.0, 3.0)}).score, [-1, 1], rtol=1e-6
    )
    again = shaping("reward.normalise=running")
    again.load_state(json.loads(json.dumps(one.state())))
    # of 1, 3, 5, 7: mean 4, variance 5
    for found in (
        one.shape({"reward": scored(5.0, 7.0)}),
        again.shape({"reward": scored(5.0, 7.0)}),
    ):
        np.testing.assert_allclose(
            found.score, [1 / math.sqrt(5), 3 / math.sqrt(5)], rtol=1e-6
        )


def test_moments_of_another_grader_are_left_behind() -> None:
    one = shaping("reward.normalise=running")
    one.shape({"reward": scored(1.0, 3.0)})
    for other in (["reward=http", "reward.url=http://h/"], MIXED):
        changed = shaping(*other)
        fresh = changed.state()
        changed.load_state(one.state())
        assert changed.state() == fresh


def test_clipping_follows_normalising() -> None:
    one = shaping("reward.normalise=batch", "reward.clip=1.5")
    # of 0, 0, 0, 0, 5: mean 1, deviation 2: -1/2 and 2
    np.testing.assert_allclose(
        one.shape({"reward": scored(0, 0, 0, 0, 5)}).score,
        [-0.5] * 4 + [1.5],
        rtol=1e-6,
    )


MIXED = [
    "reward=mixed", "reward.components.model.model.path=/rm", "reward.components.model.normalise=none",
    "reward.weights.function=2.0", "reward.components.model.clip=3.0",
]  # fmt: skip


def test_components_are_weighted_and_one_that_fails_fails_the_response() -> None:
    raw = {
        "reward.components.function": scored(1.0, 0.0, 1.0, math.nan),
        "reward.components.model": scored(
            4.0, -4.0, math.nan, math.nan, failed=ScoreHealth.TOO_LONG
        ),
    }
    found = shaping(*MIXED).shape(raw)
    # 2 x 1 + 0.5 x 3, 2 x 0 - 0.5 x 3
    np.testing.assert_array_equal(
        found.score, np.array([3.5, -1.5, math.nan, math.nan], np.float32)
    )
    assert found.health.tolist() == [
        ScoreHealth.OK,
        ScoreHealth.OK,
        ScoreHealth.TOO_LONG,
        ScoreHealth.TIMEOUT,
    ]
    assert found.ok.tolist() == [True, True, False, False]
    # What is weighted is normalised and clipped already.
    assert [weight for weight, _ in found.parts] == [2.0, 0.5]
    assert [values[:2].tolist() for _, values in found.parts] == [[1, 0], [3, -3]]
    assert found.as_graded[:2].tolist() == found.score[:2].tolist()


def declined(*scores: float) -> ResponseScores:
    """Scores of a component that returned None where there is none."""
    return scored(*scores, failed=ScoreHealth.NONE)


def test_none_leaves_a_response_to_the_other_components() -> None:
    """Weights are 2 and 0.5, and are not made larger where one of them is alone."""
    raw = {
        "reward.components.function": declined(1.0, *[math.nan] * 4),
        "reward.components.model": scored(2.0, 2.0, *[math.nan] * 3),
    }
    raw["reward.components.model"].health[3] = ScoreHealth.NONE
    for scores in raw.values():
        scores.health[4] = ScoreHealth.DROPPED
    for found in (shaping(*MIXED).shape(raw), shaping(*MIXED).weigh(raw)):
        np.testing.assert_array_equal(found.score, [3, 1, *[math.nan] * 3])
        assert [ScoreHealth(health).name for health in found.health] == [
            "OK", "OK", "TIMEOUT", "NONE", "DROPPED",
        ]  # fmt: skip
        # A part says that nobody gave it.
        np.testing.assert_array_equal(found.parts[0][1], [1, *[math.nan] * 4])
        np.testing.assert_array_equal(found.as_graded, found.score)
    failed = failures({role: scores.health for role, scores in raw.items()})
    assert {role: rows.tolist() for role, rows in failed.items()} == {
        "reward.components.function": [False, False, False, True, False],
        "reward.components.model": [False, False, True, True, False],
    }


def test_moments_of_a_component_are_those_of_what_it_scored() -> None:
    """Of 1 and 3: -1 and 1; equal ones are 0, and a response without one has no part."""
    one = shaping(*MIXED, "reward.components.function.normalise=batch")
    raw = {
        "reward.components.function": declined(1.0, 3.0, math.nan),
        "reward.components.model": scored(0.0, 0.0, 1.0),
    }
    assert one.shape(raw).score == pytest.approx([-2, 2, 0.5])
    raw["reward.components.function"] = declined(4.0, 4.0, math.nan)
    found = one.shape(raw)
    assert found.score.tolist() == [0, 0, 0.5]
    np.testing.assert_array_equal(found.parts[0][1], [0, 0, math.nan])


def test_what_cancels_is_zero() -> None:
    """In float64 0.1 + 0.2 - 0.3 is 5.6e-17; in float32 0.6 + 0.3 - 0.9 is 2.4e-8."""
    ones = scored(1.0, 0.0, 1.0, math.nan)
    three = ("function", 0.1), ("model", 0.2), ("third", -0.3)
    components = {name: composed().reward for name, _ in three}
    mixed = MixedReward(kind="mixed", components=components, weights=dict(three))
    raw = {f"reward.components.{name}": ones for name in components}
    three_graders = Shaping(composed().model_copy(update={"reward": mixed}))
    two_graders = shaping(
        *MIXED, "reward.weights.function=0.6", "reward.weights.model=0.3"
    )
    del raw["reward.components.third"]
    added = two_graders.shape(raw).plus((-0.9, np.float32([1, 0, 1, 1])))
    raw["reward.components.third"] = ones
    for found in (three_graders.shape(raw), three_graders.weigh(raw), added):
        np.testing.assert_array_equal(found.score, [0, 0, 0, math.nan])
        assert len(found.parts) == 3 and found.health[3] == ScoreHealth.TIMEOUT
    # Scores without parts are the first of them.
    twice = ones.plus((0.5, ones.score)).plus((-1.5, ones.score))
    np.testing.assert_array_equal(twice.score, [0, 0, 0, math.nan])
    assert [weight for weight, _ in twice.parts] == [1, 0.5, -1.5]


def test_turns_weigh_what_the_score_of_their_episode_weighs() -> None:
    """Of gsm8k an answer is compared, and all else is paid by an environment."""
    functions = "{default: environment, gsm8k: gsm8k}"
    episodes = ["agent.environments.default=game.py:Game"]
    single = composed(*episodes, f"reward.functions={functions}")
    assert turn_weights(single) == {"default": 1.0, "gsm8k": 0.0}

    graders = {"game": single.reward, "form": composed().reward}
    weights = {"game": 2.0, "form": 0.5}
    mixed = MixedReward(kind="mixed", components=graders, weights=weights)
    mixed_config = single.model_copy(update={"reward": mixed})
    assert turn_weights(mixed_config) == {"default": 2.0, "gsm8k": 0.0}
    normalised = [f"reward.functions={functions}", "reward.normalise=batch"]
    assert turn_weights(composed(*episodes, *normalised)) == {"default": 0.0}


def test_a_trajectory_is_scored_as_a_whole_on_its_last_row() -> None:
    """Trajectories of 2, 1 and 3 rows, whose scores of 1, none and 3 have mean 2."""
    one = shaping("reward.normalise=batch")
    shaped = one.shape({"reward": scored(1.0, math.nan, 3.0)})
    found = shaped.on_rows(np.array([1, 2, 5]))
    np.testing.assert_allclose(found.score, [0, -1, math.nan, 0, 0, 1], rtol=1e-6)
    assert found.ok.tolist() == [True, True, False, True, True, True]
    np.testing.assert_array_equal(found.as_graded, [0, 1, math.nan, 0, 0, 3])
    ((weight, part),) = found.parts
    assert weight == 1 and part.tolist()[3:] == [0, 0, pytest.approx(1)]
    assert shaped.on_rows(np.arange(3)) is shaped


def test_scores_are_judged_as_they_were_graded() -> None:
    """2 x 0.5 + 0.5 x 8, 2 x 0 + 0.5 x 4: the bound of 3 is one of deviations."""
    one = shaping(
        *MIXED,
        "reward.components.model.normalise=batch",
        "reward.components.function.clip=0.5",
    )
    found = one.shape(
        {
            "reward.components.function": scored(1.0, 0.0, math.nan),
            "reward.components.model": scored(8.0, 4.0, 4.0),
        }
    )
    np.testing.assert_array_equal(found.as_graded, [5.0, 2.0, math.nan])


@pytest.mark.parametrize("normalise", ["batch", "running"])
def test_held_out_scores_are_weighed_as_they_are_and_leave_no_trace(
    normalise: str,
) -> None:
    one = shaping(*MIXED, f"reward.components.model.normalise={normalise}")
    raw = {
        "reward.components.function": scored(1.0),
        "reward.components.model": scored(4.0),
    }
    before = one.state()
    assert one.weigh(raw).score.tolist() == [4.0] and one.state() == before


def test_a_sum_beyond_the_largest_is_a_failed_score_of_its_row() -> None:
    """That is 1e18: not 2 x 9e17, but 2 x 9e17 - 9.5e17."""
    one = shaping(*MIXED, "reward.components.model.clip=null")
    raw = {
        "reward.components.function": scored(9e17, 9e17, 1.0, math.nan),
        "reward.components.model": scored(0.0, -9e17, 1.0, 1.0),
    }
    for found in (one.shape(raw), one.weigh(raw)):
        assert [ScoreHealth(health).name for health in found.health] == [
            "NONFINITE", "NONFINITE", "OK", "TIMEOUT",
        ]  # fmt: skip
        np.testing.assert_array_equal(found.score, [math.nan, math.nan, 2.5, math.nan])
    raw["reward.components.model"] = scored(0.0, -9.5e17, 1.0, 1.0)
    whole = shaping(*MIXED, "reward.weights.model=1.0")
    assert whole.weigh(raw).score[1] == pytest.approx(8.5e17)

    # So it is with what is added for a length.
    added = scored(9e17, 1.0).plus((1.0, np.float32([2e17, 0.5])))
    assert [ScoreHealth(health).name for health in added.health] == ["NONFINITE", "OK"]
    np.testing.assert_array_equal(added.score, [math.nan, 1.5])
    assert added.as_graded.tolist() == [np.float32(9e17), 1]
