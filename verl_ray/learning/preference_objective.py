"""Objectives of a policy on preferences: one loss per pair, or per response.

Invariant: log-probs of responses are summed in float64, so that the loss depends on
neither the packing nor the order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.mismatch import compare_log_probs, fresh_means, of_units
from verl_ray.algorithms.preference_losses import LabelledResponses, Pairs
from verl_ray.config.preference import PreferenceLossConfig
from verl_ray.learning.objectives import Level, LossInputs, required
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

# The driver makes objectives and sends them, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor

LABEL_PREFIX = "label/"
"""Prefix of what `label_metrics` makes metrics of."""


@dataclass(frozen=True)
class PolicyPreferenceObjective:
    """A loss on the log-probs of both responses of a pair.

    Rows alternate: the chosen response of a pair, then the rejected one. Where they
    have log-probs of a sampler, the mismatch with it is reported as well.

    Attributes:
        config: The loss, with its settings.
        temperature: The temperature of all log-probs.
    """

    config: PreferenceLossConfig
    temperature: float = 1.0

    level: ClassVar[Level] = "unit"

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(log_probs=True, temperature=self.temperature)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = required(outputs.log_probs, "log_probs")
        unit = required(inputs.unit, "unit")
        loss = self.config.declared

        sums = _row_sums(log_probs.double(), inputs, len(unit))
        tokens = _row_sums(sums.new_ones(len(log_probs)), inputs, len(unit))
        reference = sums.new_zeros(len(unit))
        if loss.has_reference:
            reference = required(inputs.ref_log_prob, "ref_log_prob")
        pairs = Pairs(
            *(sums[0::2], sums[1::2]),
            *(reference[0::2], reference[1::2]),
            *(tokens[0::2], tokens[1::2]),
        )

        per_pair = loss.function(pairs, **loss.settings(self.config))
        terms = {}
        if self.config.rpo_alpha is not None:
            likelihood = -pairs.chosen / pairs.chosen_tokens
            per_pair = per_pair + self.config.rpo_alpha * likelihood
            terms["actor/nll_loss"] = likelihood.detach().float()
        means, maxima = self._mismatch(log_probs, inputs, len(per_pair))
        metrics = self._metrics(pairs) | means
        return TokenLoss(per_pair.float(), metrics, maxima, terms)

    @staticmethod
    def _mismatch(
        log_probs: Tensor, inputs: LossInputs, num_pairs: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what metrics of the mismatch are made of, float32 [pairs] by name."""
        if inputs.rollout_log_probs is None:
            return {}, {}
        means, maxima = compare_log_probs(
            log_probs, inputs.rollout_log_probs, inputs.row
        )
        if inputs.is_fresh is not None:
            means |= fresh_means(means, inputs.is_fresh)
        unit = required(inputs.unit, "unit").index_select(0, inputs.row)
        return of_units(means, maxima, unit, num_pairs)

    def _metrics(self, pairs: Pairs) -> dict[str, Tensor]:
        """Return the implicit rewards and the log-probs, float32 [pairs] by name.

        Names and meanings are those of TRL's DPOTrainer.
        """
        reward = self.config.implicit_reward
        chosen = reward(pairs.chosen_ratio.detach(), pairs.chosen_tokens)
        rejected = reward(pairs.rejected_ratio.detach(), pairs.rejected_tokens)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": chosen > rejected,
            "rewards/margins": chosen - rejected,
            "logps/chosen": pairs.chosen.detach(),
            "logps/rejected": pairs.rejected.detach(),
        }
        return {name: values.float() for name, values in metrics.items()}


@dataclass(frozen=True)
class UnpairedPreferenceObjective:
    """A loss on the log-prob of each response, by its label.

    Attributes:
        config: The loss.
        kl: Estimate of the divergence of the policy from the reference, at least 0, of
            the mini-batch that is learned from; None before there is one.
    """

    config: PreferenceLossConfig
    kl: float | None = None

    level: ClassVar[Level] = "unit"

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(log_probs=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = required(outputs.log_probs, "log_probs")
        is_desirable = required(inputs.desirable, "desirable")
        loss = self.config.declared
        if loss.needs_kl and self.kl is None:
            raise ValueError(f"{loss.name} needs kl, which the mini-batch has none of")

        responses = LabelledResponses(
            _row_sums(log_probs.double(), inputs, len(is_desirable)),
            required(inputs.ref_log_prob, "ref_log_prob"),
            is_desirable,
            self.kl or 0.0,
        )
        losses = loss.function(responses, **loss.settings(self.config))
        return TokenLoss(losses.float(), self._metrics(responses))

    def _metrics(self, responses: LabelledResponses) -> dict[str, Tensor]:
        """Return what `label_metrics` reads, and kl, float32 [responses] by name."""
        log_prob = responses.log_prob.detach()
        # The scale of a reward that compares with the reference needs no length.
        reward = self.config.implicit_reward(responses.log_ratio.detach(), None)
        metrics = {}
        for label, has_label in (
            ("chosen", responses.is_desirable),
            ("rejected", ~responses.is_desirable),
        ):
            prefix = f"{LABEL_PREFIX}{label}"
            metrics[prefix] = has_label.float()
            metrics[f"{prefix}/rewards"] = (reward * has_label).float()
            metrics[f"{prefix}/logps"] = (log_prob * has_label).float()
        if self.kl is not None:
            metrics["kl"] = log_prob.new_full(log_prob.shape, self.kl).float()
        return metrics


def label_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return means over the responses of one label, under the names of TRL.

    A label that no response of the step has is left out, and so is the margin then.

    Args:
        means: Means over all responses, of an `UnpairedPreferenceObjective` or another.
    """
    metrics = {}
    for label in ("chosen", "rejected"):
        prefix = f"{LABEL_PREFIX}{label}"
        share = means.get(prefix, 0.0)
        if share:
            for name in ("rewards", "logps"):
                metrics[f"{name}/{label}"] = means[f"{prefix}/{name}"] / share

    if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        chosen, rejected = metrics["rewards/chosen"], metrics["rewards/rejected"]
        metrics["rewards/margins"] = chosen - rejected
    return metrics


def _row_sums(values: Tensor, inputs: LossInputs, num_rows: int) -> Tensor:
    """Return the sum of each row's values, [rows]."""
    return values.new_zeros(num_rows).index_add(0, inputs.row, values)
