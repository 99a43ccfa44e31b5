"""Units of FSDP2 that hold their parameters gathered, and groups of a mesh's ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.tiny_families import tiny_config
from tests.engine import inputs
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.models.tiny import make_tiny
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.proofs.cut_model import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("units")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=16, num_layers=2, num_heads=1, num_kv_heads=1, head_size=16, intermediate_size=16,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", folder / "qwen3", folder / "tokenizer", sizes, seed=1)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(engine: Any) -> set[str]:
    """Return the names of the units whose parameters are whole now."""
    groups = {
        name: module._get_fsdp_state()._fsdp_param_group
        for name, module in engine.model.named_modules()
        if hasattr(module, "_get_fsdp_state")
    }
    return {
        name
        for name, group in groups.items()
        if group is not None and group.is_unsharded
    }


@dataclass(frozen=True)
class Watching(SupervisedObjective):
    """A record of what is gathered between a forward pass and its backward pass."""

    engine: Any = None
    seen: list[set[str]] = field(default_factory=list)

    def __call__(self, *given: Any) -> Any:
        self.seen.append(gathered(self.engine))
        return super().__call__(*given)


@pytest.mark.parametrize(("apart", "kept"), [(False, {""}), (True, {"", "hf.lm_head"})])
def test_what_computes_last_stays_for_the_backward(
    apart: bool, kept: set[str], alone: None, folder: Path
) -> None:
    engine: Any = inputs.Ranks(0, 1, folder).engine("fsdp", embedding_units=apart)
    rows = inputs.rows_of()
    engine.forward(rows, RequestedOutputs(log_probs=True))
    assert gathered(engine) == set()
    watching = Watching(engine=engine)
    engine.forward_backward(rows, watching)
    assert watching.seen and all(seen == kept for seen in watching.seen)
    assert gathered(engine) == set()
    engine.optimizer_step()


def test_what_a_family_keeps_in_float32_stays_so_where_others_are_bfloat16(
    alone: None, folder: Path
) -> None:
    random_model(tiny_config("ernie4_5_moe"), 1).save_pretrained(folder / "ernie")
    ranks = inputs.Ranks(0, 1, folder)
    seen = set()

    def see(gate: Any, hidden: Any) -> None:
        biases = gate.moe_statics.e_score_correction_bias
        seen.add((hidden[0].dtype, gate.weight.dtype, biases.dtype))

    gradients = []
    for again in (False, True):
        engine: Any = ranks.engine(
            "fsdp", "ernie", dtype="bfloat16", activation_checkpointing=again
        )
        (gate,) = engine.model.precise_units
        gate.register_forward_pre_hook(see)
        engine.forward_backward(inputs.rows_of(), SupervisedObjective())
        gradients.append(gate.weight.grad.full_tensor().clone())
    assert seen == {(torch.bfloat16, torch.float32, torch.float32)}
    assert gradients[0].norm() > 0 and torch.equal(*gradients)


SPLIT = """
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
limit = timedelta(seconds=30)
part = dist.group.WORLD.split_group([0], limit, Backend.Options("nccl", limit), "part", "part")
number = torch.tensor([3.0])
part.allreduce([number]).wait()
print(part._get_backend(torch.device("cpu")).name(), number.item(), flush=True)
"""


@pytest.mark.ranks
def test_a_group_split_from_another_keeps_its_gloo() -> None:
    """A mesh of two dimensions splits the group of all ranks.

    It does so with the options of the group's NCCL half. What lies on the host
    (host_parameters) is summed over such a group, too, so it must have gloo as its
    parent has. The test runs in its own process, because torch splits only the first
    gloo group of a process, which is the group of all ranks.
    """
    ended = subprocess.run(
        [sys.executable, "-c", SPLIT], capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.split() == ["gloo", "3.0"], ended.stderr
