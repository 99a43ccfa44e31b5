"""Training a reward model on preferences: pairs of rows of which the first should score higher.

Invariant: the rows of a pair go to one rank, so that its loss sees both. Deliberately not here: scoring rollouts,
which is the reward role's part in `reinforcement.py`.
"""

from __future__ import annotations

import numpy as np

from controllers.trainers.supervised import SupervisedTrainer
from controllers.watch import measures
from controllers.watch.measures import Metrics
from verl_ray.algorithms.objectives import PreferenceObjective
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.data.packing import lengths_of_units, rows_of_units
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import TrainingBatch
from workers.model_worker import UpdateReport
from workers.reward_model import RewardModelWorker


class PreferenceTrainer(SupervisedTrainer[RewardModelWorker]):
    def __init__(
        self,
        reward: WorkerGroup[RewardModelWorker],
        train: PreferenceSource | None,
        held_out: TrainingBatch | None,
        batch_size: int,
        max_skipped_steps: int,
        objective: PreferenceObjective,
    ) -> None:
        super().__init__("reward", reward, train, held_out, batch_size, max_skipped_steps)
        self._objective = objective

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        pair = self._objective.rows_per_unit
        shares = self.group.deal(lengths_of_units(rows.lengths, pair))
        assignment = [rows_of_units(share, pair) for share in shares]
        return self.group.scatter(RewardModelWorker.train_preferences, rows, self._objective, assignment=assignment)

    def evaluate(self) -> Metrics:
        """Pair accuracy, calibration and reward statistics on the held-out pairs."""
        scores = self.group.scatter(RewardModelWorker.compute_scores, self.held_out).result().row("score")
        return measures.of_preferences(scores[0::2].astype(np.float64), scores[1::2].astype(np.float64))
