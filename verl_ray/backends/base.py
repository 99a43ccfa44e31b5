"""The contract of a backend's declaration: its settings, and what is asked of it before it computes.

Invariant: a backend's settings change speed and memory, never what a role computes. Everything here is arithmetic over
settings, numbers of ranks and sizes of models; nothing is imported that computes. Deliberately not here: what a role
learns (`verl_ray/config/roles.py`), and the engine's own contract (`verl_ray/engine/base.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_ray.config.section import Positive, Section
from verl_ray.errors import Problem
from verl_ray.lazy import Lazy

Part = Literal["weights", "gradients", "optimizer", "cache", "activations", "buffers"]
Bytes = Mapping[Part, int]

FLOAT32 = 4
MOMENTS = 8
"""AdamW's two, in float32."""


@dataclass(frozen=True)
class ParameterCounts:
    """Of a model."""

    parameters: int
    of_experts: int
    in_layers: int
    largest_layer: int

    @property
    def beside(self) -> int:
        """Embeddings, the last norm, the head."""
        return self.parameters - self.in_layers


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model's directory."""

    path: str
    settings: Mapping[str, object]
    """Of its config.json; empty where there is none."""
    tensors: Mapping[str, Sequence[int]]
    """The shape of each; empty where there are none."""
    reads_values: bool
    """It has a value head in place of the language head."""


@dataclass(frozen=True)
class State:
    """What one rank holds of a model, in bytes."""

    kept: Bytes
    """Between calls."""
    passing: int = 0
    """Gradients that are there only within a call."""


@dataclass(frozen=True)
class Cut:
    """How a rank's activations are made smaller."""

    tensor: int = 1
    """Ranks that share out each layer's matrices."""
    pipeline: int = 1
    """Ranks that share out the layers."""
    sliced: bool = False
    """Between the matrices the tensor-parallel ranks share out the tokens."""
    recompute: bool = False
    """Whole layers are computed again in the backward pass."""
    on_host: bool = False
    """On a device: what the backward pass needs waits on the host."""


class BackendSettings(Section):
    """A backend: a subclass per choice, with its settings as fields and its answers as methods."""

    kind: str
    dtype: Literal["float32", "bfloat16"]
    """Type of the forward and backward computation; master weights, log-probs and losses are always float32."""
    micro_batch_tokens_per_rank: Positive
    """The most tokens one rank takes through the model at once."""

    engine: ClassVar[Lazy]
    """The class behind the contract of `verl_ray/engine/base.py`."""
    packages: ClassVar[tuple[str, ...]] = ()
    """What it imports beside this project's own dependencies."""
    has_adapters: ClassVar[bool] = True
    """It can train a low-rank adapter alone."""
    of_activations: ClassVar[tuple[str, ...]] = ()
    """Settings that change nothing for a model that does not learn, since it keeps no activations."""
    of_gradients: ClassVar[tuple[str, ...]] = ()
    """The same, since it has no gradients."""
    token_slices_key: ClassVar[str | None] = None
    """The key that says `token_slices`; None where there is no such choice."""
    gradients_leave_with_weights: ClassVar[bool] = False
    """The memory of gradients is given back with the weights'; False: wherever no step can follow."""

    @classmethod
    def prepare_cpu(cls) -> None:
        """What must happen before the engine's module is imported where there is no GPU."""

    @property
    def peers(self) -> int:
        """Ranks that are given the same rows, and compute them together."""
        return 1

    @property
    def token_slices(self) -> int:
        """Into how many slices, one per peer, the tokens of a micro-batch are cut."""
        return 1

    @property
    def width(self) -> int:
        """Bytes of a number that computes."""
        return 2 if self.dtype == "bfloat16" else FLOAT32

    @property
    def sent_width(self) -> int:
        """Bytes of a weight as it is sent to rollout engines."""
        return FLOAT32

    @property
    def moved_width(self) -> int:
        """Bytes per parameter that learns which move between device and host with all of the state."""
        return FLOAT32 + MOMENTS

    @property
    def stays_on_host(self) -> bool:
        """Parameters and optimizer state never live on the device."""
        return False

    def described(self, num_ranks: int) -> str:
        """The backend, and how it shares a model out."""
        return self.kind

    def rank_problems(self, role: str, num_ranks: int) -> Iterator[Problem]:
        """Which settings of the role's backend do not go together, or not with so many ranks."""
        yield from ()

    def model_problems(self, role: str, num_ranks: int, model: ModelFacts) -> Iterator[Problem]:
        """What of the role's model it cannot compute, or share out so."""
        yield from ()

    @abstractmethod
    def state(self, num_ranks: int, model: ParameterCounts, trained: int) -> State:
        """What one of so many ranks holds, of whose parameters `trained` learn (those of an adapter lie beside them).
        Counted, and on average no rank holds less."""

    @abstractmethod
    def in_flight(self, num_ranks: int, model: ParameterCounts, trained: int, *, batches: int, learns: bool) -> int:
        """Bytes of parameters that are put together, or cast, for a computation of so many micro-batches, and of
        gradients on their way where it `learns`. An estimate."""

    @abstractmethod
    def cut(self) -> Cut:
        """How activations are made smaller."""


class ModuleBackend(BackendSettings):
    """A backend around one torch module of transformers per rank."""

    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass instead of keeping them."""

    of_activations: ClassVar[tuple[str, ...]] = ("activation_checkpointing",)

    def cut(self) -> Cut:
        return Cut(recompute=self.activation_checkpointing)
