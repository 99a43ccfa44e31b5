"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_ray.cluster.session import Session


@pytest.fixture(scope="session")
def cluster() -> Iterator[Session]:
    """One Ray cluster for all tests of this process; tests that need one of their own run a child process."""
    with Session.open(None, cores=4, object_store_bytes=1 << 30) as session:
        yield session
