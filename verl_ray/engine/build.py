"""Construction of the engine that a backend's settings describe.

Invariant: a backend's module is imported only where the backend is used, because some
(megatron's) change global state of their process.

Deliberately not here: the process group, which the caller creates first.
"""

from __future__ import annotations

import torch

from verl_ray.engine.base import Engine, EngineSpec
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import EngineError


def build_engine(
    spec: EngineSpec, *, device: torch.device, rank: int, world_size: int
) -> Engine:
    """Build the engine of one role on one rank.

    The process group must exist already, except for the plain engine on a single rank.

    Raises:
        EngineError: A package that the backend needs is not installed.
    """
    backend = spec.backend

    missing = missing_packages(backend.packages)
    if missing:
        packages = " and ".join(missing)
        raise EngineError(
            f"{spec.role}.backend = {backend.kind} needs {packages},"
            f" not installed here: {INSTALL}"
        )

    if device.type == "cpu":
        backend.prepare_cpu()

    engine: Engine = backend.engine(
        spec, device=device, rank=rank, world_size=world_size
    )
    return engine
