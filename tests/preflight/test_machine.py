"""Whose machine must hold the run."""

from __future__ import annotations

import pytest

from controllers.compose.composition import compose
from tests.leftovers import left_in_shared_memory
from verl_ray.ownership import remove_stale
from verl_ray.preflight.machine import GIB, GpuReport, Machine, machine_of
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


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80G"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40G"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80G"),
        ("NVIDIA H200", 139.8, "H200-141G"),
        ("NVIDIA B200", 178.4, "B200-180G"),
        ("NVIDIA L40S", 44.4, "L40S-48G"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX-4090-24G"),
        # As fast as listed ones: H100s and A100s for other markets.
        ("NVIDIA H800", 79.1, "H100-80G"),
        ("NVIDIA A800-SXM4-80GB", 79.3, "A100-80G"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("Tesla T4", 14.6, None),
        ("", 79.1, None),
    ],
)
def test_a_gpu_is_the_listed_one_with_its_flops(
    name: str, gib: float, expected: str | None
) -> None:
    kind = GpuReport(int(gib * GIB), name).kind
    assert (None if kind is None else kind.name) == expected
