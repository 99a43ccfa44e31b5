"""The objective of a policy on preferences: one loss per pair of responses.

Invariant: log-probs of responses are summed in float64, so that the loss depends on
neither the packing nor the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.preference_losses import Pairs
from verl_ray.config.preference import PreferenceLossConfig
from verl_ray.learning.objectives import Level, LossInputs, required
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

# The driver makes objectives and sends them, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyPreferenceObjective:
    """A loss on the log-probs of both responses of a pair.

    Rows alternate: the chosen response of a pair, then the rejected one.
    """

    config: PreferenceLossConfig

    level: ClassVar[Level] = "unit"

    @property
    def outputs(self) -> RequestedOutputs:
        return RequestedOutputs(log_probs=True)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        log_probs = required(outputs.log_probs, "log_probs")
        unit = required(inputs.unit, "unit")
        loss = self.config.declared

        def row_sums(values: Tensor) -> Tensor:
            sums = values.new_zeros(len(unit))
            return sums.index_add(0, inputs.row, values)

        sums = row_sums(log_probs.double())
        tokens = row_sums(sums.new_ones(len(log_probs)))
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
        return TokenLoss(per_pair.float(), self._metrics(pairs), terms=terms)

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
