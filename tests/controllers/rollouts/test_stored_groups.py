"""Finished groups over a restart: the same bits, and those that can be learned from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from controllers.rollouts import stored_groups
from controllers.rollouts.stored_groups import (
    FOLDER,
    StoredGroups,
    changed_settings,
    read_groups,
    usable_groups,
    write_groups,
)
from scripts.configuration import compose
from tests.columns.test_batch_files import bits, rich
from tests.rows import rollouts_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.batch import Int64, Ragged
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Rollouts, Scores, versions_of
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer


def config(*changes: str) -> RLConfig:
    """Two prompts of two rows each a step, and tokens of the last version, too."""
    found = compose(
        "quickstart",
        ["schedule=one_step_off", "placement=separate", "data.prompts_per_step=2",
         "rollout.group_size=2", "actor.mini_batch_size=null", *changes],
    )  # fmt: skip
    assert isinstance(found, RLConfig)
    return found


# -------------------------------------------------------------------------------- files


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_groups_come_back_bit_by_bit_in_several_files(
    tmp_path: Path, cluster: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_groups, "_ROWS_PER_FILE", 3)
    parts = [rich(3, 0, 5, 1), rich(2, 2, seed=1)]
    rollouts = Sharded.concat([put(part) for part in parts])
    scores = put(Scores.ok(np.array([1, np.nan, 3, 4, 5, 6], np.float32)))
    # Rows of both parts, not in their order.
    groups = Experience(rollouts, {"reward": scores, "judge": scores}).select(
        np.array([4, 1, 0, 5, 3, 2])
    )

    assert read_groups(tmp_path / FOLDER) is None
    write_groups(tmp_path / FOLDER, groups, config())
    files = sorted(
        path.relative_to(tmp_path / FOLDER) for path in tmp_path.rglob("*.npz")
    )
    assert [str(path) for path in files] == [
        f"{name}/{number:05}.npz"
        for name in ("judge", "reward", "rollouts")
        for number in (0, 1)
    ]

    stored = read_groups(tmp_path / FOLDER)
    assert stored is not None
    found = stored.groups
    assert found.scores.keys() == {"reward", "judge"}
    assert bits(read(found.rollouts, 60)) == bits(read(groups.rollouts, 60))
    for name, scored in found.scores.items():
        assert bits(read(scored, 60)) == bits(read(groups.scores[name], 60))
    # What the driver knows of the rows without reading them is the same, too.
    for name, column in groups.rollouts.columns.items():
        assert np.array_equal(found.rollouts.row(name), column), name


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_buffer_goes_on_with_what_another_one_wrote(tmp_path: Path) -> None:
    before = RolloutBuffer(2, staleness=4)
    before.reserve(np.array([0, 1, 2]))
    whole = rich(3, 0, 5, 1)
    for rows in ([3], [0, 2], [1]):
        part = whole.select(rows)
        scores = Scores.ok(np.array(rows, np.float32))
        before.put(Experience(put(part), {"reward": put(scores)}))
    finished = before.whole()
    assert finished is not None
    write_groups(tmp_path / FOLDER, finished, config())

    after = RolloutBuffer(2, staleness=4)
    stored = read_groups(tmp_path / FOLDER)
    assert stored is not None
    after.restore(stored.groups)
    assert after.whole_groups.tolist() == [0, 1]
    taken = after.take(np.array([0, 1]), 4, lambda: pytest.fail("all are there"))
    assert bits(read(taken.rollouts, 60)) == bits(whole)
    assert taken.scores["reward"].row("score").tolist() == [0, 1, 2, 3]


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_episodes_of_an_earlier_version_can_be_learned_from(tmp_path: Path) -> None:
    run = config("agent.environments.default=game.py:Game")
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "Right."},
    ]
    rollouts = rollouts_of([2, 2], groups=[6, 6]).replace(
        end=np.zeros(2, np.int8),
        end_detail=Ragged.of_texts(["", ""]),
        num_turns=np.ones(2, np.int32),
        episode_score=np.ones(2, np.float32),
        turn_rewards=Ragged.of_rows([[[3.0, 1.0, 0.0]]] * 2, np.float64),
        episode_record=Ragged.of_texts([json.dumps(messages), "[]"]),
    )
    scores = put(Scores.ok(np.ones(2, np.float32)))
    folder = tmp_path / FOLDER
    write_groups(folder, Experience(put(rollouts), {"reward": scores}), run)

    # What the earlier version wrote, in its names.
    (file,) = (folder / "rollouts").iterdir()
    with np.load(file) as arrays:
        columns = {
            name.replace("episode_record", "episode_messages"): arrays[name]
            for name in arrays.files
        }
    assert "episode_metrics" not in columns
    np.savez(file, **columns)
    settings = json.loads((folder / "settings.json").read_text())
    for name in ("models", "reasoning_parser", "max_result_tokens"):
        del settings["agent"][name]
    (folder / "settings.json").write_text(json.dumps(settings))

    stored = read_groups(folder)
    assert stored is not None
    # What a resumed run has of the settings that were added since.
    agent = run.agent.model_copy(
        update={"reasoning_parser": None, "max_result_tokens": 100_000}
    )
    resumed = run.model_copy(update={"agent": agent})
    assert changed_settings(stored, resumed) == []
    rows = read(usable_groups(stored, resumed, np.zeros(2, np.int64)).rollouts, 60)
    assert rows.episode_record is not None and rows.episode_metrics is not None
    assert [json.loads(text) for text in rows.episode_record.texts()] == [
        {"conversations": [messages], "response": "one"},
        {"conversations": [], "response": ""},
    ]
    assert rows.episode_metrics.texts() == ["", ""]


# ------------------------------------------------------------------------------ usable


def sharded(batch: Rollouts | Scores) -> Sharded:
    return Sharded.stored(batch, Receipt.of(batch))


def groups_of(*versions: tuple[int, int | None], grader: str = "reward") -> Experience:
    """Rows of these groups, with tokens of this version or without any."""
    responses = [0 if version is None else 2 for _, version in versions]
    rollouts = rollouts_of(responses, groups=[group for group, _ in versions])
    spans = Ragged.of_rows(
        [np.reshape([] if version is None else [[2, version]], (-1, 2)) for _, version in versions],
        np.int64,
    )  # fmt: skip
    rollouts = rollouts.replace(version_spans=spans, **versions_of(spans))
    scores = Scores.ok(np.arange(len(versions), dtype=np.float32))
    return Experience(sharded(rollouts), {grader: sharded(scores)})


def oldest_of(groups: Experience, run: RLConfig) -> Int64:
    """The oldest version that each row may have, with two groups a batch."""
    return groups.rollouts.row("group_id") // 2 - run.rollout.staleness


def usable(
    groups: Experience, *changes: str, before: tuple[str, ...] = ()
) -> list[int]:
    stored = StoredGroups(groups, stored_groups._settings_of(config(*before)))
    run = config(*changes)
    found = usable_groups(stored, run, oldest_of(groups, run))
    rows = found.rollouts.row("row_id").tolist()
    for scores in found.scores.values():
        assert scores.row("score").tolist() == rows
    return rows


STORED = ((6, 2), (6, 3), (7, 2), (7, 2), (8, 3), (8, 3), (9, None), (9, None))
"""Groups of batches 3 and 4, which the versions 3 and 4 learn from."""


def test_a_group_with_a_token_that_is_too_old_is_not_usable() -> None:
    groups = groups_of(*STORED)
    assert usable(groups) == list(range(8))
    # A smaller bound leaves the one whose tokens are all of the version that learns.
    synchronous = ("schedule=synchronous", "placement=colocated")
    assert usable(groups, *synchronous) == [6, 7]
    assert usable(groups_of((6, 3), (6, 3)), *synchronous) == [0, 1]
    assert usable(groups_of((6, 1), (6, 3))) == []
    assert usable(groups_of((6, 1), (6, 3)), "rollout.staleness=2") == [0, 1]


def test_a_group_of_another_size_is_not_usable() -> None:
    groups = groups_of((6, 3), (6, 3), (7, 3), (8, 4), (8, 4), (8, 4))
    assert usable(groups) == [0, 1]
    assert usable(groups, "rollout.group_size=3") == [3, 4, 5]


def test_what_would_be_sampled_or_scored_otherwise_now_is_not_usable() -> None:
    groups = groups_of((6, 3), (6, 3))
    for change in (
        "rollout.temperature=0.5",
        "rollout.max_response_tokens=5",
        "rollout.routing_replay=true",
        "reward.functions.default=gsm8k",
    ):
        assert usable(groups, change) == []
        assert usable(groups, change, before=(change,)) == [0, 1]
        before = StoredGroups(groups, stored_groups._settings_of(config()))
        (changed,) = changed_settings(before, config(change))
        assert change.startswith(changed)
    # With a curriculum the staleness decides which prompt an ordinal is.
    easy = "data.curriculum.easy_share=0.5"
    assert usable(groups, easy, before=(easy,)) == [0, 1]
    assert usable(groups, easy, "rollout.staleness=2", before=(easy,)) == []
    assert usable(groups, easy) == usable(groups, before=(easy,)) == []
    # Neither does who scores how fast change a score, nor the size of a limit.
    for change in ("reward.num_ranks=2", "reward.max_failed_fraction=0.5"):
        assert usable(groups, change) == [0, 1]
    # An earlier version wrote nothing of it.
    oldest = oldest_of(groups, config())
    earlier = StoredGroups(groups, None)
    assert len(usable_groups(earlier, config(), oldest).rollouts) == 2
    others = groups_of((6, 3), (6, 3), grader="reward.components.a")
    earlier = StoredGroups(others, None)
    assert not len(usable_groups(earlier, config(), oldest).rollouts)
