"""Inputs made once, and one pair of sampling groups for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from controllers.ppo import Trainer
from tests.controllers.runs import Inputs, Samplers, make_inputs, servers_of, start_some, trainer_of
from verl_ray.cluster.session import Session

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What preflight reads of a model directory; 120 parameters in two files."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    settings = {"num_attention_heads": 4, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((10, 10), np.float32)}, directory / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(20, np.float16)}, directory / "model-2.safetensors")
    return directory


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of data by their names alone."""
    directory = tmp_path_factory.mktemp("data")
    for name in ("train.jsonl", "test.jsonl", "notes.txt"):
        (directory / name).write_text("")
    return directory


@pytest.fixture(scope="package")
def samplers(cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samplers]:
    folder: Path = tmp_path_factory.mktemp("samplers")
    config = inputs.config("ppo", folder)
    groups, by_name = start_some(config, folder, sampling=True)
    with groups:
        yield Samplers(servers_of(config, groups), by_name["reward"])


@pytest.fixture(scope="package")
def trainer(inputs: Inputs, samplers: Samplers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeTrainer]:
    """`trainer(root, *overrides)`: a trainer over actor, critic and reference that all of them share. The models are
    those that earlier tests left, hardly changed at this learning rate; what is set when a process starts (backend,
    optimizer) is PPO's."""
    folder: Path = tmp_path_factory.mktemp("trainer")
    groups, roles = start_some(inputs.config("ppo", folder, "actor.optimizer.lr=1e-4"), folder, sampling=False)

    def make(root: str, *changes: str) -> Trainer:
        return trainer_of(inputs.config(root, folder, *changes), groups, roles, samplers)

    with groups:
        yield make
