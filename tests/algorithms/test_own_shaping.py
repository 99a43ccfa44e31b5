"""Rewards that a function in a file of the user's makes of scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controllers.watch.measures import Metrics, addition_metrics
from scripts.configuration import compose
from tests.rows import rollouts_of
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Finish, Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, DataError
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import ResponseScores, with_additions

OWN = Path(__file__).parent / "own_shaping_file.py"


def config(function: str, *changes: str) -> RLConfig:
    composed = compose(
        "grpo",
        [
            "model.path=m", "data.train_path=t", "data.validation_path=v",
            "rollout.max_response_tokens=10", f"algorithm.shaping={OWN}:{function}", *changes,
        ],
    )  # fmt: skip
    assert isinstance(composed, RLConfig)
    return composed


def rollouts() -> Sharded[Rollouts]:
    cut = [Finish.STOP, Finish.LENGTH, Finish.STOP, Finish.ABORTED]
    rows = rollouts_of([2, 10, 4, 1], groups=[0, 0, 1, 1], finish=cut)
    return Sharded.stored(None, Receipt.of(rows))


def scores() -> ResponseScores:
    failed = int(ScoreHealth.OK) + 1
    nan = float("nan")
    style = np.array([0.5, 0.25, nan, 1], np.float32)
    right = np.array([1, 2, nan, 3], np.float32)
    total = right + 2 * style
    health = np.array([ScoreHealth.OK, ScoreHealth.OK, failed, ScoreHealth.OK], np.int8)
    return ResponseScores(total, health, parts=((1.0, right), (2.0, style)))


def shaped_by(settings: RLConfig) -> tuple[ResponseScores, Metrics]:
    rows = rollouts()
    rewards = with_additions(settings, scores(), rows, rows.row("response_length"))
    return rewards.scores, addition_metrics(rewards)


def test_a_function_gets_what_it_names() -> None:
    shaped, metrics = shaped_by(config("everything"))
    # (1 + 1) * 1 + 1; (2 + 0.5) * 10 / 10 / 2 + 0.5; failed; aborted, so as it was.
    assert shaped.score.tolist() == pytest.approx([3, 1.75, np.nan, 5], nan_ok=True)
    assert shaped.ok.tolist() == [True, True, False, True]
    # What it added is a part: 1, -0.75, nothing for the failed, 0.
    weight, added = shaped.parts[2]
    assert weight == 1 and added.tolist() == pytest.approx([1, -0.75, 0, 0])
    # The mean is over the two that are members of their groups.
    assert metrics == {"reward/shaping/mean": pytest.approx(0.25 / 2)}


def test_settings_of_lengths_are_its_own_then() -> None:
    """The package's brevity would add something else."""
    shaped, _ = shaped_by(config("shorter", "algorithm.brevity=0.5"))
    assert shaped.score.tolist() == pytest.approx(
        [2 - 0.01, 2.5 - 0.05, np.nan, 5], nan_ok=True
    )


def test_a_response_without_a_score_stays_so_whatever_is_returned() -> None:
    """Of the last two rows one has failed, and one was aborted."""
    shaped, metrics = shaped_by(config("nowhere_else"))
    assert shaped.score.tolist() == pytest.approx([3, 3.5, np.nan, 5], nan_ok=True)
    assert shaped.parts[2][1].tolist() == [1, 1, 0, 0]
    assert metrics == {"reward/shaping/mean": 1}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("short", r"own_shaping_file.py:short returned an array of shape \(3,\); expected one number per row"),
        ("infinite", "own_shaping_file.py:infinite returned numbers that are not finite"),
        ("broken", "own_shaping_file.py:broken failed: AttributeError: .*no_such_thing"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_a_function_that_fails_is_named(function: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        shaped_by(config(function))


@pytest.mark.parametrize(
    ("spec", "rule", "fix"),
    [
        (f"{OWN}:typo", "typo takes lenght, which is no setting", "Did you mean length?"),
        (f"{OWN}:longer", "defines no function 'longer'", "shorter"),
        ("kimi", "kimi names no function", "path/to/file.py:function"),
        (f"{OWN.parent}/other.py:shape", "cannot be read", "Correct the path"),
    ],
)  # fmt: skip
def test_a_function_is_read_before_anything_starts(
    spec: str, rule: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("quickstart", [f"algorithm.shaping={spec}"])
    (problem,) = caught.value.problems
    assert problem.key == "algorithm.shaping"
    assert rule in problem.rule and fix in problem.fix


def test_an_older_configuration_shapes_nothing() -> None:
    without = compose("quickstart", [])
    assert isinstance(without, RLConfig) and without.algorithm.shaping is None
    same, metrics = shaped_by(without)
    assert metrics == {} and len(same.parts) == len(scores().parts) == 2
    assert np.array_equal(same.score, scores().score, equal_nan=True)
