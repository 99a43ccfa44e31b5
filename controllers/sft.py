"""Supervised training, one step after another: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating: decoding greedily from a prompt gives the answer exactly
when every answer token is the most probable one after the answer tokens before it.
"""

from __future__ import annotations

import math
from typing import Any

from controllers import measures
from controllers.measures import Metrics
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.store import put
from verl_ray.data.stages import TrainingBatch
from verl_ray.data.supervised import SupervisedSource
from verl_ray.profiling.timers import Timers
from workers.actor import ActorWorker


class SupervisedTrainer:
    def __init__(
        self, actor: WorkerGroup[ActorWorker], train: SupervisedSource, held_out: TrainingBatch | None, batch_size: int
    ) -> None:
        self._actor, self._train, self._batch_size = actor, train, batch_size
        self._held_out = None if held_out is None else put(held_out)
        self.timers = Timers()
        self.finished = False

    def step(self) -> Metrics:
        """One optimizer step on the next batch."""
        with self.timers("step"):
            rows = self._train.next_batch(self._batch_size)
            with self.timers("update_actor"), self.timers.waiting():
                reports = self._actor.scatter(ActorWorker.train_supervised, put(rows)).result()
        metrics = measures.of_updates("actor", [reports])
        timings = self.timers.take()
        return {
            **metrics,
            **timings,
            "train/perplexity": math.exp(min(metrics["train/loss"], 700)),
            "perf/total_num_tokens": float(rows.num_tokens),
            "perf/throughput": rows.num_tokens / timings["timing_s/step"],
            "training/epoch": float(self._train.epoch),
        }

    def accuracy(self) -> float:
        """Greedy exact match on the held-out rows."""
        assert self._held_out is not None, "there are held-out rows wherever there is an evaluation"
        graded = self._actor.scatter(ActorWorker.grade_supervised, self._held_out).result()
        return float(graded.row("score").mean())

    def evaluate(self, enough: float | None) -> Metrics:
        """Greedy accuracy on the held-out rows; training is finished once it is `enough` (None: never)."""
        accuracy = self.accuracy()
        self.finished = enough is not None and accuracy >= enough
        return {"val-core/held_out/acc/mean@1": accuracy}

    def export(self, path: str) -> None:
        """The trained model as a Hugging Face directory."""
        self._actor.broadcast(ActorWorker.export, path).result()

    # ----------------------------------------------------------------------------------------------- recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[ActorWorker]]:
        """The roles whose state a checkpoint holds."""
        return {"actor": self._actor}

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {"cursor": self._train.state(), "finished": self.finished}

    def load_state(self, state: dict[str, Any]) -> None:
        self._train.load_state(state["cursor"])
        self.finished = state["finished"]
