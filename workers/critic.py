"""The critic: what a response is worth from each of its tokens on."""

from __future__ import annotations

from verl_ray.algorithms.objectives import ValueObjective
from verl_ray.data.stages import Credit, Rollouts, Rows, TrainingBatch, Values
from verl_ray.ops.outputs import Outputs
from workers.model_worker import MiniBatch, ModelWorker, UpdateReport, loss_weights


class CriticWorker(ModelWorker):
    def compute_values(self, rows: Rows) -> Values:
        """The value before each response token, and after the last one."""
        found = self.engine.forward(rows, Outputs(values=True, scores=True))
        assert found.values is not None and found.scores is not None
        return Values(offsets=rows.offsets, values=found.values, final_value=found.scores)

    def update(
        self, rows: Rollouts, credit: Credit, values: Values, mini_batch: MiniBatch, objective: ValueObjective
    ) -> UpdateReport:
        """One optimizer step on a mini-batch of which these are this rank's rows."""
        batch = TrainingBatch(
            offsets=rows.offsets,
            tokens=rows.tokens,
            response_mask=rows.response_mask,
            loss_weight=loss_weights(rows, credit, mini_batch),
            old_values=values.values,
            returns=credit.returns,
        )
        return self.learn(batch, objective)
