"""The random stream of an engine in a checkpoint, also from another type of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import inputs
from verl_ray.checkpoint import sharded
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_size=16, intermediate_size=16,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", folder / "qwen3", folder / "tokenizer", sizes, seed=1)
    return folder


def drawn(engine: Any) -> list[float]:
    with engine._own_random_numbers():
        return torch.rand(3).tolist()


def test_a_gpus_checkpoint_loads_on_a_cpu(folder: Path, tmp_path: Path) -> None:
    ranks = inputs.Ranks(0, 1, folder)
    engine: Any = ranks.engine("engine")
    engine.steps = 5
    state = engine.state()
    sharded.save(state, str(tmp_path / "cpu"))
    state["rng_0_cuda"] = torch.zeros(16, dtype=torch.uint8)
    del state["rng_0_cpu"]
    sharded.save(state, str(tmp_path / "cuda"))
    expected = drawn(engine)

    def resumed(place: str) -> list[float]:
        other: Any = ranks.engine("engine")
        held = other.state()
        notes = sharded.load(held, str(tmp_path / place))
        assert ["rng_0_cuda" in note for note in notes] == [True] * (place == "cuda")
        other.load_state(held)
        assert other.steps == 5
        return drawn(other)

    assert resumed("cpu") == expected
    first = resumed("cuda")
    assert resumed("cuda") == first  # of (seed, step, rank)
    assert first != expected and first != drawn(
        ranks.engine("engine")
    )  # nor the numbers of step 0 again
