"""Which class is which backend."""

from __future__ import annotations

import torch

from verl_ray.engine.base import Engine, EngineSpec
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import EngineError


def build_engine(spec: EngineSpec, *, device: torch.device, rank: int, world_size: int) -> Engine:
    """The engine of one role on one rank. With more than one rank, or for any backend but the plain engine, the process
    group exists already. A backend's module is imported where it is used: megatron's changes its process."""
    kind = spec.backend.kind
    if missing := missing_packages(kind):
        raise EngineError(f"{spec.role}.backend = {kind} needs {' and '.join(missing)}, not installed here: {INSTALL}")
    if kind == "engine":
        from verl_ray.engine.plain import PlainEngine as Chosen
    elif kind == "fsdp":
        from verl_ray.engine.fsdp import FsdpEngine as Chosen  # type: ignore[assignment]
    elif kind == "megatron_fsdp":
        if device.type == "cpu":
            from verl_ray.engine.megatron import shim

            shim.install(core=False)
        from verl_ray.engine.megatron_fsdp.engine import MegatronFsdpEngine as Chosen  # type: ignore[assignment]
    else:
        if device.type == "cpu":
            from verl_ray.engine.megatron import shim

            shim.install()
        from verl_ray.engine.megatron.engine import MegatronEngine as Chosen  # type: ignore[assignment]
    return Chosen(spec, device=device, rank=rank, world_size=world_size)
