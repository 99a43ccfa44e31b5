"""Megatron-FSDP under megatron-core's own switch, with tensor parallelism.

On a CPU it does what plain PyTorch does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import core_switch, inputs
from tests.engine.test_contract import close
from tests.rank_processes import run_ranks
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # four ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The findings of each rank."""
    folder = tmp_path_factory.mktemp("core_switch")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=96,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", folder / "qwen3", folder / "tokenizer", sizes, seed=1)
    places = [(rank,) for rank in range(core_switch.WORLD)]
    run_ranks(core_switch.__name__, [places], folder, deadline_s=inputs.DEADLINE_S)
    return [
        torch.load(folder / f"found_{rank}.pt", weights_only=False)
        for rank in range(core_switch.WORLD)
    ]


@pytest.mark.parametrize("strategy", core_switch.STRATEGIES)
def test_three_steps_are_those_of_the_plain_engine(
    found: list[dict[str, Any]], strategy: str
) -> None:
    for rank in found:
        for key in ("loss", "norm"):
            close(rank[strategy][key], rank["plain"][key])
        assert (
            max(rank["plain"]["norm"]) > inputs.OPTIMIZER.max_grad_norm
        )  # so the comparison saw clipping


@pytest.mark.parametrize("strategy", core_switch.STRATEGIES)
def test_matrices_are_cut_by_tensor_parallel_ranks_and_then_shared_out(
    found: list[dict[str, Any]], strategy: str
) -> None:
    """All four ranks together hold matrices once, and norms twice.

    Tensor-parallel ranks have copies of norms.
    """
    matrices = 2 * (128 * 64 + 2 * 64 * 64 + 64 * 128 + 3 * 64 * 96) + 2 * 14 * 64
    norms = 2 * (2 * 64 + 2 * 32) + 64
    assert sum(rank[strategy]["elements"] for rank in found) == matrices + 2 * norms
    axes = found[0][strategy]["axes"]
    assert axes["decoder.layers.0.self_attention.linear_qkv.weight"] == ("dp_cp", "tp")
    assert axes["decoder.layers.0.input_layernorm.weight"] == ("dp_cp",)
