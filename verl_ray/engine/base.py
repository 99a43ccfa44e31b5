"""The training-engine contract: what a role can do with its model on every backend.

Invariant (SPMD): every rank of a role calls every method, in the same order. Results
have the order of the rows that were passed in. A loss sees complete rows, and its row
weights already contain the global denominators. The engine sums gradients over ranks
exactly once. A result therefore depends neither on the micro-batch size nor on the
number of ranks.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.backends import Backend
from verl_ray.columns.batch import Int64
from verl_ray.columns.packing import Float64, Topology
from verl_ray.columns.stages import Bool, Float32, Rows, TrainingBatch
from verl_ray.config.optimizers import OptimizerConfig, Pace
from verl_ray.config.roles import LoraConfig
from verl_ray.learning.objectives import Objective
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.profiling.flops import ModelShape
from verl_ray.weight_sync.manifest import Manifest, Slice

# The driver describes engines but holds none, and importing torch and models takes
# seconds.
if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.models.role_model import HeadKind


@dataclass(frozen=True)
class EngineSpec:
    """A description of an engine: its model, head, backend and optimizer."""

    role: str
    model_path: str
    head: HeadKind
    backend: Backend

    optimizer: OptimizerConfig | None
    """None for a model that is never trained, such as a reference policy."""

    schedule_steps: int
    """Optimizer steps of the whole run, of the size that it began with. A cosine
    schedule ends there."""

    seed: int

    pace: Pace | None = None
    """The pace of the schedule; None where steps have always had as many updates."""

    new_head: bool = True
    """Whether a missing value head is initialized from the seed. If False, a model
    without a value head is an error."""

    lora: LoraConfig | None = None
    """The adapter that is trained in place of the model's weights."""

    packs_rows: bool = True
    """Whether the model keeps rows apart that lie one behind the other. If False, all
    rows of a call have the same length, and lie one above the other."""

    kernels: tuple[str, ...] = ()
    """Packages whose kernels keep packed rows apart; none if the model needs none."""

    trusts_code: bool = False
    """Whether the code in the model's directory may run."""

    expert_balance: float | None = None
    """Weight of the experts' balance loss. None means the value in config.json."""

    expert_bias_update: float = 0.0
    """Size of a step of the biases by which routers choose experts."""

    replays_routing: bool = False
    """Whether the routers choose the experts that the sampler's chose, where these are
    recorded: those of rows that have `routed_experts`."""

    average_decay: float | None = None
    """What is left of the average of the weights after a step; None for no average."""

    chat_template: str | None = None
    """Text of the chat template that replaces the model's as it is exported."""


@dataclass(frozen=True)
class ForwardResult:
    """Outputs of a forward pass over some rows. Outputs not requested are None.

    Per-token columns are flat, [tokens] over all rows, and 0 outside the response mask.
    """

    log_probs: Float32 | None = None
    entropy: Float32 | None = None
    greedy: Bool | None = None
    squared_probs: Float32 | None = None
    values: Float32 | None = None

    top_tokens: Int64 | None = None
    """[tokens, count]: the most probable tokens in the place of each."""

    top_log_probs: Float32 | None = None
    """[tokens, count]: the log-probabilities of these."""

    scores: Float32 | None = None
    """[rows]: the value head's output after the last token of each row."""


LOSS = "loss"
"""Name of the loss in `LossReport.recorded`, without the balance of experts."""


