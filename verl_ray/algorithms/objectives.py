"""What a model is trained on, put together from the losses: one callable per kind of training.

Invariant: an objective maps per-token outputs to per-token losses; how they are weighted into one number is the rows'
`loss_weight`, so an objective knows neither micro-batches nor ranks. It sees nothing of rows that are not learned from
(`of_counted`). Deliberately not here: the losses themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from verl_ray.algorithms.catalogue import KL_ESTIMATORS, POLICY_LOSSES
from verl_ray.algorithms.correction import Weights, correct
from verl_ray.algorithms.losses import TokenLoss, bradley_terry, value_loss
from verl_ray.algorithms.mismatch import compare
from verl_ray.config.algorithm import AlgorithmConfig, ValueLossConfig
from verl_ray.ops.outputs import Outputs, TokenOutputs


@dataclass(frozen=True)
class LossInputs:
    """Columns of a TrainingBatch at the tokens that a loss looks at, float32 [read], or its rows; absent ones None."""

    row: Tensor  # int64: which row of the micro-batch each loss belongs to: [read], or [rows] for losses of scores
    margin: Tensor | None = None  # [rows]
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the TrainingBatch columns that losses read."""
        return tuple(f.name for f in fields(cls) if f.name != "row")


def of_counted(outputs: TokenOutputs, inputs: LossInputs, counted: Tensor) -> tuple[TokenOutputs, LossInputs]:
    """The same with zeros for whatever is not `counted`, bool [read] or, for losses of scores, [rows].

    Rows that are not learned from may hold NaN or infinities. A weight of 0 would not keep them out: 0 times NaN is
    NaN, and where a loss is computed from NaN, a gradient of 0 becomes NaN on its way back. Here the gradient of what
    does not count is exactly 0 before any loss is computed.
    """
    absent = ~counted

    def cleared(given: TokenOutputs | LossInputs, names: tuple[str, ...]) -> dict[str, Any]:
        tensors = {name: getattr(given, name) for name in names}
        return {name: one.masked_fill(absent, 0) for name, one in tensors.items() if one is not None}

    return (
        replace(outputs, **cleared(outputs, ("log_probs", "entropy", "greedy", "values", "scores"))),
        replace(inputs, **cleared(inputs, LossInputs.columns())),
    )


