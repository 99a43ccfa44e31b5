"""Which class is which backend."""

from __future__ import annotations

import torch

from verl_ray.engine.base import Engine, EngineSpec
from verl_ray.engine.fsdp import FsdpEngine
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.engine.plain import PlainEngine

BACKENDS: dict[str, type[ModuleEngine]] = {"engine": PlainEngine, "fsdp": FsdpEngine}


def build_engine(spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> Engine:
    """The engine of one role on one rank. With more than one rank, or for fsdp, the process group exists already."""
    return BACKENDS[spec.backend.kind](spec, device=device, rank=rank, world_size=world_size)
