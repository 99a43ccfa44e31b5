"""Sharded states of one process; those of engines on several ranks are part of the engines' contract test."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_ray.checkpoint import sharded
from verl_ray.errors import CheckpointError


def state(value: float, **more: Any) -> dict[str, Any]:
    return {"steps": int(value), "rng_0": torch.full((4,), int(value), dtype=torch.uint8)} | {
        "model": {"weight": torch.full((3, 2), float(value))},
        **more,
    }


def test_a_state_is_filled_in_place_and_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.rand(3, 2)
    sharded.save(state(7) | {"model": {"weight": weight}}, str(tmp_path / "actor"))
    held = state(0)
    target = held["model"]["weight"]
    sharded.load(held, str(tmp_path / "actor"))
    assert held["steps"] == 7 and held["rng_0"].tolist() == [7] * 4
    assert torch.equal(target, weight)


def test_a_rank_that_the_checkpoint_does_not_know_keeps_its_random_stream(tmp_path: Path) -> None:
    sharded.save(state(7), str(tmp_path))
    held = state(0, rng_1=torch.tensor([5], dtype=torch.uint8))
    sharded.load(held, str(tmp_path))
    assert held["rng_1"].tolist() == [5] and held["rng_0"].tolist() == [7] * 4


def test_another_model_is_refused(tmp_path: Path) -> None:
    sharded.save(state(7), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"cannot be read; rank 0: .*model\.other"):
        sharded.load(state(0, model={"other": torch.zeros(1)}), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"cannot be read; rank 0: .*model\.weight"):
        sharded.load(state(0, model={"weight": torch.zeros(4, 2)}), str(tmp_path))


def test_a_path_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be read"):
        sharded.load(state(0), str(tmp_path / "nowhere"))


def test_a_node_that_does_not_share_the_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must exist on every node \(run\.dir\)"):
        sharded.save(state(7), str(tmp_path / "nowhere" / "actor"))


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    child = textwrap.dedent(f"""
        import resource, signal, torch
        from verl_ray.checkpoint import sharded
        from verl_ray.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            sharded.save({{"model": torch.zeros(10_000)}}, {str(tmp_path / "actor")!r})
        except CheckpointError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=120)
    assert "actor cannot be written (" in done.stdout, done.stderr
    assert " GiB are free there); rank 0: " in done.stdout
