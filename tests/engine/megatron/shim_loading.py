"""A process that builds engines and records if that loads the shim, for test_shim.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.engine import inputs
from verl_ray.engine.build import build_engine


def main(kinds: str, device: str, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting_{kinds}_{device}",
        rank=0,
        world_size=1,
    )
    for kind in kinds.split(","):
        spec = inputs.Ranks(0, 1, folder).spec(kind)
        try:
            build_engine(spec, device=torch.device(device), rank=0, world_size=1)
        except Exception as error:  # on a machine without a GPU
            assert device == "cuda", error
    found = (
        "verl_ray.engine.megatron.shim" in sys.modules,
        torch.cuda.current_device.__module__,
    )
    (folder / f"found_{kinds}_{device}.json").write_text(json.dumps(found))
