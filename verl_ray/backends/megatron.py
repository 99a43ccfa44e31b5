"""The `megatron` backend: megatron-core, which partitions layers, matrices, tokens and
experts over ranks.

Invariant: every layout that is refused names the nearest feasible one (`layouts.py`). A
model that is refused here would fail after the processes have started, or would be
computed differently; it is judged by its config.json alone. Nothing of megatron-core is
imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

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
from verl_ray.errors import Problem
from verl_ray.settings.config_json import (
    WITH_EXPERTS,
    Settings,
    has_windows,
    rotary_types,
)
from verl_ray.settings.section import Auto, Dtype, resolved
from verl_ray.suggest import either

IN_MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose weights have a place in the model of megatron-core."""

ACTIVATIONS_IN_MEGATRON = ("silu", "swish")
"""Values of hidden_act that megatron-core computes: two names of one function."""

BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias",),
}
"""Settings that add biases for which megatron-core's model has no place. It has a place
for the biases of queries, keys and values."""

ROTARY_TYPES = ("default", "linear", "dynamic", "llama3")
"""Types of rotary positions that only rotate queries and keys. Other types also scale
them, or rotate long rows differently."""


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
            "optimizer": self._optimizer_width * trained // num_ranks,
        }
        return RankMemory(persistent)

    @property
    def _optimizer_width(self) -> int:
        """Bytes of the optimizer's state per parameter.

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
        state = more * self._optimizer_width // copies
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


# ------------------------------------------------------------------------------- models


def unsupported_settings(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the reasons why megatron-core cannot compute the model of a directory.

    Args:
        path: The directory, for messages.
        settings: The contents of its config.json.

    Yields:
        The reason, and what the configuration could choose instead; an empty text if
        there is no such alternative.
    """
    yield from _unsupported_modules(path, settings)
    yield from _unsupported_positions(path, settings)

    # The weight of the only chosen expert is normalized to 1, a constant.
    chosen_experts = settings.get("num_experts_per_tok")
    if (
        _has_routers(settings)
        and chosen_experts == 1
        and settings.get("norm_topk_prob")
    ):
        yield (
            f"{path} sets num_experts_per_tok=1 and norm_topk_prob: routers would never"
            " learn",
            "",
        )


def _has_routers(settings: Settings) -> bool:
    return settings.get("model_type") in WITH_EXPERTS


def _unsupported_modules(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the modules of the model that megatron-core's model does not have."""
    family = settings.get("model_type")

    if family not in IN_MEGATRON:
        yield (
            f"{path} is a {family!r} model, which has no map to megatron-core's",
            f"a model of {either(IN_MEGATRON)}",
        )

    if has_windows(settings):
        yield (
            f"{path} has layers with a sliding window, which this backend's attention"
            " does not compute",
            "",
        )

    for name in BIASES.get(str(family), ()):
        if settings.get(name):
            yield (
                f"{path} sets {name}, and megatron-core's model has no place for those"
                " biases",
                "",
            )

    supported_activation = ACTIVATIONS_IN_MEGATRON[0]
    activation = settings.get("hidden_act", supported_activation)
    if family in IN_MEGATRON and activation not in ACTIVATIONS_IN_MEGATRON:
        yield (
            f"{path} sets hidden_act={activation}, and {supported_activation} is what"
            " this backend computes",
            "",
        )


def _unsupported_positions(path: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the types of rotary positions that this backend does not compute."""
    unsupported_types = rotary_types(settings) - set(ROTARY_TYPES)
    for kind in sorted(unsupported_types):
        yield (
            f"{path} has rotary positions of type {kind}, which also scale attention:"
            " this backend does not",
            "",
        )


def sizes_of(settings: Settings) -> ModelSizes | None:
    """Return the sizes of a model from its config.json.

    Returns:
        None if a size is missing, or if the family is not supported.
    """
    family = settings.get("model_type")
    numbers = _numbers(
        settings,
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
    )
    if numbers is None or family not in IN_MEGATRON:
        return None

    layers, heads, vocabulary, intermediate = numbers
    (key_heads,) = _numbers(settings, "num_key_value_heads") or (heads,)
    dense = ModelSizes(layers, heads, key_heads, vocabulary, intermediate)
    layers_with_experts = _count_layers_with_experts(settings, layers)
    if not _has_routers(settings) or not layers_with_experts:
        return dense

    # transformers writes the number of experts under one name, and reads both.
    experts = _numbers(settings, "num_local_experts")
    experts = experts or _numbers(settings, "num_experts")
    inner = _numbers(settings, "moe_intermediate_size")
    if experts is None or inner is None:
        return None

    if layers_with_experts == layers:
        dense = replace(dense, intermediate=None)
    return replace(dense, experts=experts[0], expert_intermediate=inner[0])


def _count_layers_with_experts(settings: Settings, layers: int) -> int:
    """Return how many layers have experts.

    Every `decoder_sparse_step`-th layer has experts, except for those that
    `mlp_only_layers` names by their indices.
    """
    (step,) = _numbers(settings, "decoder_sparse_step") or (1,)
    listed = settings.get("mlp_only_layers")
    without_experts = listed if isinstance(listed, list) else ()
    return sum(
        number % step == 0 and number - 1 not in without_experts
        for number in range(1, layers + 1)
    )


def _numbers(settings: Settings, *names: str) -> list[int] | None:
    """Return the sizes of these names; None if one is missing or 0."""
    numbers = []
    for name in names:
        value = settings.get(name)
        if not isinstance(value, int) or not value:
            return None
        numbers.append(value)
    return numbers
