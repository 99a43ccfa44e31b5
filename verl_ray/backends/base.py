"""The contract of a backend's declaration: its settings, and its figures before a run.

Invariant: a backend's settings change speed and memory, never what a role computes.
Everything here is arithmetic over settings, numbers of ranks and sizes of models;
nothing is imported that computes. Deliberately not here: what a role learns
(`verl_ray/config/roles.py`), and the engine's own contract (`verl_ray/engine/base.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from verl_ray.errors import Problem
from verl_ray.settings.section import Auto, Dtype, Positive, Section, resolved

MemoryPart = Literal[
    "weights",
    "gradients",
    "optimizer",
    "cache",
    "activations",
    "buffers",
    "snapshots",
]
BytesPerPart = Mapping[MemoryPart, int]

FLOAT32 = 4
"""Bytes of a float32 number."""

MOMENTS = 8
"""Bytes per parameter of AdamW's two moments, in float32."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model.

    Attributes:
        parameters: All parameters.
        in_experts: Parameters that belong to experts.
        in_layers: Parameters of all transformer layers.
        largest_layer: Parameters of the largest layer.
    """

    parameters: int
    in_experts: int
    in_layers: int
    largest_layer: int

    @property
    def outside_layers(self) -> int:
        """Parameters of the embeddings, the last norm and the head."""
        return self.parameters - self.in_layers


@dataclass(frozen=True)
class ModelFacts:
    """The contents of a model's directory, as far as they are known.

    Attributes:
        path: The directory.
        settings: The contents of its config.json; empty if the file is missing.
        tensors: The shape of every tensor; empty if there are none.
        has_value_head: True if the role gives the model a value head in place of the
            language head.
    """

    path: str
    settings: Mapping[str, object]
    tensors: Mapping[str, Sequence[int]]
    has_value_head: bool


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank holds of a model, in bytes.

    Attributes:
        persistent: What the rank holds between calls.
        transient: Gradients that exist only within a call.
    """

    persistent: BytesPerPart
    transient: int = 0


@dataclass(frozen=True)
class ActivationPartition:
    """The ways in which a backend reduces a rank's activations.

    Attributes:
        tensor_parallel: Ranks that share the matrices of each layer.
        pipeline_parallel: Ranks that share the layers.
        sequence_parallel: True if the tensor-parallel ranks share the tokens between
            the matrices.
        recompute: True if the backward pass computes whole layers again.
        offloaded: True if activations that the backward pass needs are kept on the
            host. It changes nothing on a CPU.
        residual_width: Bytes of a number that passes from layer to layer.
        fused: True if queries, keys and values are one projection, as are the gate and
            up projections, whose outputs the backward pass needs beside their parts.
    """

    residual_width: int

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    offloaded: bool = False
    fused: bool = False


@dataclass(frozen=True)
class Trade:
    """A setting of a backend that trades time for memory of a device.

    Attributes:
        setting: Its name within the backend.
        fast: The value that takes least time.
        small: The value that needs least memory.
    """

    setting: str
    fast: object
    small: object


