"""A hub on a local port, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_server import HubServer, serving
from verl_ray.hub import snapshots


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub that HF_ENDPOINT would name, with a cache in tmp_path/cache."""
    with serving(tmp_path / "hub") as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # An id is a path of the current folder first.
        monkeypatch.chdir(tmp_path)
        forget()
        yield server


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the hub of this process, which the library reads when it is imported."""
    files = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{files}")


def forget() -> None:
    """Let this process ask again, as another process would."""
    snapshots.find_snapshot.cache_clear()
    snapshots._answers.cache_clear()
