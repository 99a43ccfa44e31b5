"""Supervised fine-tuning: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating. Greedy decoding of a prompt
gives the answer exactly when every answer token is the most probable token after the
answer tokens before it. Deliberately not here: the steps themselves (`supervised.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controllers.system.build import System
from controllers.trainers.base import Evaluation, warn_skipped
from controllers.trainers.supervised import SupervisedTask, SupervisedTrainer
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import TrainingBatch
from verl_ray.data.supervised import SupervisedSource
from verl_ray.data.tokenizers import load_tokenizer
from workers.actor import ActorWorker
from workers.model_worker import UpdateReport

ACCURACY = "val-core/held_out/acc/mean@1"


class SFTTrainer(SupervisedTrainer[ActorWorker]):
    """The trainer of an SFT run."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        train: SupervisedSource,
        held_out: TrainingBatch | None,
        batch_size: int,
        max_skipped_steps: int,
        stop_at_accuracy: float | None = None,
        memory: MemoryRecord | None = None,
    ) -> None:
        """Take the roles and the rows; see `SupervisedTrainer`.

        Args:
            stop_at_accuracy: Greedy accuracy at which training is finished; None trains
                for all steps.
        """
        super().__init__(
            "actor",
            actor,
            train,
            held_out,
            batch_size,
            max_skipped_steps,
            memory,
        )
        self._stop_at_accuracy = stop_at_accuracy

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        """Start one optimizer step on these rows."""
        return self.group.scatter(ActorWorker.train_supervised, rows)

    def step(self, number: int) -> Metrics:
        """Run training step `number`. Return its metrics, perplexity included."""
        metrics = super().step(number)
        # Above this the exponential overflows float64.
        loss = min(metrics["train/loss"], 700)
        return metrics | {"train/perplexity": math.exp(loss)}

    def evaluate(self) -> Evaluation:
        """Measure greedy accuracy on the held-out rows; may finish the training."""
        accuracy = self.accuracy()
        limit = self._stop_at_accuracy
        self.finished = limit is not None and accuracy >= limit
        return {ACCURACY: accuracy}, []

    def accuracy(self) -> float:
        """Return the share of held-out rows whose greedy answer is exactly right."""
        call = self.group.scatter(ActorWorker.score_supervised, self.held_out)
        scores = call.result().row("score")
        return float(scores.mean())


@dataclass(frozen=True)
class Demonstrations:
    """The rows of a run, tokenized.

    Attributes:
        train: The rows to learn from.
        held_out: The rows of an evaluation; None for a run without one.
    """

    train: SupervisedSource
    held_out: TrainingBatch | None


class SFTTask(SupervisedTask[SFTConfig, Demonstrations]):
    """The task of `train --config-name sft`."""

    def read(self, *, trains: bool = True) -> Demonstrations:
        """Read the demonstrations, and the held-out rows if there is an evaluation."""
        assert trains, "the check of the command `evaluate` refuses a supervised run"
        config = self.config
        tokenizer = load_tokenizer(config.actor.model.path)
        limits = {"max_tokens": config.sft.max_tokens, "seed": config.run.seed}

        source = SupervisedSource(
            config.data.train_path,
            tokenizer,
            config.data,
            **limits,
        )
        warn_skipped(source.skipped, "rows of the training data are too long")

        # Without held-out rows the run trains for all of its steps.
        held_out: TrainingBatch | None = None
        if config.run.evaluate_every and config.data.validation_path is not None:
            everything = SupervisedSource(
                config.data.validation_path,
                tokenizer,
                config.data,
                **limits,
            )
            warn_skipped(everything.skipped, "held-out rows are too long")
            held_out = everything.all(config.evaluation.num_prompts)

        return Demonstrations(source, held_out)

    def make_trainer(self, data: Demonstrations, system: System) -> SFTTrainer:
        """Make the trainer of the actor."""
        config = self.config
        return SFTTrainer(
            system.actor,
            data.train,
            data.held_out,
            batch_size=config.sft.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            stop_at_accuracy=config.sft.stop_at_accuracy,
            memory=MemoryRecord(config, system.groups, on_gpus=system.has_gpus),
        )

    def next_command(self) -> str:
        """Return the command that checks a run on the trained model."""
        return f"verl-ray check --config-name ppo model.path={self.model_folder}"
