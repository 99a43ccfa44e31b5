"""The `engine` backend: plain PyTorch, DDP where a role has more than one rank."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl_ray.backends.base import FLOAT32, MOMENTS, ModuleBackend, ParameterCounts, Part, State
from verl_ray.lazy import Lazy


class EngineBackend(ModuleBackend):
    kind: Literal["engine"]

    engine: ClassVar[Lazy] = Lazy("verl_ray.engine.plain:PlainEngine")

    def state(self, num_ranks: int, model: ParameterCounts, trained: int) -> State:
        adapter = trained if trained != model.parameters else 0
        kept: dict[Part, int] = {"weights": FLOAT32 * (model.parameters + adapter), "optimizer": MOMENTS * trained}
        if num_ranks == 1:
            return State(kept, passing=FLOAT32 * trained)
        kept["gradients"] = FLOAT32 * trained  # views of DDP's buckets, which are there whenever the weights are
        return State(kept)

    def in_flight(self, num_ranks: int, model: ParameterCounts, trained: int, *, batches: int, learns: bool) -> int:
        if self.width == FLOAT32:
            return 0
        return self.width * (model.parameters if trained else model.largest_layer)  # kept of weights that learn
