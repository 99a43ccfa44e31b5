"""The objective of the policy: its loss, corrected, with divergence and entropy.

Invariant: that of `objectives.py`. What the objective needs of a whole mini-batch
(`select_tokens`, `mean_weight`) is the same on all ranks, and a constant for the
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from verl_ray.algorithms.catalogue import KL_ESTIMATORS
from verl_ray.algorithms.losses import (
    MAX_LOG_RATIO,
    PolicyTokens,
    TokenLoss,
    importance_ratio,
)
from verl_ray.algorithms.mismatch import compare_log_probs, fresh_means
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.token_selection import (
    SelectableTokens,
    largest_entropy,
    random_of_tokens,
)
from verl_ray.columns.stages import Bool, Credit, Float32, LogProbs, Rollouts
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.distill import DistillConfig
from verl_ray.errors import DataError
from verl_ray.learning.coefficients import ENTROPY_PER_TOKEN
from verl_ray.learning.correction_weights import (
    BATCH_MEAN,
    CORRECTION_PREFIX,
    CorrectionWeights,
    correction_weights,
)
from verl_ray.learning.objectives import DISTILL_LOSS, Level, LossInputs, required
from verl_ray.ops.kl import with_gradient_of_k2
from verl_ray.ops.order_statistics import Total
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.ops.rows import row_lengths, row_sums

TEACHER_KL = "distill/kl"
"""Metric: log p_S - log p_T of sampled tokens. The mean is the divergence per token."""

# The driver makes objectives and sends them, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values with 0 where the mask is False; None: the mask is all True."""
    if mask is None:
        return values
    return values.where(mask, 0.0)


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, divergence from the reference or a teacher, and entropy bonus.

    Per token: policy loss + kl_coefficient * KL(policy || reference) -
    entropy_coefficient * entropy + distill.weight * divergence from the teacher, unless
    that is an advantage of the policy loss.

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
        entropy_coefficient: The present weight of the entropy; None takes that of the
            configuration.
        mean_weight: What the weights of the correction are divided by: with
            algorithm.correction.normalise, their mean over the mini-batch.
        distill: What the policy learns from the reference, its teacher; None = nothing.
    """

    algorithm: AlgorithmConfig
    temperature: float
    kl_coefficient: float
    corrects: bool = True
    entropy_coefficient: float | None = None
    mean_weight: float = 1.0
    distill: DistillConfig | None = None

    level: ClassVar[Level] = "token"

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(
            log_probs=True, entropy=True, temperature=self.temperature
        )

    @property
    def normalises(self) -> bool:
        """Whether weights are divided by their mean, which the mini-batch decides."""
        return self.corrects and self.algorithm.correction.normalise

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        # A trajectory of several rows is judged as one.
        inputs = inputs.with_units_as_rows()
        log_probs = required(outputs.log_probs, "log_probs")
        entropy = required(outputs.entropy, "entropy")

        policy_loss, mask = self._policy_loss(log_probs, inputs)
        loss = policy_loss.loss
        terms = {"actor/pg_loss": loss.detach(), "actor/entropy": entropy.detach()}

        bonus = self.entropy_coefficient
        if bonus is None:
            bonus = self.algorithm.entropy_coefficient
        if bonus:
            loss = loss - bonus * _masked(entropy, mask)

        if inputs.nll_weight is not None:
            # VAPO (arXiv:2504.05118, eq. 8).
            likelihood = -inputs.nll_weight * _masked(log_probs, mask)
            loss = loss + likelihood
            terms["actor/positive_nll"] = likelihood.detach()

        if self.distill is not None and self.distill.num_top:
            divergence = self._teacher_divergence(self.distill, outputs, inputs)
            divergence = _masked(divergence, mask)
            loss = loss + self.distill.weight * divergence
            terms[DISTILL_LOSS] = divergence.detach()

        metrics = policy_loss.metrics | {ENTROPY_PER_TOKEN: entropy.detach()}
        if self.algorithm.kl.place == "loss":
            divergence, is_bounded = self._divergence(log_probs, inputs, mask)
            loss = loss + self.kl_coefficient * divergence
            terms["actor/kl_loss"] = divergence.detach()
            if is_bounded is not None:
                metrics = metrics | {"actor/kl_clipfrac": is_bounded}

        return TokenLoss(loss, metrics, policy_loss.maxima, terms)

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
            if inputs.is_fresh is not None:
                means |= fresh_means(means, inputs.is_fresh)

        form = self.algorithm.correction.form if self.corrects else "none"
        weights = self._correction(form, log_probs, old, inputs)
        # In the two-policy form the sampler's policy takes the place of the old one.
        old = self._old_policy(old, inputs)

        uncorrected = self._uncorrected_loss(log_probs, old, inputs)
        loss, metrics = uncorrected.loss, uncorrected.metrics | means
        if weights is None:
            return TokenLoss(loss, metrics, maxima), None

        # A two-policy loss with a ratio weights the tokens by itself.
        has_ratio = POLICY_LOSSES[self.algorithm.policy_loss].has_ratio
        if form == "three_policy" or not has_ratio:
            loss = loss * (weights.weight / self.mean_weight)
        if self.normalises:
            batch_weights = weights.weight.new_full(
                weights.weight.shape, self.mean_weight
            )
            metrics[f"{CORRECTION_PREFIX}{BATCH_MEAN}"] = batch_weights
        corrected = TokenLoss(
            _masked(loss, weights.mask),
            metrics | weights.means,
            maxima | weights.maxima,
        )
        return corrected, weights.mask

    def _uncorrected_loss(
        self, log_probs: Tensor, old: Tensor, inputs: LossInputs
    ) -> TokenLoss:
        """Return the loss of each token against the policy of `old`."""
        advantages = required(inputs.advantages, "advantages")
        metrics: dict[str, Tensor] = {}
        if self.distill is not None:
            # Its mean is the divergence of the policy that sampled from the teacher.
            gap = old - required(inputs.ref_log_probs, "ref_log_probs")
            metrics[TEACHER_KL] = gap
            # Other divergences are a term of the loss.
            if not self.distill.num_top:
                advantages = advantages - self.distill.weight * gap
                inputs = replace(inputs, advantages=advantages)

        choice = POLICY_LOSSES[self.algorithm.policy_loss]
        uncorrected: TokenLoss = choice.function(
            PolicyTokens(log_probs, old, advantages, inputs.row, inputs.selected),
            **choice.settings(self.algorithm),
        )
        loss, metrics = uncorrected.loss, uncorrected.metrics | metrics
        if choice.has_ratio:
            is_held = (log_probs.detach() - old).abs() > MAX_LOG_RATIO
            metrics["actor/log_ratio_clipfrac"] = is_held.float()

        is_passed_over = self._passed_over(log_probs.detach(), inputs)
        if is_passed_over is not None:
            loss = loss.masked_fill(is_passed_over, 0.0)
            metrics["actor/passed_over"] = is_passed_over.float()
        return TokenLoss(loss, metrics)

    def _teacher_divergence(
        self, distill: DistillConfig, outputs: TokenOutputs, inputs: LossInputs
    ) -> Tensor:
        """Return the divergence from the teacher at each token, float32 [selected]."""
        student = required(outputs.candidate_log_probs, "candidate_log_probs")
        teacher = required(inputs.teacher_log_probs, "teacher_log_probs")
        return distill.declared.over_candidates(student, teacher, distill)

    def _passed_over(self, log_probs: Tensor, inputs: LossInputs) -> Tensor | None:
        """Return where a token does not bear the policy loss, bool [T]; None: nowhere.

        Args:
            log_probs: Detached log-probs of the policy that learns.
            inputs: Columns of the rows.
        """
        limit = self.algorithm.negative_drift
        if limit is None:
            return None if inputs.uncertain is None else inputs.uncertain == 0

        # DeepSeek-V3.2 (arXiv:2512.02556), off-policy sequence masking.
        sampler = required(inputs.rollout_log_probs, "rollout_log_probs")
        drift = row_sums(sampler - log_probs, inputs.row) / row_lengths(inputs.row)
        advantages = required(inputs.advantages, "advantages")
        has_drifted = (advantages < 0) & (drift > limit)
        if inputs.uncertain is None:
            return has_drifted
        return has_drifted | (inputs.uncertain == 0)

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

        sampler = required(inputs.rollout_log_probs, "rollout_log_probs")
        # The policy to correct towards.
        target = log_probs if form == "two_policy" else old
        correction = self.algorithm.correction
        return correction_weights(correction, target - sampler, inputs.row)

    def _divergence(
        self, log_probs: Tensor, inputs: LossInputs, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the divergence from the reference, 0 where the mask is False.

        With algorithm.kl.importance_weighted it is r times the estimate, r the ratio to
        the old policy, and its gradient is r times that of k2. For tokens of the old
        policy this is the expected gradient of KL(policy || reference), whatever the
        estimator and its bound. It is also that of r * k3, differentiated in both
        factors (DeepSeek-V3.2, arXiv:2512.02556): the gradient of r * k3 is r * (log p
        - log q) times that of log p. Deviation: where an estimate is bounded, the value
        is, and the gradient is not.

        Returns:
            The divergence, and where the estimator's bound stands for a larger one;
            None if it has no bound.
        """
        kl = self.algorithm.kl
        assert kl.estimator is not None, (
            "the configuration requires one where there is a place"
        )
        estimator = KL_ESTIMATORS[kl.estimator]
        reference = required(inputs.ref_log_probs, "ref_log_probs")
        # Tokens that are left out are cleared before: at log-probs of -inf, k2 has a
        # gradient of 0 times infinity.
        log_probs = _masked(log_probs, mask)
        reference = _masked(reference, mask)
        divergence: Tensor = estimator.function(log_probs, reference)

        is_bounded = None
        if estimator.bound is not None:
            is_bounded = (divergence.detach() >= estimator.bound).float()
        if kl.importance_weighted:
            old = _masked(self._old_policy(log_probs.detach(), inputs), mask)
            ratio = importance_ratio(log_probs.detach(), old)
            divergence = ratio * with_gradient_of_k2(divergence, log_probs, reference)
        return divergence, is_bounded

    def _old_policy(self, fresh: Tensor, inputs: LossInputs) -> Tensor:
        """Return the log-probs of the policy that the loss compares with.

        Args:
            fresh: Detached log-probs of the policy that learns.
            inputs: Columns of the rows.
        """
        if self.corrects and self.algorithm.correction.form == "two_policy":
            return required(inputs.rollout_log_probs, "rollout_log_probs")
        return fresh if inputs.old_log_probs is None else inputs.old_log_probs


