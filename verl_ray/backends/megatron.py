"""The `megatron` backend: megatron-core, with layers, matrices, tokens and experts shared out over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl_ray.backends.base import FLOAT32, MOMENTS, BackendSettings, Cut, ModelFacts, ParameterCounts, State
from verl_ray.backends.layouts import ModelSizes, described, nearest_layout, obstacles, other_ranks
from verl_ray.backends.megatron_models import sizes_of, unmapped
from verl_ray.config.section import Positive
from verl_ray.config.suggest import either
from verl_ray.errors import Problem
from verl_ray.lazy import Lazy


class MegatronBackend(BackendSettings):
    kind: Literal["megatron"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the weights that compute; main weights and gradients, log-probs and losses are always float32."""
    tensor_parallel: Positive
    """Ranks that share out each layer's matrices and heads, and the vocabulary."""
    sequence_parallel: bool
    """Between the matrices, each of the tensor_parallel ranks holds a slice of the tokens in place of all."""
    pipeline_parallel: Positive
    """Ranks that share out the layers; micro-batches go through them one behind the other (1F1B)."""
    virtual_stages: Positive
    """Runs of layers per pipeline rank (interleaved 1F1B): smaller bubbles for more messages; 1 = one run."""
    context_parallel: Positive
    """Ranks that share out the tokens of each row; within attention they share out its heads."""
    expert_parallel: Positive
    """Ranks, of those with rows of their own, that share out the experts of each layer."""
    expert_tensor_parallel: Positive
    """Ranks that share out each expert's matrices."""
    recompute: Literal["none", "selective", "full"]
    """What the backward pass computes again instead of keeping it: attention alone (selective), or whole layers."""

    engine: ClassVar[Lazy] = Lazy("verl_ray.engine.megatron.engine:MegatronEngine")
    packages: ClassVar[tuple[str, ...]] = ("megatron.core",)
    has_adapters: ClassVar[bool] = False
    of_activations: ClassVar[tuple[str, ...]] = ("recompute",)
    token_slices_key: ClassVar[str | None] = "context_parallel"

    @classmethod
    def prepare_cpu(cls) -> None:
        Lazy("verl_ray.engine.megatron.shim:install")()

    @property
    def peers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def token_slices(self) -> int:
        return self.context_parallel

    @property
    def sent_width(self) -> int:
        return self.width

    @property
    def moved_width(self) -> int:
        """With the weights that compute, also where they are the same memory as those that are stepped."""
        return FLOAT32 + MOMENTS + self.width

    def described(self, num_ranks: int) -> str:
        return f"{self.kind} {described(self, num_ranks)}"

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        yield from self._layout_problems(role, num_ranks, None)

    def model_problems(self, role: str, num_ranks: int, model: ModelFacts) -> Iterator[Problem]:
        others = either(f"backend@{role}.backend={choice}" for choice in ("fsdp", "engine"))
        for rule, instead in unmapped(model.path, model.settings):
            fix = f"Choose {others}, or {instead}." if instead else f"Choose {others}."
            yield Problem(f"{role}.backend", self.kind, rule, fix)
        sizes = sizes_of(model.settings)
        if sizes is not None:
            yield from self._layout_problems(role, num_ranks, sizes)

    def _layout_problems(self, role: str, num_ranks: int, sizes: ModelSizes | None) -> Iterator[Problem]:
        """What is in the way of the layout, for a model of these sizes where they are known, and the nearest one that
        is possible."""
        found = list(obstacles(self, num_ranks, sizes))
        if not found:
            return
        change = nearest_layout(self, num_ranks, sizes)
        said = (f"{role}.backend.{key}={str(value).lower()}" for key, value in change.items())
        fix = f"The nearest layout that works has {' and '.join(said)}"
        elsewhere = [count for count in other_ranks(self, num_ranks) if not any(obstacles(self, count, sizes))]
        if elsewhere:
            fix += f"; this one works with {role}.num_ranks={either(elsewhere)}"
        for obstacle in found:
            yield Problem(f"{role}.backend.{obstacle.key}", getattr(self, obstacle.key), obstacle.rule, f"{fix}.")

    def state(self, num_ranks: int, model: ParameterCounts, trained: int) -> State:
        """Every copy of the model has weights and gradients; what the optimizer steps, all copies share out. Experts
        may have other copies than the rest."""
        of_experts = self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
        rest = (model.parameters - model.of_experts) // (self.tensor_parallel * self.pipeline_parallel)
        own = rest + model.of_experts // of_experts
        if not trained:
            return State({"weights": self.width * own})
        # in float32 the weights that compute are stepped
        stepped = MOMENTS + (FLOAT32 if self.width != FLOAT32 else 0)
        optimizer = stepped * trained // num_ranks
        return State({"weights": self.width * own, "gradients": FLOAT32 * own, "optimizer": optimizer})

    def in_flight(self, num_ranks: int, model: ParameterCounts, trained: int, *, batches: int, learns: bool) -> int:
        return 0

    def cut(self) -> Cut:
        recompute = self.recompute == "full"
        return Cut(self.tensor_parallel, self.pipeline_parallel, sliced=self.sequence_parallel, recompute=recompute)
