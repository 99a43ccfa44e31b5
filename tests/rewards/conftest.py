"""The service that the tests of the scorer ask, without a proxy in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.rewards.services import Service


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()
