"""No rank ever holds the whole model.

This is measured while two ranks load a model of 280 MB, and while they export it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import memory
from tests.rank_processes import run_ranks
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.preflight.model_files import tensor_shapes

pytestmark = pytest.mark.ranks

WORLD = 2
KINDS = ("fsdp", "megatron", "megatron_fsdp")
OVERHEAD_BYTES = 64 << 20
"""Beside the shard and the largest tensor: buffers of gathering, the module tree, heap that is not yet given back."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    character_tokenizer(folder / "tokenizer", ALPHABET)
    for name, layers in (("small", 1), ("large", 6)):
        shape = TinyModelConfig(
            hidden_size=1024, num_layers=layers, num_heads=8, num_kv_heads=4, head_size=128, intermediate_size=2816,
            tie_embeddings=False,
        )  # fmt: skip
        make_tiny_qwen3(folder / name, folder / "tokenizer", shape, seed=0)
    waves = [[(kind, rank, WORLD) for rank in range(WORLD)] for kind in KINDS]
    # what is freed is given back at once
    run_ranks(
        memory.__name__,
        waves,
        folder,
        deadline_s=500,
        settings={"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_stays_under_its_shard_and_the_largest_tensor(
    folder: Path, kind: str
) -> None:
    shapes = tensor_shapes(str(folder / "large"))
    sizes = [4 * torch.Size(shape).numel() for shape in shapes.values()]
    assert sum(sizes) > 280e6
    for rank in range(WORLD):
        found = json.loads((folder / f"found_{kind}_{rank}.json").read_text())
        bound = sum(sizes) / WORLD + max(sizes) + OVERHEAD_BYTES
        layer = 4 * sum(
            torch.Size(shape).numel()
            for name, shape in shapes.items()
            if ".layers.0." in name
        )
        bucket = (
            layer if kind == "megatron_fsdp" else 0
        )  # which is filled before it is cut
        assert sum(sizes) / WORLD < found["loading"] < bound + bucket
        if kind == "fsdp":
            assert (
                sum(sizes) / WORLD < found["relaying"] < bound
            )  # rank 0 reads, and sends one tensor at a time
        # beside the shard, which is there already
        assert (
            found["exporting"] < max(sizes) + OVERHEAD_BYTES
            and found["sending"] < max(sizes) + OVERHEAD_BYTES
        )
        assert found["naive"] > bound  # what the bound keeps out


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_exported_is_what_was_loaded(folder: Path, kind: str) -> None:
    before, after = (
        load_file(folder / name / "model.safetensors")
        for name in ("large", f"export_{kind}")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
