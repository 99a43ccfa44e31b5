"""The `engine` backend: plain PyTorch, with DDP if a role has several ranks.

Deliberately not here: the computation (`verl_ray/engine/plain.py`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    MemoryPart,
    ModuleBackend,
    ParameterCounts,
    RankMemory,
    adapter_parameters,
)
from verl_ray.lazy import Lazy


class EngineBackend(ModuleBackend):
    """The settings of plain PyTorch."""

    kind: Literal["engine"]

    engine: ClassVar[Lazy] = Lazy("verl_ray.engine.plain:PlainEngine")

    def rank_memory(
        self, num_ranks: int, model: ParameterCounts, trained: int
    ) -> RankMemory:
        parameters = model.parameters + adapter_parameters(model, trained)
        gradients = FLOAT32 * trained
        persistent: dict[MemoryPart, int] = {
            "weights": FLOAT32 * parameters,
            "optimizer": MOMENTS * trained,
        }

        if num_ranks == 1:
            return RankMemory(persistent, transient=gradients)

        # Gradients are views of DDP's buckets, which exist as long as the weights.
        persistent["gradients"] = gradients
        return RankMemory(persistent)

    def working_bytes(
        self,
        num_ranks: int,
        model: ParameterCounts,
        trained: int,
        *,
        batches: int,
        learns: bool,
    ) -> int:
        if self.compute_width == FLOAT32:
            return 0

        cast_parameters = model.largest_layer
        if trained:
            # Autocast keeps the cast copies of weights that learn.
            cast_parameters = model.parameters
        return self.compute_width * cast_parameters
