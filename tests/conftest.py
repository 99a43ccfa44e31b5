"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from safetensors.numpy import save_file

# Three processes share two cores: one thread each, and none that spins while it waits.
# Read when torch is imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

# Tables are as wide as in a file, whatever the terminal is.
os.environ.pop("COLUMNS", None)

from verl_ray.cluster import signals
from verl_ray.cluster.session import Session

# An example may take as long as a busy machine needs for it.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "derandomized", settings.get_profile("unhurried"), derandomize=True, database=None
)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Session]:
    """One Ray cluster for all tests of this process; tests that need one of their own
    run a child process.
    """
    with Session.open(None, cores=4, object_store_bytes=1 << 30) as session:
        yield session


STARTS_PROCESSES = {"cluster", "vllm", "ranks", "processes", "slow", "gpu"}
"""The marks of tests that may start processes; `scripts/test --fast` leaves them out."""


@pytest.fixture(autouse=True)
def _processes_are_marked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that starts a process without one of the marks fails, so that --fast stays
    fast.
    """

    def refuse(process: object, *arguments: object, **settings: object) -> None:
        raise AssertionError(
            f"this test starts {arguments[0]!r}: mark it with @pytest.mark.processes"
        )

    if STARTS_PROCESSES.isdisjoint(mark.name for mark in request.node.iter_markers()):
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(autouse=True)
def _signals_are_forgotten() -> Iterator[None]:
    """What a command does about signals in this process ends with its test."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    if signals._state.announcer is not None:
        signals._reset_in_child()
        signals._state.disturbed = False
        signals._state.outlook = lambda: signals.NOTHING_AT_STAKE
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What preflight reads of a model directory; 120 parameters in two files."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    settings = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "hidden_size": 128,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text("{}")
    save_file(
        {"a": np.zeros((10, 10), np.float32)},
        directory / "model-1.safetensors",
        metadata={"format": "pt"},
    )
    save_file({"b": np.zeros(20, np.float16)}, directory / "model-2.safetensors")
    return directory


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of data by their names alone."""
    directory = tmp_path_factory.mktemp("data")
    for name in ("train.jsonl", "test.jsonl", "notes.txt"):
        (directory / name).write_text("")
    return directory


LONG = (
    "test_drills",
    "test_readme",
    "test_kills",
    "test_notebook",
    "test_contract",
    "test_recovery",
    "test_training",
    "test_replicas",
    "test_cluster_runs",
    "test_reward_model",
    "test_bench",
    "test_episodes",
    "test_failures",
    "test_wandb_run",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests first, so that none of the three processes is left alone with
    one at the end.
    """
    order = {name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
