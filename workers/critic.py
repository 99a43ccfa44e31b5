"""Critic: the expected reward of a response, estimated before each of its tokens.

Invariant: only `update` changes the weights.
"""

from __future__ import annotations

from verl_ray.columns.stages import Credit, Rollouts, Rows, TrainingBatch, Values
from verl_ray.data.token_versions import versions_of_tokens
from verl_ray.learning.objectives import ValueObjective
from verl_ray.ops.outputs import RequestedOutputs
from workers.model_worker import MiniBatch, ModelWorker, UpdateReport, loss_weights


class CriticWorker(ModelWorker):
    """One rank of the critic."""

    def compute_values(self, rows: Rows) -> Values:
        """Return the value before each response token, and after the last one."""
        outputs = self.engine.forward(rows, RequestedOutputs(values=True, scores=True))
        assert outputs.values is not None and outputs.scores is not None
        # A score is read at the last token of a row: it is the value after it.
        return Values(
            offsets=rows.offsets, values=outputs.values, final_value=outputs.scores
        )

    def update(
        self,
        rows: Rollouts,
        credit: Credit,
        values: Values,
        mini_batch: MiniBatch,
        objective: ValueObjective,
    ) -> UpdateReport:
        """Make one optimizer step on a mini-batch.

        `rows`, `credit` and `values` are those of this rank's rows.
        """
        # No loss is built from tokens that are too old.
        if mini_batch.ages is not None:
            mini_batch.ages.count(versions_of_tokens(rows))

        batch = TrainingBatch(
            offsets=rows.offsets,
            tokens=rows.tokens,
            response_mask=rows.response_mask,
            loss_weight=loss_weights(rows, credit, mini_batch),
            old_values=values.values,
            returns=credit.returns,
        )
        return self.learn(batch, objective)
