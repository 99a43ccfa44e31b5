"""What answers for CUDA where there is none: who loads it, and that what it answers is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.megatron import answers, loads
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
    run_ranks(loads.__name__, [list(LOADED)], root, deadline_s=240)
    return root


@pytest.mark.parametrize(("kinds", "device"), LOADED)
def test_only_megatron_without_a_gpu_loads_it(folder: Path, kinds: str, device: str) -> None:
    found = json.loads((folder / f"found_{kinds}_{device}.json").read_text())
    assert tuple(found) == LOADED[kinds, device]


def test_it_answers_as_a_gpu_would(tmp_path: Path) -> None:
    run_ranks(answers.__name__, [[(0,), (1,)]], tmp_path, deadline_s=120)
