"""The shim for CUDA: which processes load it, and that its calls behave as on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.megatron import cuda_calls, shim_loading
from tests.rank_processes import run_ranks
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny

pytestmark = pytest.mark.ranks

LOADED = {
    ("engine,fsdp", "cpu"): (False, "torch.cuda"),
    ("megatron", "cpu"): (True, "verl_ray.engine.megatron.shim"),
    ("megatron_fsdp", "cpu"): (True, "verl_ray.engine.megatron.shim"),
    ("megatron,megatron_fsdp", "cuda"): (False, "torch.cuda"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shim")
    character_tokenizer(root / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_size=16, intermediate_size=32,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", root / "qwen3", root / "tokenizer", sizes, seed=1)
    run_ranks(shim_loading.__name__, [list(LOADED)], root, deadline_s=240)
    return root


@pytest.mark.parametrize(("kinds", "device"), LOADED)
def test_only_megatron_without_a_gpu_loads_the_shim(
    folder: Path, kinds: str, device: str
) -> None:
    found = json.loads((folder / f"found_{kinds}_{device}.json").read_text())
    assert tuple(found) == LOADED[kinds, device]


def test_calls_of_cuda_behave_as_on_a_gpu(tmp_path: Path) -> None:
    run_ranks(cuda_calls.__name__, [[(0,), (1,)]], tmp_path, deadline_s=120)
