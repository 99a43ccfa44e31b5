"""One rank that loads and exports a model while its memory is watched.

`main` is a rank of test_memory.py, which checks the findings. `kind` is fsdp, megatron
or megatron_fsdp.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from scripts.bench.memory import AnonymousGrowth
from tests.engine import inputs
from verl_ray.engine.base import Engine


def main(kind: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting_{kind}"
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )

    def build(model: str, **settings: Any) -> Engine:
        layout = {"tensor_parallel": world} if kind == "megatron" else {}
        return inputs.Ranks(rank, world, folder).engine(
            kind, model, optimizer=None, **layout, **settings
        )

    relayed = {"read_weights": "rank_zero"} if kind == "fsdp" else {}
    build("small", **relayed).export(
        str(folder / f"small_export_{kind}")
    )  # what is set up once is not the model's
    with AnonymousGrowth() as loading:
        engine = build("large")
    with AnonymousGrowth() as exporting:
        engine.export(str(folder / f"export_{kind}"))
    with AnonymousGrowth() as sending:
        for parameter in engine.manifest().sent:
            for _, part in engine.shards([parameter.name]):
                part.clone()
    del engine
    watched = {"loading": loading, "exporting": exporting, "sending": sending}
    if relayed:
        with AnonymousGrowth() as watched["relaying"]:
            engine = build("large", **relayed)
        del engine
    with (
        AnonymousGrowth() as naive
    ):  # the usual way: a whole model on every rank, of which it then keeps its shard
        model = AutoModelForCausalLM.from_pretrained(
            folder / "large", dtype=torch.float32
        )
        state = {name: value.clone() for name, value in model.state_dict().items()}
    del state
    watched["naive"] = naive
    found = {name: watch.peak_bytes for name, watch in watched.items()}
    (folder / f"found_{kind}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