class Objective(Protocol):
    @property
    def outputs(self) -> Outputs:
        """What it needs of the model. With `scores`, it has a loss per row; otherwise one per response token."""

    @property
    def rows_per_unit(self) -> int:
        """Neighbouring rows that it compares, and that must be in one micro-batch; 1 = it looks at each by itself."""

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss: ...


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the objective needs {name}, which the rows or the model's outputs lack")
    return tensor


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss + kl_coefficient * KL(policy || reference) - entropy_coefficient * entropy, per token.

    Rows without `old_log_probs` are trained on-policy: the ratio is 1 and only its gradient matters
    (one update per batch makes the old log-probs equal to the fresh ones).

    With algorithm.correction, where w bounds the ratio to the sampler's policy mu:
    three_policy: w(pi_old / mu) * ppo_clip(pi / pi_old), the decoupled clipped objective of arXiv:2110.00641.
    two_policy: ppo_clip(pi / mu), of which w only says what is left out; or w(pi / mu) * reinforce.
    Entropy and divergence are not weighted, but a token that is left out has neither.
    """

    algorithm: AlgorithmConfig
    temperature: float
    kl_coefficient: float
    corrects: bool = True
    """False: algorithm.correction waits for algorithm.mismatch."""

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> Outputs:
        return Outputs(log_probs=True, entropy=True, temperature=self.temperature)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs, entropy = _given(outputs.log_probs, "log_probs"), _given(outputs.entropy, "entropy")
        found, kept = self._policy_loss(log_probs, inputs)
        loss = found.loss
        terms = {"actor/pg_loss": found.loss.detach(), "actor/entropy": entropy.detach()}

        if self.algorithm.entropy_coefficient:
            loss = loss - self.algorithm.entropy_coefficient * _only(entropy, kept)

        if self.algorithm.kl.place == "loss":
            estimator = self.algorithm.kl.estimator
            assert estimator is not None, "the configuration requires one where there is a place"
            reference = _given(inputs.ref_log_probs, "ref_log_probs")
            # Tokens that are left out are cleared first: at log-probs of -inf, k2 has a gradient of 0 times infinity.
            divergence = KL_ESTIMATORS[estimator].function(_only(log_probs, kept), _only(reference, kept))
            loss = loss + self.kl_coefficient * divergence
            terms["actor/kl_loss"] = divergence.detach()

        return TokenLoss(loss, found.metrics, found.maxima, terms)

    def _policy_loss(self, log_probs: Tensor, inputs: LossInputs) -> tuple[TokenLoss, Tensor | None]:
        """The loss of each token against its old policy, corrected, and which tokens are kept (None: all). How far the
        sampler is from the trainer is always told."""
        algorithm, correction = self.algorithm, self.algorithm.correction
        form = correction.form if self.corrects else "none"
        old, sampler = inputs.old_log_probs, inputs.rollout_log_probs
        if old is None:
            old = log_probs.detach()
        means: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        if sampler is not None:
            means, maxima = compare(old, sampler, inputs.row)
        weights: Weights | None = None
        if form != "none":
            sampler = _given(sampler, "rollout_log_probs")
            if correction.kind is not None:
                weights = correct(correction, (log_probs if form == "two_policy" else old) - sampler, inputs.row)
            if form == "two_policy":
                old = sampler
        declared = POLICY_LOSSES[algorithm.policy_loss]
        advantages = _given(inputs.advantages, "advantages")
        found: TokenLoss = declared.function(log_probs, old, advantages, **declared.settings(algorithm))
        loss = found.loss
        if weights is None:
            return TokenLoss(loss, found.metrics | means, maxima), None
        if form == "three_policy" or not declared.has_ratio:
            loss = loss * weights.weight
        metrics = found.metrics | means | weights.means
        return TokenLoss(_only(loss, weights.kept), metrics, maxima | weights.maxima), weights.kept


def _only(values: Tensor, kept: Tensor | None) -> Tensor:
    """The values of the tokens that are kept, 0 for the others (None: all are kept)."""
    return values if kept is None else values.where(kept, 0.0)


@dataclass(frozen=True)
class ValueObjective:
    """Squared error of the critic against the returns."""

    config: ValueLossConfig

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> Outputs:
        return Outputs(values=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        values = _given(outputs.values, "values")
        found = value_loss(
            values, _given(inputs.old_values, "old_values"), _given(inputs.returns, "returns"), clip=self.config.clip
        )
        return TokenLoss(
            found.loss,
            found.metrics | {"critic/vpred_mean": values.detach()},
            terms={"critic/vf_loss": found.loss.detach()},
        )


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of the response tokens."""

    rows_per_unit: ClassVar[int] = 1

    @property
    def outputs(self) -> Outputs:
        return Outputs(log_probs=True, greedy=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = _given(outputs.log_probs, "log_probs")
        greedy = _given(outputs.greedy, "greedy")
        return TokenLoss(-log_probs, {"train/loss": -log_probs.detach(), "train/token_accuracy": greedy.float()})


@dataclass(frozen=True)
class PreferenceObjective:
    """Bradley-Terry likelihood that the first row of each pair is preferred to the second; both rows bear the loss of
    their pair, so that a pair whose rows weigh w counts 2 w."""

    label_smoothing: float
    rows_per_unit: ClassVar[int] = 2

    @property
    def outputs(self) -> Outputs:
        return Outputs(scores=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        scores, margin = _given(outputs.scores, "scores"), _given(inputs.margin, "margin")
        found = bradley_terry(scores[0::2], scores[1::2], margin[0::2], label_smoothing=self.label_smoothing)
        metrics = {name: values.repeat_interleave(2) for name, values in found.metrics.items()}
        return TokenLoss(found.loss.repeat_interleave(2), metrics)