class BackendSettings(Section):
    """The base of all backends: a subclass per choice.

    The settings of a backend are fields; figures that depend on them are methods.
    """

    kind: str
    dtype: Dtype | Auto
    """Type of the forward and backward computation; master weights, log-probs and
    losses are always float32.

    auto: bfloat16 on GPUs, float32 on a CPU.
    """
    micro_batch_tokens_per_rank: Positive | Auto
    """The most tokens that one rank takes through the model at once.

    auto: the most that fit the GPU by the memory plan, from 2048 to 32768, or as long
    as the longest row; 8192 on a CPU.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that its engine imports and that this project does not depend on."""
    extra: ClassVar[str] = ""
    """The extra of this project that installs those packages; empty if there are none.
    """
    has_adapters: ClassVar[bool] = True
    """It can train a low-rank adapter alone."""
    activation_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that change nothing for a model that does not learn, since such a model
    keeps no activations."""
    gradient_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that change nothing for a model that does not learn, since such a model
    has no gradients."""
    token_slices_key: ClassVar[str | None] = None
    """The key of the setting that determines `token_slices`; None if there is none."""
    releases_gradients_with_weights: ClassVar[bool] = False
    """True: the memory of gradients is released when weights are offloaded. False: it
    is released whenever no optimizer step can follow."""
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    """Names of the optimizers that its engine has."""
    moves_expert_biases: ClassVar[bool] = False
    """Whether biases of routers may follow the load of their experts."""

    shares_models: ClassVar[bool] = True
    """Ranks can share a model out. False: each rank holds a copy of it."""
    sums_tied_gradients_in_place: ClassVar[bool] = False
    """Both gradients of a tied embedding are added up in place."""

    gradient_sums: ClassVar[Trade | None] = None
    """The setting that sums gradients of several micro-batches in shards; None if there
    is none."""
    recomputation: ClassVar[Trade | None] = None
    """The setting that computes layers again in the backward pass; None if there is
    none."""
    host_offload: ClassVar[Trade | None] = None
    """The setting that keeps parameters and optimizer state on the host; None if there
    is none."""

    @classmethod
    def in_proofs(cls, tokens: int, *, has_experts: bool) -> Iterator[tuple[int, Self]]:
        """Yield numbers of ranks that share a model in its proof, and their settings.

        Each computes in float32. There are none by default.

        Args:
            tokens: The most tokens of a micro-batch.
            has_experts: Whether the model has experts.
        """
        yield from ()

    @property
    def peers(self) -> int:
        """Number of ranks that receive the same rows and compute them together."""
        return 1

    @property
    def token_slices(self) -> int:
        """Number of slices that a micro-batch's tokens are cut into, one per peer."""
        return 1

    @classmethod
    def trades(cls) -> Iterator[Trade]:
        """Yield the settings that trade time for memory and may be `auto`."""
        for trade in (cls.gradient_sums, cls.recomputation):
            if trade is not None:
                yield trade

    @property
    def has_stages(self) -> bool:
        """True if micro-batches pass from rank to rank, which wait for each other."""
        return False

    def matrix_sharing(self, ranks: int) -> Mapping[str, object]:
        """Return the settings with which so many ranks share each layer's matrices.

        Args:
            ranks: Number of these ranks.

        Returns:
            The settings to change; empty if as many share them, or none can.
        """
        return {}

    @property
    def compute_dtype(self) -> Dtype:
        """The value of `dtype` in a resolved configuration."""
        return resolved(self.dtype)

    @property
    def compute_width(self) -> int:
        """Bytes of a number in the type of the computation."""
        if self.compute_dtype == "bfloat16":
            return 2
        return FLOAT32

    @property
    def optimizer_width(self) -> int:
        """Bytes of AdamW's state per parameter that a rank steps."""
        return MOMENTS

    @property
    def sent_width(self) -> int:
        """Bytes of a weight as it is sent to rollout engines."""
        return FLOAT32

    @property
    def stays_on_host(self) -> bool:
        """True if parameters and optimizer state never live on the device."""
        return False

    def description(self, num_ranks: int) -> str:
        """Return the name of the backend and, in short, how it partitions a model."""
        return self.kind

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        """Yield the role's settings that conflict with each other or with `num_ranks`.

        These are the problems that do not depend on the model.
        """
        yield from ()

    def model_problems(
        self, role: str, num_ranks: int, model: ModelFacts
    ) -> Iterator[Problem]:
        """Yield the reasons why the backend cannot compute or partition the model."""
        yield from ()

    @abstractmethod
    def rank_memory(
        self, num_ranks: int, model: ParameterCounts, trained: int
    ) -> RankMemory:
        """Return the memory that one rank holds of the model.

        The figures are counted: on average no rank holds less.

        Args:
            num_ranks: Number of ranks of the role.
            model: Sizes of the model, without an adapter.
            trained: Number of parameters that learn; those of an adapter are held in
                addition to the model's.
        """

    @abstractmethod
    def working_bytes(
        self,
        num_ranks: int,
        model: ParameterCounts,
        trained: int,
        *,
        batches: int,
        learns: bool,
    ) -> int:
        """Return an estimate of the bytes that a computation needs in addition.

        These are parameters that are gathered or cast for it, and gradients that wait
        to be reduced.

        Args:
            num_ranks: Number of ranks of the role.
            model: Sizes of the model, without an adapter.
            trained: Number of parameters that learn.
            batches: Number of micro-batches of the computation.
            learns: True if the computation has a backward pass.
        """

    @abstractmethod
    def activation_partition(self) -> ActivationPartition:
        """Return how the activations of a rank are reduced."""


class ModuleBackend(BackendSettings):
    """A backend around one torch module of transformers per rank."""

    activation_checkpointing: bool | Auto
    """Recompute each layer's activations in the backward pass instead of keeping them.

    auto: true where the GPU needs it, by the memory plan; false on a CPU.
    """

    recomputation: ClassVar[Trade | None] = Trade(
        "activation_checkpointing", fast=False, small=True
    )
    activation_settings: ClassVar[tuple[str, ...]] = ("activation_checkpointing",)

    def activation_partition(self) -> ActivationPartition:
        return ActivationPartition(
            residual_width=self.compute_width,
            recompute=resolved(self.activation_checkpointing),
        )


def adapter_parameters(model: ParameterCounts, trained: int) -> int:
    """Return the number of parameters of an adapter, which lie beside the model's."""
    if trained == model.parameters:
        return 0
    return trained
