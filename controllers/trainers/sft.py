"""Supervised fine-tuning: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating. Greedy decoding of a prompt
gives the answer exactly when every answer token is the most probable token after the
answer tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from controllers.system.build import System
from controllers.trainers.base import warn_skipped
from controllers.trainers.supervised import SupervisedTask, SupervisedTrainer
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.tracking.comparison import LOSS, PERPLEXITY, perplexity_of
from workers.actor import ActorWorker
from workers.model_worker import UpdateReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCURACY = "val-core/held_out/acc/mean@1"


class SFTTrainer(SupervisedTrainer[ActorWorker]):
    """The trainer of an SFT run."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        train: SupervisedSource | None,
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
        return self.group.scatter(ActorWorker.learn, rows, SupervisedObjective())

    def step(self, number: int) -> Metrics:
        """Run training step `number`. Return its metrics, perplexity included."""
        metrics = super().step(number)
        return metrics | {"train/perplexity": perplexity_of(metrics["train/loss"])}

    def measure(self) -> Evaluation:
        """Measure greedy accuracy and loss on the held-out rows; may end the training.

        Accuracy is the share of rows whose greedy answer is exactly right. The loss is
        the mean over all response tokens, as in training.
        """
        evaluation = self.group.scatter(
            ActorWorker.evaluate_teacher_forced, self.held_out
        ).result()
        exact = evaluation.row("exact").astype(np.float64)
        accuracy = float(exact.mean())

        # Rows without response tokens have neither loss nor tokens.
        num_tokens = evaluation.row("response_length").astype(np.float64)
        losses = -evaluation.row("log_prob")
        loss = float(losses.sum()) / max(1.0, float(num_tokens.sum()))
        metrics = {
            ACCURACY: accuracy,
            LOSS: loss,
            PERPLEXITY: perplexity_of(loss),
        }
        has_tokens = num_tokens > 0
        mean_losses = np.full(len(losses), np.nan)
        mean_losses[has_tokens] = losses[has_tokens] / num_tokens[has_tokens]
        scores = self.scores_of(
            {ACCURACY: exact, LOSS: mean_losses}, weights={LOSS: num_tokens}
        )

        limit = self._stop_at_accuracy
        self.finished = limit is not None and accuracy >= limit
        return Evaluation(metrics, scores=scores)


@dataclass(frozen=True)
class Demonstrations:
    """The rows of a run, tokenized.

    Attributes:
        train: The rows to learn from; None for an evaluation alone.
        held_out: The rows of an evaluation; None for a run without one.
    """

    train: SupervisedSource | None
    held_out: TrainingBatch | None


class SFTTask(SupervisedTask[SFTConfig, Demonstrations]):
    """The task of `train --config-name sft`."""

    def read(self, *, trains: bool = True) -> Demonstrations:
        """Read the demonstrations, and the held-out rows if there is an evaluation."""
        config = self.config
        tokenizer = policy_tokenizer(config)
        # The command `evaluate` evaluates whatever run.evaluate_every is.
        evaluates = config.run.evaluate_every > 0 or not trains

        train: SupervisedSource | None = None
        if trains:
            train = self._read_rows(config.data.train_sets, tokenizer, may_stream=True)
            warn_skipped(train.skipped, "rows of the training data")

        # Without held-out rows the run trains for all of its steps.
        held_out: TrainingBatch | None = None
        if config.data.validation_sets and evaluates:
            everything = self._read_rows(
                config.data.validation_sets, tokenizer, may_stream=False
            )
            warn_skipped(everything.skipped, "held-out rows")
            held_out = everything.all(config.evaluation.num_prompts)

        return Demonstrations(train, held_out)

    def num_examples(self, data: Demonstrations) -> int | None:
        """Return the number of rows to learn from."""
        return None if data.train is None else len(data.train)

    def make_trainer(self, data: Demonstrations, system: System) -> SFTTrainer:
        """Make the trainer of the actor."""
        config = self.config
        # Memory is recorded with the steps, which an evaluation alone has not.
        memory: MemoryRecord | None = None
        if data.train is not None:
            memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)

        return SFTTrainer(
            system.actor,
            data.train,
            data.held_out,
            batch_size=config.sft.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            stop_at_accuracy=config.sft.stop_at_accuracy,
            memory=memory,
        )

    def _read_rows(
        self,
        data_sets: Sequence[DataSet],
        tokenizer: PreTrainedTokenizerBase,
        *,
        may_stream: bool,
    ) -> SupervisedSource:
        """Read the demonstrations of some data sets."""
        config = self.config
        return SupervisedSource(
            data_sets,
            tokenizer,
            config.data,
            max_tokens=config.sft.max_tokens,
            seed=config.run.seed,
            may_stream=may_stream,
        )
