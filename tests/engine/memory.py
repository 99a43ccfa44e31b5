"""One rank that loads and exports a model while its memory is watched, for test_memory.py, which judges what it finds.

Run as `python -m tests.engine.memory RANK WORLD FOLDER`.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.engine import contract
from verl_ray.engine.base import Engine
from verl_ray.profiling.memory import AnonymousGrowth


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))

    def build(model: str, read_weights: str = "every_rank") -> Engine:
        return contract.Ranks(rank, world, folder).engine("fsdp", model, optimizer=None, read_weights=read_weights)

    build("small", "rank_zero").export(str(folder / "small_export"))  # what is set up once is not the model's
    with AnonymousGrowth() as loading:
        engine = build("large")
    with AnonymousGrowth() as exporting:
        engine.export(str(folder / "export"))
    del engine
    with AnonymousGrowth() as relaying:
        engine = build("large", "rank_zero")
    del engine
    with AnonymousGrowth() as naive:  # the usual way: a whole model on every rank, of which it then keeps its shard
        model = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.float32)
        state = {name: value.clone() for name, value in model.state_dict().items()}
    del state
    watched = {"loading": loading, "relaying": relaying, "exporting": exporting, "naive": naive}
    found = {name: watch.peak_bytes for name, watch in watched.items()}
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
