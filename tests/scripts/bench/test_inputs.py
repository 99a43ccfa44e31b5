"""A benchmark measures the inputs that it asked for, whatever others have made before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.inputs import inputs_name, run_with_inputs
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError
from verl_ray.preflight.findings import INPUTS_COMPLETE, inputs_folder

FEW = ("prepare.num_train=30", "prepare.num_validation=5")
NARROW = ("prepare.model.hidden_size=64", "prepare.model.num_heads=2")


def made(folder: Path, *overrides: str) -> RLConfig:
    return run_with_inputs("1m", folder, (*FEW, *overrides))


def test_inputs_are_named_by_what_they_are(tmp_path: Path) -> None:
    config = made(tmp_path)
    names = [inputs_name(config, trained=trained) for trained in (False, True)]
    assert names == [
        "qwen3-4x128-sums-untrained-seed0",
        "qwen3-4x128-sums-trained-seed0",
    ]
    folder = tmp_path / names[0] / "inputs"
    assert inputs_folder(config) == folder
    assert config.actor.model.path == str(folder / "model")
    assert (folder / "model" / "config.json").exists()

    narrow = made(tmp_path, *NARROW, "run.seed=3")
    assert inputs_folder(narrow).parent.name == "qwen3-4x64-sums-untrained-seed3"


def test_inputs_with_the_same_recipe_stay(tmp_path: Path) -> None:
    model = inputs_folder(made(tmp_path)) / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    made(tmp_path, "rollout.group_size=2", "actor.optimizer.lr=0.1")
    assert model.stat().st_mtime_ns == before


def test_inputs_with_another_recipe_are_made_anew(tmp_path: Path) -> None:
    folder = inputs_folder(made(tmp_path))
    assert len((folder / "train.jsonl").read_text().splitlines()) == 30

    # The name is the same, and the contents are not.
    made(tmp_path, "prepare.num_train=20")
    assert len((folder / "train.jsonl").read_text().splitlines()) == 20

    # A model that was not trained is under the name of a trained one.
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["trained"] is False
    (folder / "recipe.json").write_text(json.dumps(recipe | {"trained": True}))
    model = folder / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    made(tmp_path, "prepare.num_train=20")
    assert model.stat().st_mtime_ns > before
    assert json.loads((folder / "recipe.json").read_text()) == recipe


def test_inputs_of_a_run_or_of_somebody_else_are_neither_taken_nor_deleted(
    tmp_path: Path,
) -> None:
    own = tmp_path / "run" / "inputs"
    own.mkdir(parents=True)
    for name in (INPUTS_COMPLETE, "notes.txt"):
        file = own / name
        file.touch()
        with pytest.raises(ConfigError, match=r"Give another run\.dir"):
            made(tmp_path, f"run.dir={tmp_path / 'run'}")
        assert file.exists()
        file.unlink()
