"""Training objectives, assembled from losses: a callable per kind of training.

Invariant: an objective maps outputs of a model to losses, one per token or per unit of
rows. The rows' `loss_weight` decides how they are weighted into one number, so
an objective knows neither micro-batches nor ranks. It sees no values of rows that are
not learned from (`without_uncounted`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from verl_ray.algorithms.losses import TokenLoss, bradley_terry, value_loss
from verl_ray.config.algorithm import ValueLossConfig
from verl_ray.config.distill import TeacherFileConfig
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

# The driver makes objectives and sends them, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "unit"]
"""What an objective has one loss for: a response token, or a unit of rows, which
`TrainingBatch.unit` names; without that each row is one."""

DISTILL_LOSS = "actor/distill_loss"
"""Metric: the divergence from the teacher that the loss has, over its top tokens."""

_OUTPUTS = (
    "log_probs",
    "entropy",
    "greedy",
    "values",
    "scores",
    "candidate_log_probs",
)
"""The outputs of a model that losses read."""

_ROW_COLUMNS = ("margin", "desirable", "ref_log_prob", "scores")
"""What has one value per row; all else has one per selected token."""


@dataclass(frozen=True)
class LossInputs:
    """Columns of a TrainingBatch at the selected tokens, or at its rows.

    They are float32 [selected] unless noted. A column that is absent is None.

    Attributes:
        row: int64, the row of the micro-batch that each output belongs to: [selected],
            or [rows] for scores.
        unit: int64 [rows], the unit of each row, from 0 and ascending; None where every
            row is one.
        margin: float32 [rows].
        desirable: bool [rows], labels of responses without partners.
        ref_log_prob: float64 [rows], log-probs of whole responses by the reference.
        rollout_log_probs: Log-probs of the sampler.
        is_fresh: 1 where the token is of the policy version that learns, else 0.
        old_log_probs: Log-probs of the policy before the step.
        ref_log_probs: Log-probs of the reference.
        teacher_log_probs: [selected, candidates], log-probs of the candidates by the
            teacher.
        advantages: Advantages.
        old_values: Values of the critic before the step.
        returns: Targets of the critic.
        selected: 1 where the token was chosen from its mini-batch, else 0.
        uncertain: 1 where the token's entropy is among the largest of its mini-batch,
            else 0.
        nll_weight: Weight of the negative log-likelihood, beside the row's weight.
    """

    row: Tensor
    unit: Tensor | None = None
    margin: Tensor | None = None
    desirable: Tensor | None = None
    ref_log_prob: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    is_fresh: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    selected: Tensor | None = None
    uncertain: Tensor | None = None
    nll_weight: Tensor | None = None

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the TrainingBatch columns that losses read."""
        own = ("row", "unit")
        return tuple(column.name for column in fields(cls) if column.name not in own)

    def with_units_as_rows(self) -> LossInputs:
        """Return inputs whose `row` is the unit of each output."""
        if self.unit is None:
            return self
        return replace(self, row=self.unit.index_select(0, self.row), unit=None)


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
        counted: bool [rows].
    """
    cleared_outputs = _cleared(outputs, _OUTPUTS, counted, inputs.row)
    cleared_inputs = _cleared(inputs, LossInputs.columns(), counted, inputs.row)
    return replace(outputs, **cleared_outputs), replace(inputs, **cleared_inputs)


def _cleared(
    values: TokenOutputs | LossInputs,
    names: tuple[str, ...],
    counted: Tensor,
    row: Tensor,
) -> dict[str, Any]:
    """Return the tensors of these names with zeros where rows do not count."""
    uncounted = ~counted
    at_tokens = uncounted.index_select(0, row)
    cleared = {}
    for name in names:
        tensor = getattr(values, name)
        if tensor is not None:
            mask = uncounted if name in _ROW_COLUMNS else at_tokens
            mask = mask.view(-1, *[1] * (tensor.dim() - 1))
            # The gradient is exactly 0 at the filled places.
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
        """The outputs of the model that it needs."""

    @property
    def level(self) -> Level:
        """Kind of thing that it has one loss for."""

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss: ...


@dataclass(frozen=True)
class ValueObjective:
    """Squared error of the critic against the returns."""

    config: ValueLossConfig

    level: ClassVar[Level] = "token"

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
    """Negative log-likelihood of the response tokens, or divergence from a teacher.

    Attributes:
        teacher: How the candidates of rows are compared with their teacher; None: rows
            have none.
    """

    teacher: TeacherFileConfig | None = None

    level: ClassVar[Level] = "token"

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
        declared = None if self.teacher is None else self.teacher.declared
        if declared is None:
            return TokenLoss(-log_probs, metrics)

        divergence = declared.over_candidates(
            required(outputs.candidate_log_probs, "candidate_log_probs"),
            required(inputs.teacher_log_probs, "teacher_log_probs"),
            self.teacher,
        )
        return TokenLoss(divergence, metrics, terms={DISTILL_LOSS: divergence.detach()})


@dataclass(frozen=True)
class PreferenceObjective:
    """Bradley-Terry likelihood that the first row of each pair is preferred."""

    label_smoothing: float

    level: ClassVar[Level] = "unit"

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(scores=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        scores = required(outputs.scores, "scores")
        margin = required(inputs.margin, "margin")
        required(inputs.unit, "unit")

        # Rows alternate: the chosen response of a pair, then the rejected one.
        return bradley_terry(
            scores[0::2],
            scores[1::2],
            margin[0::2],
            label_smoothing=self.label_smoothing,
        )
