"""Training objectives, assembled from losses: a callable per kind of training.

Invariant: an objective maps per-token outputs to per-token losses. The rows'
`loss_weight` decides how they are weighted into one number, so an objective knows
neither micro-batches nor ranks. It sees no values of rows that are not learned from
(`without_uncounted`). Deliberately not here: the losses themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from verl_ray.algorithms.catalogue import KL_ESTIMATORS, POLICY_LOSSES
from verl_ray.algorithms.correction import CorrectionWeights, correction_weights
from verl_ray.algorithms.losses import TokenLoss, bradley_terry, value_loss
from verl_ray.algorithms.mismatch import compare_log_probs
from verl_ray.config.algorithm import AlgorithmConfig, ValueLossConfig
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

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
        old_log_probs: Log-probs of the policy before the step.
        ref_log_probs: Log-probs of the reference.
        advantages: Advantages.
        old_values: Values of the critic before the step.
        returns: Targets of the critic.
    """

    row: Tensor
    margin: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

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


def _required(tensor: Tensor | None, name: str) -> Tensor:
    """Return the tensor; raise ValueError if it is absent."""
    if tensor is None:
        raise ValueError(
            f"the objective needs {name}, which the rows or the model's outputs lack"
        )
    return tensor


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values with 0 where the mask is False; None: the mask is all True."""
    if mask is None:
        return values
    return values.where(mask, 0.0)


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
class PolicyObjective:
    """Policy loss, divergence from the reference, and entropy bonus.

    Per token: policy loss + kl_coefficient * KL(policy || reference) -
    entropy_coefficient * entropy.

    Rows without `old_log_probs` are trained on-policy: the ratio is 1 and only its
    gradient matters (one update per batch makes the old log-probs equal to the fresh
    ones).

    With algorithm.correction, where w bounds the ratio to the sampler's policy mu:
    three_policy: w(pi_old / mu) * ppo_clip(pi / pi_old), the decoupled clipped
    objective of arXiv:2110.00641. two_policy: ppo_clip(pi / mu), for which w only
    decides which tokens are left out; or w(pi / mu) * reinforce. Entropy and divergence
    are not weighted, but a token that is left out has neither.

    Attributes:
        algorithm: The section `algorithm` of the configuration.
        temperature: The temperature of sampling.
        kl_coefficient: The present cost of a nat of divergence.
        corrects: False: algorithm.correction waits for algorithm.mismatch.
    """

    algorithm: AlgorithmConfig
    temperature: float
    kl_coefficient: float
    corrects: bool = True

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(
            log_probs=True, entropy=True, temperature=self.temperature
        )

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = _required(outputs.log_probs, "log_probs")
        entropy = _required(outputs.entropy, "entropy")

        policy_loss, mask = self._policy_loss(log_probs, inputs)
        loss = policy_loss.loss
        terms = {"actor/pg_loss": loss.detach(), "actor/entropy": entropy.detach()}

        if self.algorithm.entropy_coefficient:
            loss = loss - self.algorithm.entropy_coefficient * _masked(entropy, mask)

        if self.algorithm.kl.place == "loss":
            divergence = self._divergence(log_probs, inputs, mask)
            loss = loss + self.kl_coefficient * divergence
            terms["actor/kl_loss"] = divergence.detach()

        return TokenLoss(loss, policy_loss.metrics, policy_loss.maxima, terms)

    def _policy_loss(
        self, log_probs: Tensor, inputs: LossInputs
    ) -> tuple[TokenLoss, Tensor | None]:
        """Return the loss of each token against its old policy, corrected.

        Its metrics always include the mismatch of sampler and trainer, if the rows have
        the sampler's log-probs.

        Returns:
            The loss, and a mask of the tokens that bear terms of the loss; None if all
            of them do.
        """
        old = inputs.old_log_probs
        if old is None:
            old = log_probs.detach()

        means: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        if inputs.rollout_log_probs is not None:
            means, maxima = compare_log_probs(old, inputs.rollout_log_probs, inputs.row)

        form = self.algorithm.correction.form if self.corrects else "none"
        weights = self._correction(form, log_probs, old, inputs)
        if form == "two_policy":
            # The sampler's policy takes the place of the old one.
            old = _required(inputs.rollout_log_probs, "rollout_log_probs")

        choice = POLICY_LOSSES[self.algorithm.policy_loss]
        advantages = _required(inputs.advantages, "advantages")
        uncorrected: TokenLoss = choice.function(
            log_probs, old, advantages, **choice.settings(self.algorithm)
        )
        loss = uncorrected.loss
        metrics = uncorrected.metrics | means
        if weights is None:
            return TokenLoss(loss, metrics, maxima), None

        # A two-policy loss with a ratio weights the tokens by itself.
        if form == "three_policy" or not choice.has_ratio:
            loss = loss * weights.weight
        corrected = TokenLoss(
            _masked(loss, weights.mask),
            metrics | weights.means,
            maxima | weights.maxima,
        )
        return corrected, weights.mask

    def _correction(
        self, form: str, log_probs: Tensor, old: Tensor, inputs: LossInputs
    ) -> CorrectionWeights | None:
        """Return the weights of the correction; None if there is none.

        Args:
            form: The form of the correction.
            log_probs: Log-probs of the policy that learns.
            old: Log-probs of the old policy.
            inputs: Columns of the rows.
        """
        if form == "none":
            return None

        sampler = _required(inputs.rollout_log_probs, "rollout_log_probs")
        config = self.algorithm.correction
        if config.kind is None:
            return None

        # The policy to correct towards.
        target = log_probs if form == "two_policy" else old
        return correction_weights(config, target - sampler, inputs.row)

    def _divergence(
        self, log_probs: Tensor, inputs: LossInputs, mask: Tensor | None
    ) -> Tensor:
        """Return the divergence from the reference, 0 where the mask is False."""
        estimator = self.algorithm.kl.estimator
        assert estimator is not None, (
            "the configuration requires one where there is a place"
        )
        reference = _required(inputs.ref_log_probs, "ref_log_probs")
        # Tokens that are left out are cleared before: at log-probs of -inf, k2 has a
        # gradient of 0 times infinity.
        divergence: Tensor = KL_ESTIMATORS[estimator].function(
            _masked(log_probs, mask), _masked(reference, mask)
        )
        return divergence


@dataclass(frozen=True)
class ValueObjective:
    """Squared error of the critic against the returns."""

    config: ValueLossConfig

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(values=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        values = _required(outputs.values, "values")
        old_values = _required(inputs.old_values, "old_values")
        returns = _required(inputs.returns, "returns")

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
        log_probs = _required(outputs.log_probs, "log_probs")
        greedy = _required(outputs.greedy, "greedy")
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
        scores = _required(outputs.scores, "scores")
        margin = _required(inputs.margin, "margin")

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
