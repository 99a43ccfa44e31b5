"""Whose machine must hold the run."""

from __future__ import annotations

import pytest

from scripts.configuration import compose
from tests.leftovers import left_in_shared_memory
from verl_ray.ownership import remove_stale
from verl_ray.preflight.machine import Machine, machine_of
from verl_ray.private_files import shared_folder


def test_with_an_address_the_machine_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert machine_of(compose("quickstart")) is not None
    assert machine_of(compose("quickstart", ["ray.address=10.0.0.1:6379"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert machine_of(compose("quickstart")) is None


@pytest.mark.processes
def test_a_look_at_the_machine_removes_nothing() -> None:
    left = left_in_shared_memory()
    assert Machine.here().shm_free_bytes > 0
    assert all(path.exists() for path in left)
    remove_stale(shared_folder())
    assert not any(path.exists() for path in left)
