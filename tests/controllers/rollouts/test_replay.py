"""Groups of earlier steps take the place of those that teach nothing, once each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from controllers.rollouts.stored_groups import REPLAY_FOLDER, Replay, write_groups
from scripts.configuration import compose
from tests.controllers.rollouts.test_stored_groups import sharded
from tests.rows import rollouts_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Scores
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.token_versions import OptimizerSteps, versions_of_tokens
from verl_ray.rewards.health import ScoreHealth
from workers.rollout import versions_of

REPLAYING = (
    "algorithm.replay=2",
    "algorithm.replay_age=2",
    "algorithm.correction.form=two_policy",
)


def config(*overrides: str) -> RLConfig:
    found = compose(
        "quickstart",
        ["algorithm=grpo", "rollout.group_size=2", "actor.mini_batch_size=null", *REPLAYING, *overrides],
    )  # fmt: skip
    assert isinstance(found, RLConfig)
    return found


def batch(
    groups: dict[int, tuple[float, float]], version: int, *, stored: bool = False
) -> Experience:
    """Two rows of each ordinal, with these scores and two tokens of this version."""
    ordinals = np.repeat(list(groups), 2)
    rows = len(ordinals)
    spans = Ragged.of_rows([np.array([[2, version]])] * rows, np.int64)
    rollouts = rollouts_of([2] * rows, groups=ordinals.tolist()).replace(
        row_id=2 * ordinals + np.arange(rows) % 2,
        trajectory_id=2 * ordinals + np.arange(rows) % 2,
        version_spans=spans,
        **versions_of(spans),
    )
    score = np.concatenate(list(groups.values())).astype(np.float32)
    health = np.where(np.isnan(score), ScoreHealth.EXCEPTION, ScoreHealth.OK)
    scores = Scores.ok(score).replace(health=health.astype(np.int8))
    keep = put if stored else sharded
    return Experience(keep(rollouts), {"reward": keep(scores)})


def ordinals_of(groups: Experience | None) -> list[int]:
    if groups is None:
        return []
    return np.unique(groups.rollouts.row("group_id")).tolist()


def test_a_trajectory_of_two_rows_has_one_score() -> None:
    """Its first row has a score of 0, which makes no spread."""
    replay = Replay(config())
    replay.exchange(_of_two_rows({0: (1, 0), 1: (1, 0.75)}, 0), 0)
    assert ordinals_of(replay.groups) == [0, 1]
    exchanged = replay.exchange(_of_two_rows({2: (1, 1), 3: (0.5, 0)}, 1), 1)
    assert (exchanged.replaced.tolist(), exchanged.replayed.tolist()) == ([2], [0])
    assert len(exchanged.groups.rollouts) == 8
    # The spreads are 0.125 and 0.25.
    assert ordinals_of(replay.groups) == [1, 3]


def _of_two_rows(groups: dict[int, tuple[float, float]], version: int) -> Experience:
    """The rows of `batch`, each behind another one of the same trajectory."""
    whole = batch(groups, version)
    twice = whole.select(np.repeat(np.arange(len(whole.rollouts)), 2))
    is_first = np.arange(len(twice.rollouts)) % 2 == 0
    score = twice.scores["reward"].row("score")
    score[is_first] = 0
    row_id = twice.rollouts.row("row_id")
    row_id[:] = 2 * row_id + ~is_first
    return twice


def test_the_largest_spread_first_and_each_group_once() -> None:
    replay = Replay(config())
    first = replay.exchange(batch({0: (1, 0), 1: (1, 1), 2: (0, 0)}, 0), 0)
    assert (ordinals_of(first.groups), first.replaced.tolist()) == ([0, 1, 2], [])

    second = replay.exchange(batch({3: (1, 1), 4: (0.5, 0), 5: (0, 0)}, 1), 1)
    assert (second.replaced.tolist(), second.replayed.tolist()) == ([3], [0])
    rows = second.groups.rollouts
    assert rows.row("row_id").tolist() == [0, 1, 8, 9, 10, 11]
    assert second.groups.scores["reward"].row("score").tolist() == [1, 0, 0.5, 0, 0, 0]
    # Group 0 was learned from twice and is not kept.
    assert ordinals_of(replay.groups) == [4]

    third = replay.exchange(batch({6: (1, 0), 7: (0, 1), 8: (0.5, 0)}, 2), 2)
    assert not len(third.replaced) and ordinals_of(third.groups) == [6, 7, 8]
    assert ordinals_of(replay.groups) == [6, 7]
    # Of equal spreads the newest comes first.
    fourth = replay.exchange(batch({9: (0, 0), 10: (0.5, 0), 11: (1, 0)}, 3), 3)
    assert (fourth.replaced.tolist(), fourth.replayed.tolist()) == ([9], [7])


def test_a_spread_of_rounding_is_replaced_and_not_kept() -> None:
    replay = Replay(config())
    nearly = float(np.nextafter(np.float32(0.9), np.float32(1)))
    replay.exchange(batch({0: (1, 0), 1: (0.9, nearly)}, 0), 0)
    assert ordinals_of(replay.groups) == [0]
    exchanged = replay.exchange(batch({2: (nearly, 0.9), 3: (1, 0)}, 1), 1)
    assert (exchanged.replaced.tolist(), exchanged.replayed.tolist()) == ([2], [0])


def test_no_group_is_older_than_the_bound() -> None:
    replay = Replay(config())
    replay.exchange(batch({0: (1, 0), 1: (0.5, 0)}, 3), 3)
    replay.exchange(batch({2: (0.1, 0), 3: (0.1, 0)}, 4), 4)
    assert ordinals_of(replay.groups) == [0, 1]
    fresh = batch({4: (0, 0), 5: (0, 0)}, 6)
    assert replay.exchange(fresh, 6).replayed.tolist() == [], "groups 0 and 1 are 3 old"
    assert replay.groups is None


def test_the_bound_is_that_of_replay_and_not_of_the_schedule() -> None:
    replay = Replay(config("schedule=carry_over", "rollout.staleness=4"))
    replay.exchange(batch({0: (1, 0), 1: (0, 0)}, 0), 0)
    assert ordinals_of(replay.groups) == [0]
    replay.exchange(batch({2: (0.5, 0), 3: (1, 0)}, 2), 2)
    # The version of group 0 would be 3 old in the next step.
    assert ordinals_of(replay.groups) == [2, 3]


def test_a_larger_bound_replays_nothing_of_a_version_that_is_forgotten() -> None:
    """As a run that is resumed with it does: its optimizer steps are those of before."""
    replay, steps = Replay(config()), OptimizerSteps(2, 1)
    for version in range(3):
        steps.publish(version)
        replay.exchange(batch({version: (1, 0)}, version), version)
        steps.add(1)
    steps.publish(3)

    resumed, resumed_steps = (
        Replay(config("algorithm.replay_age=9")),
        OptimizerSteps(9, 1),
    )
    resumed.groups = replay.groups
    resumed_steps.load_state(json.loads(json.dumps(steps.state())))
    found = resumed.exchange(batch({4: (0, 0), 5: (0, 0), 6: (0, 0)}, 3), 3)
    assert found.replayed.tolist() == [1, 2]
    versions = found.groups.rollouts.row("oldest_version")
    assert set(resumed_steps.ages(0).count(versions)) == {1, 2, 3}


def test_failed_scores_make_no_spread() -> None:
    replay = Replay(config())
    replay.exchange(batch({0: (1, np.nan), 1: (1, 0)}, 0), 0)
    assert ordinals_of(replay.groups) == [1]


@pytest.mark.cluster
def test_a_checkpoint_holds_the_groups(
    cluster: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replay = Replay(config())
    replay.exchange(batch({0: (1, 0), 1: (0, 0.5), 2: (0, 0)}, 4, stored=True), 4)
    groups = replay.groups
    assert groups is not None
    # What happens later is not in it.
    replay.exchange(batch({3: (0, 0), 4: (0, 0), 5: (0, 0)}, 5, stored=True), 5)
    assert replay.groups is None
    write_groups(tmp_path / REPLAY_FOLDER, groups, config())

    resumed = Replay(config())
    resumed.read(tmp_path)
    assert resumed.groups is not None
    assert resumed.groups.rollouts.row("row_id").tolist() == [0, 1, 2, 3]
    assert set(versions_of_tokens(read(resumed.groups.rollouts, 60))) == {4}
    taken = resumed.exchange(batch({6: (0, 0), 7: (1, 0)}, 5, stored=True), 5)
    assert taken.replayed.tolist() == [0]

    other = Replay(config("rollout.temperature=0.7"))
    other.read(tmp_path)
    assert other.groups is None
    said = capfd.readouterr().err
    assert "4 finished responses of the checkpoint are not replayed" in said
    assert "another rollout.temperature" in said
    # A checkpoint of a run without replay has none.
    resumed.read(tmp_path / "none")
    assert resumed.groups is None
