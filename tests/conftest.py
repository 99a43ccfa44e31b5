"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Three processes share two cores: one thread each, and none that spins while it waits. Read when torch is imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

from verl_ray.cluster.session import Session


@pytest.fixture(scope="session")
def cluster() -> Iterator[Session]:
    """One Ray cluster for all tests of this process; tests that need one of their own run a child process."""
    with Session.open(None, cores=4, object_store_bytes=1 << 30) as session:
        yield session


LONG = ("test_readme", "test_training", "test_recovery", "test_cluster_runs", "test_reward_model", "test_bench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests first, so that neither of two processes is left alone with one at the end."""
    order = {name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
