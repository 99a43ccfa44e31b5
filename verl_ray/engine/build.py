"""From a backend's declaration to its engine."""

from __future__ import annotations

import torch

from verl_ray.engine.base import Engine, EngineSpec
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import EngineError


def build_engine(spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> Engine:
    """The engine of one role on one rank. With more than one rank, or for any backend but the plain engine, the process
    group exists already. A backend's module is imported where it is used: megatron's changes its process."""
    backend = spec.backend
    if missing := missing_packages(backend.packages):
        needed = f"{spec.role}.backend = {backend.kind} needs {' and '.join(missing)}"
        raise EngineError(f"{needed}, not installed here: {INSTALL}")
    if device.type == "cpu":
        backend.prepare_cpu()
    engine: Engine = backend.engine(spec, device=device, rank=rank, world_size=world_size)
    return engine
