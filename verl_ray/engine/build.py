"""Construction of the engine that a backend's settings describe.

Invariant: a backend's module is imported only where the backend is used, because some
(megatron's) change global state of their process. The caller creates the process group
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_ray.config.versions import install_command, missing_packages
from verl_ray.engine.base import Engine, EngineSpec
from verl_ray.errors import EngineError

if TYPE_CHECKING:
    import torch


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
            f" not installed here: {install_command(backend.extra)}"
        )

    engine = _engine_of(backend.kind, on_cpu=device.type == "cpu")
    return engine(spec, device=device, rank=rank, world_size=world_size)


def _engine_of(kind: str, *, on_cpu: bool) -> Callable[..., Engine]:
    """Return the engine class of a backend, which is imported here."""
    match kind:
        case "engine":
            from verl_ray.engine.plain import PlainEngine

            return PlainEngine
        case "fsdp":
            from verl_ray.engine.fsdp import FsdpEngine

            return FsdpEngine
        case "megatron":
            if on_cpu:
                _prepare_cpu(core=True)
            from verl_ray.engine.megatron.engine import MegatronEngine

            return MegatronEngine
        case "megatron_fsdp":
            if on_cpu:
                _prepare_cpu(core=False)
            from verl_ray.engine.megatron_fsdp.engine import MegatronFsdpEngine

            return MegatronFsdpEngine
        case _:
            raise EngineError(f"no engine is known of backend = {kind}")


def _prepare_cpu(*, core: bool) -> None:
    """Prepare this process for importing megatron on a machine without a GPU."""
    from verl_ray.engine.megatron.shim import install

    install(core=core)