# ------------------------------------------------------------- of the whole mini-batch

# Which tokens the loss treats apart, and what the weights of a correction are divided
# by, is decided before a mini-batch is learned from: from log-probs of before the step,
# so that it depends on neither micro-batches nor ranks.


@dataclass(frozen=True)
class Selections:
    """Columns of a TrainingBatch, float32 [tokens], 1 or 0 each.

    Attributes:
        selected: The tokens that the policy loss treats apart; None if it chooses none.
        uncertain: Those of the largest entropy; None if all bear the policy loss.
    """

    selected: Float32 | None = None
    uncertain: Float32 | None = None


def select_tokens(
    algorithm: AlgorithmConfig,
    rows: Rollouts,
    credit: Credit,
    advantages: Float32,
    old: LogProbs | None,
    seed: Sequence[int],
    total: Total,
) -> Selections:
    """Return where the policy loss treats tokens apart.

    Every rank has to call this.

    Args:
        algorithm: The section `algorithm` of the configuration.
        rows: This rank's rows of the mini-batch.
        credit: Their credit.
        advantages: float32 [tokens], as the loss sees them.
        old: Log-probs of the policy before the step.
        seed: Numbers that name the mini-batch.
        total: Sums an array over all ranks.

    Raises:
        DataError: The old log-probs are missing.
    """
    if not algorithm.chooses_tokens:
        return Selections()
    if old is None:
        raise DataError(
            f"{algorithm.policy_loss} or algorithm.entropy_share chooses tokens by what"
            " the policy before the step says of them, which was not computed"
        )

    places = np.flatnonzero(rows.response_mask & credit.in_loss[rows.row_of_token])
    row = rows.row_of_token[places]
    position = places - rows.offsets[row]
    tokens = SelectableTokens(
        advantages[places],
        old.log_probs[places],
        rows.rollout_log_probs[places],
        None if old.entropy is None else old.entropy[places],
        random_of_tokens(seed, rows.row_id[row], position),
        total,
    )

    def column(chosen: Bool) -> Float32:
        values = np.zeros(rows.num_tokens, np.float32)
        values[places] = chosen
        return values

    selected = uncertain = None
    choice = POLICY_LOSSES[algorithm.policy_loss]
    if choice.selection is not None:
        settings = choice.selection_settings(algorithm)
        selected = column(choice.selection(tokens, **settings))
    if algorithm.entropy_share is not None:
        uncertain = column(largest_entropy(tokens, share=algorithm.entropy_share))
    return Selections(selected, uncertain)