@dataclass(frozen=True)
class LossReport:
    """Sums and maxima over the response tokens of one rank.

    Adding the reports of all ranks gives the report of the whole batch.
    """

    tokens: int = 0
    loss: float = 0.0

    sums: dict[str, float] = field(default_factory=dict)
    """Sum of each metric over the tokens."""

    maxima: dict[str, float] = field(default_factory=dict)
    """Maximum of each metric, never negative. NaN counts as larger than any number."""

    expert_load: Float64 | None = None
    """[layers, experts]: number of tokens that were routed to each expert."""

    terms: dict[str, float] = field(default_factory=dict)
    """Terms of the loss. They are aggregated in the same way as the loss itself."""

    recorded: dict[int, dict[str, Float32]] = field(default_factory=dict)
    """Losses and metrics of rows by `TrainingBatch.recorded`, see `RecordedLosses`."""

    def __add__(self, other: LossReport) -> LossReport:
        loads = [
            report.expert_load
            for report in (self, other)
            if report.expert_load is not None
        ]
        expert_load: Float64 | None = None
        if loads:
            expert_load = sum(loads[1:], loads[0])

        return LossReport(
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            sums=_merge(self.sums, other.sums, operator.add),
            # Python's max would lose a NaN, NumPy's keeps it.
            maxima=_merge(self.maxima, other.maxima, np.maximum),
            expert_load=expert_load,
            terms=_merge(self.terms, other.terms, operator.add),
            recorded=self.recorded | other.recorded,
        )

    def means(self) -> dict[str, float]:
        """Token means of the metrics, NaN if there was no token."""
        if not self.tokens:
            return dict.fromkeys(self.sums, float("nan"))
        return {name: total / self.tokens for name, total in self.sums.items()}


def _merge(
    first: dict[str, float],
    second: dict[str, float],
    combine: Callable[[float, float], float],
) -> dict[str, float]:
    """Combine two dictionaries entry by entry. A missing entry counts as 0."""
    names = sorted(first.keys() | second.keys())
    return {
        name: float(combine(first.get(name, 0.0), second.get(name, 0.0)))
        for name in names
    }


@dataclass(frozen=True)
class StepReport:
    """Outcome of one optimizer step."""

    grad_norm: float
    """Global gradient norm before clipping."""

    lr: float
    """Learning rate of this step."""

    skipped: str | None = None
    """Reason why the step was skipped, naming the first tensor with a non-finite
    gradient. None if the step was taken."""

    broken: tuple[str, ...] = ()
    """Names of the parameters that the step left not finite in this rank's part, in the
    order of the model."""


