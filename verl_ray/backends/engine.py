"""The `engine` backend: plain PyTorch, with DDP if a role has several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    ActivationPartition,
    MemoryPart,
    ModuleBackend,
    ParameterCounts,
    RankMemory,
    adapter_parameters,
)
from verl_ray.settings.section import resolved


class EngineBackend(ModuleBackend):
    """The settings of plain PyTorch."""

    kind: Literal["engine"]

    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "muon", "adafactor", "sgd")
    shares_models: ClassVar[bool] = False
    moves_expert_biases: ClassVar[bool] = True

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
        apart = 0
        if learns and num_ranks > 1 and batches > 1:
            # DDP's buckets take gradients only when they are summed, in the last
            # micro-batch; until then they are apart.
            apart = FLOAT32 * trained
        if self.compute_width == FLOAT32:
            return apart

        # A layer or the head is cast while it computes.
        cast_parameters = max(model.largest_layer, model.outside_layers)
        recomputes = resolved(self.activation_checkpointing)
        if trained == model.parameters:
            # Autocast keeps the cast copies of weights that learn.
            cast_parameters = model.parameters
        elif learns and not recomputes:
            # The backward pass needs those of all layers that an adapter is in.
            cast_parameters = model.parameters
        return apart + self.compute_width * cast_parameters

    def activation_partition(self) -> ActivationPartition:
        # Autocast narrows the inputs of matrix products, but not the embeddings.
        return replace(super().activation_partition(), residual_width=FLOAT32)