def mean_weight(
    algorithm: AlgorithmConfig,
    rows: Rollouts,
    credit: Credit,
    old: LogProbs | None,
    total: Total,
) -> float:
    """Return the mean weight of a mini-batch; 1 where all weights are 0.

    It is the mean over the tokens that are learned from, or over the sequences if the
    ratio is one of sequences. A token that the kind of correction leaves out has the
    weight 0 and counts; what rejections leave out besides changes nothing. Collective.

    Weights that are divided by it have the mean 1, so that a correction changes which
    tokens count and not how much all of them do together.

    Source: `rollout_is_batch_normalize` of verl, which also divides by the mean after
    truncation: self-normalised importance sampling. Deviation: there the mean is one
    of all rows at hand when weights are computed; here it is that of each mini-batch.

    Args:
        algorithm: The section `algorithm` of the configuration.
        rows: This rank's rows of the mini-batch.
        credit: Their credit.
        old: Log-probs of the policy before the step.
        total: Sums an array over all ranks.

    Raises:
        DataError: The old log-probs are missing.
    """
    import torch

    if old is None:
        raise DataError(
            "algorithm.correction.normalise needs the log-probs of the policy before"
            " the step, which were not computed"
        )

    places = np.flatnonzero(rows.response_mask & credit.in_loss[rows.row_of_token])
    sequence = rows.row_of_token[places]
    if algorithm.judges_trajectories:
        # The tokens of a sequence are neighbours.
        sequence = rows.trajectory_id[sequence]
        order = np.argsort(sequence, kind="stable")
        places, sequence = places[order], sequence[order]
    log_ratio = old.log_probs[places] - rows.rollout_log_probs[places]
    weights = correction_weights(
        algorithm.correction.model_copy(update={"rejections": None}),
        torch.from_numpy(log_ratio),
        torch.from_numpy(sequence),
    )
    assert weights is not None, "the configuration requires a kind"

    # The share of a token in its sequence, or 1 if every token has a ratio of its own.
    share = weights.means[f"{CORRECTION_PREFIX}share"].double()
    own = [(share * weights.weight.double()).sum(), share.sum()]
    weight_sum, count = total(np.array([float(value) for value in own]))
    mean = weight_sum / count if count else 0.0
    # Not `<= 0`, which would hide a ratio that is NaN.
    return 1.0 if mean == 0 else float(mean)