class Engine(ABC):
    """One role's model on one rank."""

    topology: Topology

    peers: int
    """Number of neighbouring ranks that get the same rows and compute them together."""

    head: HeadKind

    max_positions: int
    """Length of the longest row that the model accepts, in tokens."""

    vocab_size: int

    shape: ModelShape | None
    """Sizes of the model for counting FLOPs. None where FLOPs are not counted."""

    @abstractmethod
    def forward(self, rows: Rows, outputs: RequestedOutputs) -> ForwardResult:
        """Compute the requested outputs without gradients.

        Token outputs are computed for every token under the response mask, scores for
        every row. A rank that does not return results for its rows (see `topology`) may
        return zeros.
        """

    @abstractmethod
    def forward_backward(self, rows: TrainingBatch, objective: Objective) -> LossReport:
        """Add the gradients of the objective over these rows.

        The rows are processed in micro-batches under the backend's token cap. Rows of
        one `unit` stay in one micro-batch.
        """

    @abstractmethod
    def optimizer_step(self) -> StepReport:
        """Clip the gradients, take a step, advance the schedule, zero the gradients.

        A step whose gradients are not finite is skipped on all ranks and reported. So
        are the weights that a step which was taken has left not finite.
        """

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """Let the average of the weights take their place inside the block.

        Afterwards the weights have the bits from before. Collective. Inside of it
        nothing but `forward` may be called, and the optimizer's state has to be on the
        device.

        Raises:
            EngineError: The specification has no `average_decay`.
        """

    @abstractmethod
    def names_not_finite(self, *, learning: bool = False) -> tuple[str, ...]:
        """Return the names of the parameters whose part of this rank is not finite.

        Args:
            learning: Look only at those that the optimizer changes.
        """

    @abstractmethod
    def manifest(self, *, separate_adapter: bool = False) -> Manifest:
        """List every parameter under its Hugging Face name, equally on every rank.

        Args:
            separate_adapter: List the parameters of an adapter after those of the base
                model, instead of merging the adapter into the base weights.
        """

    @abstractmethod
    def shards(
        self, names: Iterable[str], *, separate_adapter: bool = False
    ) -> Iterator[tuple[Slice, Tensor]]:
        """Yield the slices of these parameters that this rank owns.

        Names are those of `manifest` with the same `separate_adapter`. Together the
        ranks cover each parameter exactly once.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the model, optimizer, schedule and RNG state.

        The state is sharded in the form that torch's distributed checkpoint expects. An
        engine without an optimizer leaves that out, and so reads the weights alone of
        what another one wrote.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state that torch's distributed checkpoint has filled.

        The checkpoint may have been written by any engine of this model.
        """

    @abstractmethod
    def place(self, *, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host". Idempotent.

        On a CPU both are the same memory. While either is on the host, no optimizer
        step may follow, so an engine may free its gradient buffers until both are on
        the device again.
        """

    @abstractmethod
    def export(self, path: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face directory with config, tokenizer and safetensors.

        Args:
            path: The directory to write.
            adapter: Write only the adapter, in the format of peft.

        Raises:
            EngineError: `adapter` is set and the engine has no adapter.
        """

    def close(self) -> None:  # noqa: B027 - few engines hold such resources
        """Release what a garbage collector would not. Idempotent."""


# --------------------------------------------------------------------- losses of a pass


class LossAccumulator:
    """Sums and maxima over one rank's response tokens, and the load of its experts.

    Numbers stay on the device until the last micro-batch of a pass is added; then they
    reach the host in one transfer. Rows that are excluded from the loss are excluded
    from its metrics too, whether they are NaN or not.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._expert_load: Tensor | None = None

    def add(
        self,
        loss: Tensor,
        token_loss: TokenLoss,
        weight: Tensor,
        expert_load: Tensor | None,
    ) -> None:
        """Add one micro-batch.

        Args:
            loss: Its aggregated loss, a scalar.
            token_loss: Its losses and metrics per token, [tokens].
            weight: The weight of each token in the loss, [tokens]. A token of weight 0
                does not count, whatever its values are.
            expert_load: Tokens routed to each expert, [layers, experts].
        """
        from verl_ray.algorithms.aggregation import weighted_sum

        counted = weight != 0

        def total(values: Tensor) -> Tensor:
            return values.detach().float().where(counted, 0.0).sum()

        sums = {"loss": loss.detach(), "tokens": counted.float().sum()}
        for name, values in token_loss.metrics.items():
            sums[name] = total(values)
        _add_to(self._sums, sums)

        terms = {
            name: weighted_sum(values.detach().float(), weight)
            for name, values in token_loss.terms.items()
        }
        _add_to(self._terms, terms)

        # An empty micro-batch has no maximum.
        if len(counted):
            self._add_maxima(token_loss.maxima, counted)

        if expert_load is not None:
            if self._expert_load is None:
                self._expert_load = expert_load
            else:
                self._expert_load = self._expert_load + expert_load

    def _add_maxima(self, maxima: dict[str, Tensor], counted: Tensor) -> None:
        for name, values in maxima.items():
            largest = values.detach().float().where(counted, 0.0).amax()
            if name in self._maxima:
                largest = self._maxima[name].maximum(largest)
            self._maxima[name] = largest

    def report(self) -> LossReport:
        """Transfer the totals to the host and return them.

        The report is empty if no micro-batch was added, which is the case on pipeline
        stages before the last.
        """
        import torch

        if not self._sums:
            return LossReport()

        scalars = chain(
            self._sums.values(), self._terms.values(), self._maxima.values()
        )
        columns = [torch.stack(list(scalars))]
        if self._expert_load is not None:
            columns.append(self._expert_load.flatten())

        # The only transfer from the device. The numbers are consumed in the order in
        # which they were concatenated.
        numbers = iter(torch.cat(columns).tolist())
        sums = {name: next(numbers) for name in self._sums}
        terms = {name: next(numbers) for name in self._terms}
        maxima = {name: next(numbers) for name in self._maxima}
        expert_load = None
        if self._expert_load is not None:
            expert_load = np.array(list(numbers)).reshape(self._expert_load.shape)

        return LossReport(
            tokens=round(sums.pop("tokens")),
            loss=sums.pop("loss"),
            sums=sums,
            maxima=maxima,
            expert_load=expert_load,
            terms=terms,
        )


def _add_to(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Add each value to the total of the same name, in place."""
    for name, value in values.items():
        if name in totals:
            totals[name] = totals[name] + value
        else:
            totals[name] = value
