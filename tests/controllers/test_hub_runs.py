"""Runs whose model and data are ids of the hub, with a network and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import snapshot_download

from tests.controllers.runs import Inputs, command
from tests.hub_server import serving


@pytest.mark.cluster
@pytest.mark.slow
def test_a_run_from_the_cache_is_resumed_at_its_commit(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run_dir = tmp_path / "run"
    arguments = [
        *inputs.overrides(run_dir), "model.path=me/tiny", "data.train_path=me/sums",
        "data.validation_path=null", "run.checkpoint_every=1", "sft.batch_size=8", "sft.max_tokens=16",
    ]  # fmt: skip
    (tmp_path / "sums").mkdir()
    shutil.copy(inputs.train, tmp_path / "sums/train.jsonl")

    with serving(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        old = hub.commit("me/tiny", inputs.model)
        hub.commit("me/sums", tmp_path / "sums", "datasets")
        for name, kind in (("me/tiny", "model"), ("me/sums", "dataset")):
            snapshot_download(name, repo_type=kind, cache_dir=cache, endpoint=hub.url)

        # Nobody answers.
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        ended = command(None, "train", "--config-name", "sft", *arguments, "run.total_steps=1")  # fmt: skip
        assert f"model.path = me/tiny at {old}" in ended.stdout
        model = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]
        assert model == {
            "path": "me/tiny", "revision": old, "trust_remote_code": False,
        }  # fmt: skip

        # The hub has a newer model, and the cache lost the old one.
        new = hub.commit("me/tiny", inputs.model)
        shutil.rmtree(cache / "models--me--tiny")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        again = command(None, "train", "--config-name", "sft", *arguments, "run.total_steps=2")  # fmt: skip
        assert f"at {old}" in again.stdout and new not in again.stdout
        assert "me/tiny: fetching" in again.stdout
        assert "step_00000002" in {path.name for path in run_dir.glob("checkpoints/*")}

        exported = command(None, "export", str(run_dir), str(tmp_path / "exported"))
        assert "actor of step_00000002" in exported.stdout
