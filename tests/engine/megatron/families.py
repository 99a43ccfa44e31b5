"""Ranks that read the state of a model with latent attention, experts and biases."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.engine.contract import load
from tests.engine.inputs import POLICY, Ranks, rows_of
from verl_ray.checkpoint import sharded
from verl_ray.ops.outputs import RequestedOutputs

MODEL = "deepseek_v3"
CUT = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}


def main(kind: str, turn: int, rank: int, world: int, folder: Path) -> None:
    """Continue from the state of the turn before, and write the next one."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous_{turn}", rank=rank, world_size=world, timeout=timedelta(seconds=300),
    )  # fmt: skip
    ranks = Ranks(rank, world, folder)
    cut = CUT if kind == "megatron" else {}
    engine = ranks.engine(kind, MODEL, **cut)
    if turn:
        load(engine, folder / f"state_{turn - 1}")
    read = ranks.weights(engine)
    steps = ranks.train(engine, ranks.of(engine, rows_of()), POLICY, 1)
    sharded.save(engine.state(), str(folder / f"state_{turn}"))

    # All ranks compute all rows.
    half = ranks.engine(kind, MODEL, optimizer=None, dtype="bfloat16", **cut)
    rows = rows_of()
    found = {
        "read": read,
        "written": ranks.weights(engine),
        "steps": steps,
        "bfloat16": half.forward(rows, RequestedOutputs(log_probs=True)).log_probs,
        "types": {
            parameter.name: parameter.dtype for parameter in half.manifest().sent
        },
    }
    torch.save(found, folder / f"found_{turn}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
