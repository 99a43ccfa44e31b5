"""Whose machine must hold the run."""

from __future__ import annotations

import pytest

from controllers.composition import compose
from controllers.machine import machine_of


def test_with_an_address_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert machine_of(compose("quickstart")) is not None
    assert machine_of(compose("quickstart", ["ray.address=10.0.0.1:6379"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert machine_of(compose("quickstart")) is None
