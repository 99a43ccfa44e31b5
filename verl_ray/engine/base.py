"""The contract of a training engine: what a role may ask of its model, whichever backend holds it.

Invariant (SPMD): every rank of a role calls every method, in the same order; rows come back in the order they were
given; a loss sees complete rows and weights that already hold the global denominators, and gradients are summed over
ranks once, by the engine. So a result depends neither on the micro-batch size nor on the number of ranks.
Deliberately not here: what a role computes (workers) and where rows come from (the controller).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from verl_ray.algorithms.objectives import Objective
from verl_ray.backends import Backend
from verl_ray.config.roles import LoraConfig, OptimizerConfig
from verl_ray.data.packing import Float64
from verl_ray.data.stages import Bool, Float32, Rows, TrainingBatch
from verl_ray.ops.outputs import Outputs
from verl_ray.parallel.topology import Topology
from verl_ray.profiling.flops import ModelShape
from verl_ray.weight_sync.manifest import Manifest, Slice

if TYPE_CHECKING:  # the driver describes engines and holds none: models take a second to import
    from verl_ray.models.role_model import HeadKind


@dataclass(frozen=True)
class EngineSpec:
    """What to build: a model, its head, the backend that holds it, and how it learns (None: it does not)."""

    role: str
    model_path: str
    head: HeadKind
    backend: Backend
    optimizer: OptimizerConfig | None
    schedule_steps: int
    """Optimizer steps of the whole run: where a cosine schedule ends."""
    seed: int
    new_head: bool = True
    """Whether a value head that the model lacks is drawn from the seed; else it is an error."""
    lora: LoraConfig | None = None
    """The adapter that learns in place of the model's weights."""
    expert_balance: float | None = None
    """Weight of the balance loss of experts; None: what the model's configuration says."""


@dataclass(frozen=True)
class ForwardResult:
    """Flat per-token columns [tokens] of the given rows, 0 outside the response mask, and scores [rows]; what was not
    asked for is absent."""

    log_probs: Float32 | None = None
    entropy: Float32 | None = None
    greedy: Bool | None = None
    values: Float32 | None = None
    scores: Float32 | None = None  # [rows] the head's number after each row's last token


@dataclass(frozen=True)
class LossReport:
    """Sums and maxima over the response tokens that one rank saw; adding the reports of all ranks gives the global
    ones."""

    tokens: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)  # none is negative; NaN is above every number
    expert_load: Float64 | None = None  # [layers, experts]: tokens that each expert was given
    terms: dict[str, float] = field(default_factory=dict)  # of the loss, and summed as it is

    def __add__(self, other: LossReport) -> LossReport:
        def together(
            one: dict[str, float], two: dict[str, float], join: Callable[[float, float], float]
        ) -> dict[str, float]:
            names = sorted(one.keys() | two.keys())
            return {name: float(join(one.get(name, 0.0), two.get(name, 0.0))) for name in names}

        sums = together(self.sums, other.sums, operator.add)
        terms = together(self.terms, other.terms, operator.add)
        maxima = together(self.maxima, other.maxima, np.maximum)  # Python's max would lose a NaN
        loads = [one.expert_load for one in (self, other) if one.expert_load is not None]
        load = sum(loads[1:], loads[0]) if loads else None
        return LossReport(self.tokens + other.tokens, self.loss + other.loss, sums, maxima, load, terms)

    def means(self) -> dict[str, float]:
        """Token means of the metrics; NaN where there was no token."""
        return {name: total / self.tokens if self.tokens else float("nan") for name, total in self.sums.items()}


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: the gradient norm before clipping, the learning rate used, and whether it was skipped."""

    grad_norm: float
    lr: float
    skipped: str | None = None  # why: names the first tensor whose gradient is not finite


class Engine(ABC):
    """One role's model on one rank."""

    topology: Topology
    peers: int
    """Neighbouring ranks that are given the same rows, and compute them together."""
    head: HeadKind
    max_positions: int
    """The longest row that the model takes, in tokens."""
    vocab_size: int
    shape: ModelShape | None
    """Its sizes, where its arithmetic is counted."""

    @abstractmethod
    def forward(self, rows: Rows, outputs: Outputs) -> ForwardResult:
        """The wanted outputs for every token under the response mask (scores: for every row), without gradients. On a
        rank that does not answer for its rows (`topology`), they may be zeros."""

    @abstractmethod
    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        """Add the gradients of the objective over these rows, in micro-batches under the token cap. Rows that the
        objective compares (its `rows_per_unit`) stand side by side, and stay in one micro-batch."""

    @abstractmethod
    def optimizer_step(self) -> StepReport:
        """Clip, step (or skip a step whose gradients are not finite), advance the schedule, zero the gradients."""

    @abstractmethod
    def manifest(self, *, apart: bool = False) -> Manifest:
        """Every parameter under its Hugging Face name; the same on every rank. `apart`: an adapter that learns is not
        merged into the weights beside it, but comes after them."""

    @abstractmethod
    def shards(self, names: Iterable[str], *, apart: bool = False) -> Iterator[tuple[Slice, Tensor]]:
        """The slices of these parameters that this rank owns, as `manifest` of the same `apart` has them. Over all
        ranks they cover each parameter once."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Model, optimizer, schedule and RNG, sharded as torch's distributed checkpoint expects it."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` of any engine of this model returned, filled by torch's distributed checkpoint."""

    @abstractmethod
    def place(self, *, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host"; idempotent. On a CPU both are the same memory.

        With either on the host no optimizer step may follow, so memory kept for gradients may be given back until both
        are on the device again.
        """

    @abstractmethod
    def export(self, path: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face directory: config, tokenizer, safetensors; or what was learned beside it, as peft reads
        it. Raises EngineError for an adapter where there is none."""

    def close(self) -> None:  # noqa: B027 - few engines hold such a thing
        """Let go of what a garbage collector would not. Idempotent."""


def scattered(values: np.ndarray[Any, Any], where: np.ndarray[Any, Any], tokens: int) -> np.ndarray[Any, Any]:
    """[read] values at their places among all tokens, zeros elsewhere."""
    out = np.zeros(tokens, dtype=values.dtype)
    out[where] = values
    return out
