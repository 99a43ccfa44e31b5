"""What answers for CUDA where there is none: who loads it, and that what it answers is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny

ROOT = Path(__file__).parents[3]
LOADS = """
import sys
import torch, torch.distributed as dist
from tests.engine import contract
from verl_ray.engine.build import build_engine

kinds, device, folder = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_{kinds}_{device}", rank=0, world_size=1)
for kind in kinds.split(","):
    spec = contract.Ranks(0, 1, contract.Path(folder)).spec(kind)
    try:
        build_engine(spec, device=torch.device(device), rank=0, world_size=1)
    except Exception as error:  # on a machine without a GPU
        assert device == "cuda", error
print("shim" if "verl_ray.engine.megatron.shim" in sys.modules else "no shim", torch.cuda.current_device.__module__)
"""
ANSWERS = """
import sys
from verl_ray.engine.megatron import shim

shim.install()
shim.install()  # once is enough
import torch, torch.distributed as dist
from megatron.core import tensor_parallel

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

# a device, its type, and pinned memory
made = torch.zeros(2, device="cuda", pin_memory=True)
assert made.device.type == "cpu" and made.cuda() is made and made.type() == "torch.cuda.FloatTensor"
with torch.cuda.stream(torch.cuda.Stream()):
    assert torch.cuda.Event().elapsed_time(torch.cuda.current_stream().record_event()) == 0.0

# lists of tensors of different sizes
own = torch.arange(rank + 1.0)
parts = [torch.empty(1), torch.empty(2)]
dist.all_gather(parts, own)
assert parts[0].tolist() == [0.0] and parts[1].tolist() == [0.0, 1.0]
summed = torch.empty(rank + 1)
dist.reduce_scatter(summed, [torch.ones(1), torch.full((2,), 3.0)])
assert summed.tolist() == [[2.0], [6.0, 6.0]][rank]

# streams of random numbers: ranks share the default one, and differ in the model-parallel one
tensor_parallel.model_parallel_cuda_manual_seed(7, tp_rank=rank, ep_rank=0, etp_rank=0)
shared = torch.rand(1)
with tensor_parallel.get_cuda_rng_tracker().fork():
    apart = torch.rand(1)
later = torch.rand(1)
found = [torch.empty(3), torch.empty(3)]
dist.all_gather(found, torch.cat([shared, apart, later]))
assert found[0][0] == found[1][0] and found[0][2] == found[1][2] and found[0][1] != found[1][1]
assert found[0][0] != found[0][2]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shim")
    character_tokenizer(root / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_size=16, intermediate_size=32,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", root / "qwen3", root / "tokenizer", sizes, seed=1)
    return root


@pytest.mark.parametrize(
    ("kinds", "device", "expected"),
    [
        ("engine,fsdp", "cpu", "no shim torch.cuda"),
        ("megatron", "cpu", "shim verl_ray.engine.megatron.shim"),
        ("megatron_fsdp", "cpu", "shim verl_ray.engine.megatron.shim"),
        ("megatron,megatron_fsdp", "cuda", "no shim torch.cuda"),
    ],
)
def test_only_megatron_without_a_gpu_loads_it(folder: Path, kinds: str, device: str, expected: str) -> None:
    command = [sys.executable, "-c", LOADS, kinds, device, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == expected


def test_it_answers_as_a_gpu_would(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", ANSWERS, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
