"""The `megatron` backend: megatron-core, which partitions layers, matrices, tokens and
experts over ranks.

Invariant: every layout that is refused names the nearest feasible one (`layouts.py`). A
model that is refused (`megatron_families.py`) would fail after the processes have
started, or would be computed differently. Nothing of megatron-core is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from verl_ray.backends.base import (
    FLOAT32,
    MOMENTS,
    ActivationPartition,
    BytesPerPart,
    ModelFacts,
    ParameterCounts,
    RankMemory,
    Trade,
)
from verl_ray.backends.layouts import (
    Layout,
    ModelSizes,
    layout_description,
    nearest_layout,
    obstacles,
    other_ranks,
)
from verl_ray.backends.megatron_families import sizes_of, unsupported_settings
from verl_ray.errors import Problem
from verl_ray.settings.section import Auto, Dtype, resolved
from verl_ray.suggest import either


class MegatronBackend(Layout):
    """The settings of megatron-core."""

    kind: Literal["megatron"]
    dtype: Dtype | Auto
    """Type of the weights that compute; main weights and gradients, log-probs and
    losses are always float32."""
    recompute: Literal["none", "selective", "full"] | Auto
    """What the backward pass computes again instead of keeping it: attention alone
    (selective), or whole layers.

    auto: full where the GPU needs it, by the memory plan, else none; none on a CPU.
    """

    packages: ClassVar[tuple[str, ...]] = ("megatron.core",)
    extra: ClassVar[str] = "megatron"
    has_adapters: ClassVar[bool] = False
    activation_settings: ClassVar[tuple[str, ...]] = ("recompute",)
    sums_tied_gradients_in_place: ClassVar[bool] = True
    recomputation: ClassVar[Trade | None] = Trade(
        "recompute", fast="none", small="full"
    )

    @classmethod
    def in_proofs(cls, tokens: int, *, has_experts: bool) -> Iterator[tuple[int, Self]]:
        alone = cls(
            kind="megatron",
            dtype="float32",
            micro_batch_tokens_per_rank=tokens,
            tensor_parallel=1,
            sequence_parallel=False,
            pipeline_parallel=1,
            virtual_stages=1,
            context_parallel=1,
            expert_parallel=1,
            expert_tensor_parallel=1,
            recompute="none",
        )
        yield 1, alone
        # Experts and latent attention get slices of the tokens alone.
        shared = {"tensor_parallel": 2, "sequence_parallel": True}
        if has_experts:
            shared["expert_parallel"] = 2
        yield 2, alone.model_copy(update=shared)

    @property
    def sent_width(self) -> int:
        return self.compute_width

    def description(self, num_ranks: int) -> str:
        return f"{self.kind} {layout_description(self, num_ranks)}"

    # ------------------------------------------------------------------------- problems

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._layout_problems(role, num_ranks, None)

    def model_problems(
        self, role: str, num_ranks: int, model: ModelFacts
    ) -> Iterator[Problem]:
        other_backends = either(
            f"backend@{role}.backend={choice}" for choice in ("fsdp", "engine")
        )
        for rule, alternative in unsupported_settings(model.path, model.settings):
            fix = f"Choose {other_backends}."
            if alternative:
                fix = f"Choose {other_backends}, or {alternative}."
            yield Problem(f"{role}.backend", self.kind, rule, fix)

        sizes = sizes_of(model.settings)
        if sizes is not None:
            yield from self._layout_problems(role, num_ranks, sizes)

    def _layout_problems(
        self, role: str, num_ranks: int, sizes: ModelSizes | None
    ) -> Iterator[Problem]:
        """Yield every obstacle to the layout, with the nearest feasible layout.

        Args:
            role: Name of the role.
            num_ranks: Number of ranks of the role.
            sizes: Sizes of the role's model; None if they are unknown.
        """
        all_obstacles = list(obstacles(self, num_ranks, sizes))
        if not all_obstacles:
            return

        fix = self._layout_fix(role, num_ranks, sizes)
        for obstacle in all_obstacles:
            yield Problem(
                f"{role}.backend.{obstacle.key}",
                getattr(self, obstacle.key),
                obstacle.rule,
                fix,
            )

    def _layout_fix(self, role: str, num_ranks: int, sizes: ModelSizes | None) -> str:
        """Return the nearest feasible layout, and the ranks that fit this layout."""
        change = nearest_layout(self, num_ranks, sizes)
        settings = " and ".join(
            f"{role}.backend.{key}={str(value).lower()}"
            for key, value in change.items()
        )
        fix = f"The nearest layout that works has {settings}"

        feasible_ranks = [
            count
            for count in other_ranks(self, num_ranks)
            if not any(obstacles(self, count, sizes))
        ]
        if feasible_ranks:
            fix += f"; this one works with {role}.num_ranks={either(feasible_ranks)}"
        return f"{fix}."

    # --------------------------------------------------------------------------- memory

    def rank_memory(
        self, num_ranks: int, model: ParameterCounts, trained: int
    ) -> RankMemory:
        # Every copy of the model has weights and gradients. Experts may have more or
        # fewer copies than the other parameters.
        expert_shards = (
            self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
        )
        dense_shards = self.tensor_parallel * self.pipeline_parallel
        dense_parameters = model.parameters - model.in_experts
        own_experts = model.in_experts // expert_shards
        own_parameters = dense_parameters // dense_shards + own_experts

        weights = self.compute_width * own_parameters
        if not trained:
            return RankMemory({"weights": weights})

        # All copies share the state of the optimizer.
        persistent: BytesPerPart = {
            "weights": weights,
            "gradients": FLOAT32 * own_parameters,
            "optimizer": self.optimizer_width * trained // num_ranks,
        }
        return RankMemory(persistent)

    @property
    def optimizer_width(self) -> int:
        """Bytes of the optimizer's state per parameter that a rank steps.

        In float32 it steps the weights that compute, and has no main weights of its
        own.
        """
        if self.compute_width == FLOAT32:
            return MOMENTS
        return MOMENTS + FLOAT32

    def working_bytes(
        self,
        num_ranks: int,
        model: ParameterCounts,
        trained: int,
        *,
        batches: int,
        learns: bool,
    ) -> int:
        # The first stage has the embedding and the last one the head, which is more
        # than their share of these.
        end_parameters = model.outside_layers // 2
        stage_parameters = model.outside_layers // self.pipeline_parallel
        more = max(0, end_parameters - stage_parameters) // self.tensor_parallel
        if not trained:
            return more * self.compute_width

        stages = self.tensor_parallel * self.pipeline_parallel
        copies = max(1, num_ranks // stages)
        state = more * self.optimizer_width // copies
        return more * (self.compute_width + FLOAT32) + state

    def activation_partition(self) -> ActivationPartition:
        return ActivationPartition(
            residual_width=self.compute_width,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            sequence_parallel=self.sequence_parallel,
            recompute=resolved(self.recompute) == "full",
            fused=True,
        )
