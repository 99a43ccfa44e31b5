"""Supervised training: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating: decoding greedily from a prompt gives the answer exactly
when every answer token is the most probable one after the answer tokens before it.
"""

from __future__ import annotations

import math

from controllers.trainers.supervised import SupervisedTrainer
from controllers.watch.measures import Metrics
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import TrainingBatch
from verl_ray.data.supervised import SupervisedSource
from workers.actor import ActorWorker
from workers.model_worker import UpdateReport


class SFTTrainer(SupervisedTrainer[ActorWorker]):
    """`enough`: the greedy accuracy at which training is finished; None = never."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        train: SupervisedSource,
        held_out: TrainingBatch | None,
        batch_size: int,
        max_skipped_steps: int,
        enough: float | None = None,
    ) -> None:
        super().__init__("actor", actor, train, held_out, batch_size, max_skipped_steps)
        self._enough = enough

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        return self.group.scatter(ActorWorker.train_supervised, rows)

    def step(self) -> Metrics:
        metrics = super().step()
        return metrics | {"train/perplexity": math.exp(min(metrics["train/loss"], 700))}

    def evaluate(self) -> Metrics:
        """Greedy accuracy on the held-out rows."""
        accuracy = self.accuracy()
        self.finished = self._enough is not None and accuracy >= self._enough
        return {"val-core/held_out/acc/mean@1": accuracy}

    def accuracy(self) -> float:
        """Greedy exact match on the held-out rows."""
        graded = self.group.scatter(ActorWorker.grade_supervised, self.held_out).result()
        return float(graded.row("score").mean())
