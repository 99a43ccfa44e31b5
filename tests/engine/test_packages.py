"""Packages that only some backends need."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from verl_ray.backends import BACKENDS
from verl_ray.backends.megatron import MegatronBackend
from verl_ray.config.versions import missing_packages
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.build import build_engine
from verl_ray.errors import EngineError

ROOT = Path(__file__).parents[2]


def test_backends_of_this_project_alone_miss_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "megatron", None
    )  # as Python marks what is not there
    assert (
        missing_packages(BACKENDS["engine"].packages)
        == missing_packages(BACKENDS["fsdp"].packages)
        == []
    )


def test_every_backend_with_packages_names_the_extra_that_installs_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for backend in BACKENDS.values():
        assert bool(backend.extra) == bool(backend.packages)
        requirements = " ".join(project["optional-dependencies"].get(backend.extra, []))
        for package in backend.packages:
            assert re.sub("[._]", "-", package) in requirements


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", None)
    assert "megatron_fsdp" in missing_packages(BACKENDS["megatron_fsdp"].packages)
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert missing_packages(BACKENDS["megatron"].packages) == ["megatron.core"]
    assert missing_packages(BACKENDS["megatron_fsdp"].packages) == [
        "megatron.core",
        "megatron_fsdp",
    ]


def test_an_engine_says_what_it_misses_where_nobody_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    backend = MegatronBackend(
        kind="megatron", dtype="float32", micro_batch_tokens_per_rank=64, tensor_parallel=1, sequence_parallel=False,
        pipeline_parallel=1, virtual_stages=1, context_parallel=1, expert_parallel=1, expert_tensor_parallel=1,
        recompute="none",
    )  # fmt: skip
    spec = EngineSpec("critic", "/nowhere", "value", backend, None, 1, seed=0)
    with pytest.raises(
        EngineError,
        match=r"critic.backend = megatron needs megatron.core, .*pip install 'verl_ray",
    ):
        build_engine(spec, device=torch.device("cpu"), rank=0, world_size=1)
