"""Which settings a resumed run may change."""

import copy
from typing import Any

import pytest

from verl_ray.preflight.changes import changed_keys, changed_model

SAVED: dict[str, Any] = {
    "task": "rl",
    "run": {"dir": "outputs/a", "seed": 0, "total_steps": 10, "resume": "auto"},
    "model": {"path": "outputs/a/inputs/model"},
    "data": {
        "train_path": "/data/train.jsonl",
        "prompts_per_step": 16,
        "chat_template_kwargs": {},
    },
    "rollout": {"group_size": 8},
    "actor": {
        "num_ranks": 1,
        "mini_batch_size": None,
        "model": {"path": "outputs/a/inputs/model"},
        "backend": {"kind": "engine", "dtype": "float32"},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "lora": {"rank": 0},
    },
    "algorithm": {"advantage": "gae", "value_loss": {"clip": 0.2}},
    "distill": None,
    "tracking": {"wandb": {"mode": "offline"}},
}


def with_value(key: str, value: object) -> dict[str, Any]:
    tree = copy.deepcopy(SAVED)
    *path, last = key.split(".")
    node = tree
    for part in path:
        node = node[part]
    node[last] = value
    return tree


def test_nothing_changed() -> None:
    assert changed_keys(SAVED, copy.deepcopy(SAVED)) == ([], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.total_steps", 20),
        ("data.train_path", "/elsewhere/train.parquet"),
        ("data.train_path", [{"path": "/elsewhere/train.parquet", "weight": 1.0}]),
        ("actor.num_ranks", 2),
        ("actor.backend", {"kind": "fsdp", "dtype": "float32"}),
        ("actor.optimizer.lr", 0.2),
        ("actor.optimizer.momentum", 0.8),
        ("tracking.wandb.mode", "disabled"),
        ("algorithm.value_loss.clip", None),
        ("distill", {"teacher": None, "average_decay": None}),
    ],
)
def test_allowed(key: str, value: object) -> None:
    allowed, refused = changed_keys(SAVED, with_value(key, value))
    assert not refused and [change.key for change in allowed] == [
        f"{key}.kind" if key == "actor.backend" else key
    ]


def test_muon_has_a_state_without_momentum_too() -> None:
    muon, without = (
        with_value("actor.optimizer.momentum", value) for value in (0.9, 0)
    )
    for tree in (muon, without):
        tree["actor"]["optimizer"]["kind"] = "muon"
    (change,), refused = changed_keys(muon, without)
    assert change.key == "actor.optimizer.momentum" and not refused


def test_steps_that_are_not_counted_yet_have_not_changed() -> None:
    by_epochs = with_value("run.total_steps", None)
    by_epochs["run"]["total_epochs"] = 3
    assert changed_keys(SAVED, by_epochs) == ([], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", 1),
        ("data.prompts_per_step", 32),
        ("data.chat_template_kwargs.think", False),
        ("rollout.group_size", 4),
        ("actor.mini_batch_size", 64),
        ("actor.model.path", "/models/other"),
        ("actor.lora.rank", 8),
        ("actor.optimizer.kind", "muon"),
        ("actor.optimizer.momentum", 0),
        ("algorithm.advantage", "grpo"),
        ("algorithm.value_loss", None),
        ("distill", {"teacher": "average", "average_decay": 0.9}),
    ],
)
def test_refused(key: str, value: object) -> None:
    allowed, refused = changed_keys(SAVED, with_value(key, value))
    assert (
        not allowed
        and [change.key for change in refused] == [key]
        and refused[0].refused
    )
    assert str(refused[0]).startswith(f"{key}: ") and repr(value) in str(refused[0])


SIZES = {
    "data.prompts_per_step": 32,
    "rollout.group_size": 4,
    "actor.mini_batch_size": 64,
}


@pytest.mark.parametrize("key", SIZES)
def test_steps_that_stand_alone_may_have_another_size(key: str) -> None:
    saved = with_value("rollout.staleness", 0)
    now = copy.deepcopy(saved)
    section, name = key.split(".")
    now[section][name] = SIZES[key]
    (change,), refused = changed_keys(saved, now)
    assert not refused and change.key == key

    replaying, stale, counting = (copy.deepcopy(now) for _ in range(3))
    replaying["algorithm"]["replay"] = 8
    stale["rollout"]["staleness"] = 1
    for tree, other in ((replaying, "algorithm.replay"), (stale, "rollout.staleness")):
        (allowed,), (change,) = changed_keys(saved, tree)
        assert (allowed.key, change.key) == (other, key)
        assert "only a synchronous run" in str(change)
    counting["run"] |= {"total_steps": None, "total_epochs": 2}
    _, refused = changed_keys(saved, counting)
    assert len(refused) == (key == "data.prompts_per_step")


def test_a_state_has_the_average_of_its_decay() -> None:
    saved, now = (
        with_value("distill", {"average_decay": decay}) for decay in (0.9, None)
    )
    _, (change,) = changed_keys(saved, now)
    assert change.key == "distill.average_decay" and "the average" in str(change)


def test_the_folder_of_a_run_can_be_moved() -> None:
    moved = with_value("run.dir", "/elsewhere/a")
    moved["model"]["path"] = moved["actor"]["model"]["path"] = (
        "/elsewhere/a/inputs/model"
    )
    allowed, refused = changed_keys(SAVED, moved)
    assert not refused and [change.key for change in allowed] == ["run.dir"]


def test_a_change_that_other_keys_follow_is_told_once() -> None:
    changed = with_value("model.path", "/models/other")
    changed["actor"]["model"]["path"] = "/models/other"
    _, refused = changed_keys(SAVED, changed)
    assert [change.key for change in refused] == ["model.path"]
    changed["actor"]["model"]["path"] = "/models/third"
    _, refused = changed_keys(SAVED, changed)
    assert sorted(change.key for change in refused) == [
        "actor.model.path",
        "model.path",
    ]


def test_a_measurement_asks_for_the_same_model_alone() -> None:
    def refused(key: str, value: object) -> list[str]:
        changes = changed_model(SAVED, with_value(key, value), "actor")
        return [change.key for change in changes]

    for key in ("run.seed", "data.train_path", "rollout.group_size"):
        assert refused(key, 5) == []
    assert refused("algorithm.advantage", "grpo") == []
    assert refused("algorithm.value_loss", None) == []
    assert refused("task", "sft") == ["task"]
    assert refused("actor.lora.rank", 2) == ["actor.lora.rank"]
    assert refused("actor.model.path", "other") == ["actor.model.path"]
    # The same folder, as it is written and relative to a run.dir that has moved.
    assert refused("run.dir", "outputs/b") == []
    moved = with_value("run.dir", "outputs/b")
    moved["actor"]["model"]["path"] = "outputs/b/inputs/model"
    assert changed_model(SAVED, moved, "actor") == []
