"""Training objectives, assembled from losses: a callable per kind of training.

Invariant: an objective maps per-token outputs to per-token losses. The rows'
`loss_weight` decides how they are weighted into one number, so an objective knows
neither micro-batches nor ranks. It sees no values of rows that are not learned from
(`without_uncounted`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from verl_ray.algorithms.losses import TokenLoss, bradley_terry, value_loss
from verl_ray.config.algorithm import ValueLossConfig
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

# The driver makes objectives and sends them, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor

_OUTPUTS = ("log_probs", "entropy", "greedy", "values", "scores")
"""The outputs of a model that losses read."""


@dataclass(frozen=True)
class LossInputs:
    """Columns of a TrainingBatch at the selected tokens, or at its rows.

    They are float32 [selected] unless noted. A column that is absent is None.

    Attributes:
        row: int64, the row of the micro-batch that each loss belongs to: [selected], or
            [rows] for losses of scores.
        margin: float32 [rows].
        rollout_log_probs: Log-probs of the sampler.
        is_fresh: 1 where the token is of the policy version that learns, else 0.
        old_log_probs: Log-probs of the policy before the step.
        ref_log_probs: Log-probs of the reference.
        advantages: Advantages.
        old_values: Values of the critic before the step.
        returns: Targets of the critic.
        selected: 1 where the token was chosen from its mini-batch, else 0.
        uncertain: 1 where the token's entropy is among the largest of its mini-batch,
            else 0.
        nll_weight: Weight of the negative log-likelihood, beside the row's weight.
    """

    row: Tensor
    margin: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    is_fresh: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    selected: Tensor | None = None
    uncertain: Tensor | None = None
    nll_weight: Tensor | None = None

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the TrainingBatch columns that losses read."""
        return tuple(column.name for column in fields(cls) if column.name != "row")


def without_uncounted(
    outputs: TokenOutputs, inputs: LossInputs, counted: Tensor
) -> tuple[TokenOutputs, LossInputs]:
    """Replace everything that does not count by zeros.

    Rows that are not learned from may hold NaN or infinities. A weight of 0 would not
    keep them out: 0 times NaN is NaN, and where a loss is computed from NaN, a gradient
    of 0 becomes NaN on its way back. Here the gradient of a value that does not count
    is exactly 0 before any loss is computed.

    Args:
        outputs: Outputs of the model.
        inputs: Columns of the rows.
        counted: bool [selected] or, for losses of scores, [rows].
    """
    # `masked_fill` has a gradient of exactly 0 at the filled places.
    uncounted = ~counted
    cleared_outputs = _cleared(outputs, _OUTPUTS, uncounted)
    cleared_inputs = _cleared(inputs, LossInputs.columns(), uncounted)
    return replace(outputs, **cleared_outputs), replace(inputs, **cleared_inputs)


def _cleared(
    values: TokenOutputs | LossInputs, names: tuple[str, ...], mask: Tensor
) -> dict[str, Any]:
    """Return the tensors of these names with zeros where the mask is True."""
    cleared = {}
    for name in names:
        tensor = getattr(values, name)
        if tensor is not None:
            cleared[name] = tensor.masked_fill(mask, 0)
    return cleared


def required(tensor: Tensor | None, name: str) -> Tensor:
    """Return the tensor; raise ValueError if it is absent."""
    if tensor is None:
        raise ValueError(
            f"the objective needs {name}, which the rows or the model's outputs lack"
        )
    return tensor


class Objective(Protocol):
    """A training objective."""

    @property
    def outputs(self) -> RequestedOutputs:
        """The outputs of the model that it needs.

        If these are scores, it has a loss per row; otherwise one per response token.
        """

    @property
    def rows_per_unit(self) -> int:
        """Number of neighbouring rows that it compares.

        They must be in the same micro-batch. With 1, each row is independent.
        """

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss: ...


@dataclass(frozen=True)
class ValueObjective:
    """Squared error of the critic against the returns."""

    config: ValueLossConfig

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(values=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        values = required(outputs.values, "values")
        old_values = required(inputs.old_values, "old_values")
        returns = required(inputs.returns, "returns")

        error = value_loss(values, old_values, returns, clip=self.config.clip)
        return TokenLoss(
            error.loss,
            error.metrics | {"critic/vpred_mean": values.detach()},
            terms={"critic/vf_loss": error.loss.detach()},
        )


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of the response tokens."""

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(log_probs=True, greedy=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = required(outputs.log_probs, "log_probs")
        greedy = required(outputs.greedy, "greedy")
        metrics = {
            "train/loss": -log_probs.detach(),
            "train/token_accuracy": greedy.float(),
        }
        return TokenLoss(-log_probs, metrics)


@dataclass(frozen=True)
class PreferenceObjective:
    """Bradley-Terry likelihood that the first row of each pair is preferred.

    Both rows of a pair bear its loss, so a pair whose rows have weight w counts 2 w.
    """

    label_smoothing: float

    rows_per_unit: ClassVar[int] = 2

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(scores=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        scores = required(outputs.scores, "scores")
        margin = required(inputs.margin, "margin")

        # Rows alternate: the chosen response of a pair, then the rejected one.
        per_pair = bradley_terry(
            scores[0::2],
            scores[1::2],
            margin[0::2],
            label_smoothing=self.label_smoothing,
        )
        metrics = {
            name: values.repeat_interleave(2)
            for name, values in per_pair.metrics.items()
        }
        return TokenLoss(per_pair.loss.repeat_interleave(2), metrics)
