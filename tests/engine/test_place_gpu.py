"""Offload that only a GPU can show: memory is free for other processes, too.

What was placed on the host also comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine import contract, inputs
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.build import build_engine
from verl_ray.models.tiny import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bfloat16") for kind in contract.KINDS), ("megatron", "float32")],
)
def test_what_is_placed_on_the_host_is_released_and_comes_back_to_the_bit(
    kind: str, dtype: str, group: None, tmp_path: Path
) -> None:
    character_tokenizer(tmp_path / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=8, head_size=128, intermediate_size=4096,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", tmp_path / "model", tmp_path / "tokenizer", sizes, seed=0)
    spec: EngineSpec = inputs.Ranks(0, 1, tmp_path).spec(kind, "model", dtype=dtype)
    engine: Any = build_engine(
        spec, device=torch.device("cuda", 0), rank=0, world_size=1
    )
    rows = inputs.rows_of()
    engine.forward_backward(rows, inputs.POLICY)
    engine.optimizer_step()
    names = [parameter.name for parameter in engine.manifest().sent]
    held = 4 * sum(parameter.numel for parameter in engine.manifest().sent)  # float32
    # A tensor may come in several slices: those of its groups of heads, with Megatron.
    before = {place: value.clone() for place, value in engine.shards(names)}
    loss = engine.forward_backward(rows, inputs.POLICY).loss
    engine._zero_gradients()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    engine.place(params="host", optimizer="host")
    engine.place(params="host", optimizer="host")
    released = torch.cuda.mem_get_info()[0] - free
    assert all(
        torch.equal(before[place].cpu(), value.cpu())
        for place, value in engine.shards(names)
    )
    assert (
        released > 0.95 * 3 * held
    )  # the weights and AdamW's two moments, as the driver of the device sees it
    engine.place(params="device", optimizer="device")
    assert all(
        torch.equal(before[place], value) for place, value in engine.shards(names)
    )
    assert engine.forward_backward(rows, inputs.POLICY).loss == loss
    engine.optimizer_step()  # of the weights that compute, not of copies
    assert engine.forward_backward(rows, inputs.POLICY).loss != loss
