"""Expandable segments: the processes that use them, and exports that avoid them."""

from __future__ import annotations

import pytest
import torch

from verl_ray.cluster.context import RankSpec
from verl_ray.cluster.process_setup import process_environment
from verl_ray.profiling.memory import exportable, is_expandable


def rank_spec(device: str, *, process_group: bool) -> RankSpec:
    return RankSpec("actor", 0, 1, device, 2, process_group, "logs", 1)


def test_trainers_on_gpus_have_segments_that_grow() -> None:
    def settings(device: str, process_group: bool, **inherited: str) -> str | None:
        return process_environment(
            rank_spec(device, process_group=process_group), inherited
        ).get("PYTORCH_ALLOC_CONF")

    assert settings("cuda:0", True) == "expandable_segments:True"
    assert settings("cpu", True) is None
    assert settings("cuda:0", False) is None  # a rollout engine, which sleeps
    assert (
        settings("cuda:0", True, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512")
        is None
    )  # the user's say
    assert (
        settings("cuda:0", True, PYTORCH_ALLOC_CONF="expandable_segments:False") is None
    )


def test_idle_threads_wait_as_the_user_says() -> None:
    trainer = rank_spec("cpu", process_group=True)
    ours = process_environment(trainer, {})
    assert (ours["OMP_NUM_THREADS"], ours["GOMP_SPINCOUNT"]) == ("2", "10000")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        theirs = process_environment(trainer, {name: "anything"})
        assert not theirs.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}


def test_torch_takes_the_settings_of_its_allocator() -> None:
    for settings in (
        "expandable_segments:False",
        "max_split_size_mb:512, expandable_segments:True",
    ):
        torch._C._accelerator_setAllocatorSettings(settings)


def test_what_is_exported_is_not_expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    with exportable():
        pass
    assert applied == []
    monkeypatch.setenv(
        "PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True"
    )
    with pytest.raises(ValueError, match="full"), exportable():
        assert applied == ["expandable_segments:False"]
        raise ValueError("full")
    assert applied[1:] == ["max_split_size_mb:512, expandable_segments:True"]
    assert not is_expandable(
        "expandable_segments:False,roundup_power2_divisions:[256:1,512:2]"
    )
