"""Inputs made once, and one pair of sampling groups for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controllers.trainers.rl import Trainer
from tests.controllers.runs import (
    Inputs,
    Samplers,
    make_inputs,
    replicas_of,
    start_some,
    trainer_of,
)
from verl_ray.cluster.session import Session

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="package")
def samplers(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Samplers]:
    folder: Path = tmp_path_factory.mktemp("samplers")
    config = inputs.config("ppo", folder)
    groups, by_name = start_some(config, folder, sampling=True)
    with groups:
        yield Samplers(replicas_of(config, groups), by_name["reward"])


@pytest.fixture(scope="package")
def trainer(
    inputs: Inputs, samplers: Samplers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeTrainer]:
    """`trainer(root, *overrides)`: a trainer over actor, critic and reference that all
    of them share. The models are those that earlier tests left, hardly changed at this
    learning rate; what is set when a process starts (backend, optimizer) is PPO's.
    """
    folder: Path = tmp_path_factory.mktemp("trainer")
    groups, roles = start_some(
        inputs.config("ppo", folder, "actor.optimizer.lr=1e-5"), folder, sampling=False
    )

    def make(root: str, *changes: str) -> Trainer:
        return trainer_of(
            inputs.config(root, folder, *changes), groups, roles, samplers
        )

    with groups:
        yield make
