"""One rank that loads and exports a model while its memory is watched, for test_memory.py, which judges what it finds.

Run as `python -m tests.engine.memory KIND RANK WORLD FOLDER`, where KIND is fsdp or megatron.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.engine import contract
from verl_ray.engine.base import Engine
from verl_ray.profiling.memory import malloc_trim


class Watch:
    """By how much this process's anonymous memory grew at most inside the block; pages of mapped files, which the
    kernel takes back when it needs them, do not count."""

    growth_bytes = 0

    def __enter__(self) -> Watch:
        gc.collect()
        malloc_trim()
        self._before = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.growth_bytes = self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not count anonymous memory")


def main(kind: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting_{kind}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))

    def build(model: str, **settings: Any) -> Engine:
        layout = {"tensor_parallel": world} if kind == "megatron" else {}
        return contract.Ranks(rank, world, folder).engine(kind, model, optimizer=None, **layout, **settings)

    relayed = {"read_weights": "rank_zero"} if kind == "fsdp" else {}
    build("small", **relayed).export(str(folder / f"small_export_{kind}"))  # what is set up once is not the model's
    with Watch() as loading:
        engine = build("large")
    with Watch() as exporting:
        engine.export(str(folder / f"export_{kind}"))
    with Watch() as sending:
        for parameter in engine.manifest().sent:
            for _, part in engine.shards([parameter.name]):
                part.clone()
    del engine
    watched = {"loading": loading, "exporting": exporting, "sending": sending}
    if relayed:
        with Watch() as watched["relaying"]:
            engine = build("large", **relayed)
        del engine
    with Watch() as naive:  # the usual way: a whole model on every rank, of which it then keeps its shard
        model = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.float32)
        state = {name: value.clone() for name, value in model.state_dict().items()}
    del state
    watched["naive"] = naive
    found = {name: watch.growth_bytes for name, watch in watched.items()}
    (folder / f"found_{kind}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
