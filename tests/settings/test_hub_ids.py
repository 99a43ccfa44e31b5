"""Ids of the hub, and folders of its cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_ray.settings.hub_ids import Snapshot, is_hub_id, snapshot_at

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("openai/gsm8k", True),
        ("gpt2", False),
        ("/Qwen/Qwen3", False),
        ("./Qwen/Qwen3", False),
        ("outputs/first/model", False),
        ("data/train.jsonl", False),
        ("s3://bucket/model", False),
        ("a/b--c", False),
    ],
)
def test_an_id_is_an_owner_and_a_name(path: str, is_id: bool) -> None:
    assert is_hub_id(path) == is_id


def test_a_snapshot_has_a_folder_and_a_folder_its_snapshot() -> None:
    model = Snapshot("Qwen/Qwen3-0.6B", COMMIT, "model", Path("/cache"))
    assert str(model.folder) == f"/cache/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}"
    data = Snapshot("openai/gsm8k", COMMIT, "dataset", Path("/cache"))
    for snapshot in (model, data):
        assert snapshot_at(str(snapshot.folder)) == snapshot

    for folder in ("/models/qwen", "/cache/models--a--b/snapshots/main", "/"):
        assert snapshot_at(folder) is None
