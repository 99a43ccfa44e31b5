"""Supervised fine-tuning: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating. Greedy decoding of a prompt
gives the answer exactly when every answer token is the most probable token after the
answer tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controllers.system.build import System
from controllers.trainers.supervised import Examples, SupervisedTask, SupervisedTrainer
from controllers.watch.example_record import ExampleRecord
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.data import DataSet
from verl_ray.config.distill import TeacherFileConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.teacher_rows import TeacherSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.tracking.comparison import LOSS, PERPLEXITY, perplexity_of
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker

ACCURACY = "val-core/held_out/acc/mean@1"


class SFTTrainer(SupervisedTrainer[ActorWorker]):
    """The trainer of an SFT run."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        examples: Examples,
        batch_size: int,
        max_skipped_steps: int,
        stop_at_accuracy: float | None = None,
        memory: MemoryRecord | None = None,
        teacher: TeacherFileConfig | None = None,
        record: ExampleRecord | None = None,
    ) -> None:
        """Take the actor and its rows; see `SupervisedTrainer`.

        Args:
            stop_at_accuracy: Greedy accuracy at which training is finished; None trains
                for all steps.
            teacher: How it learns from a teacher, if rows have what one says.
        """
        super().__init__(
            "actor",
            actor,
            SupervisedObjective(teacher),
            examples,
            batch_size,
            max_skipped_steps,
            memory,
            record,
        )
        self._stop_at_accuracy = stop_at_accuracy

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
            ModelWorker.evaluate_teacher_forced, self.held_out
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


class SFTTask(SupervisedTask[SFTConfig]):
    """The task of `train --config-name sft`."""

    def source(
        self, data_sets: Sequence[DataSet], *, may_stream: bool
    ) -> SupervisedSource | TeacherSource:
        """Read the demonstrations of some data sets, or a teacher's responses."""
        config = self.config
        if config.sft.num_top:
            return TeacherSource(
                data_sets,
                policy_tokenizer(config),
                config.data,
                max_tokens=config.sft.max_tokens,
                top_k=config.sft.num_top,
                seed=config.run.seed,
                may_stream=may_stream,
            )
        return SupervisedSource(
            data_sets,
            policy_tokenizer(config),
            config.data,
            max_tokens=config.sft.max_tokens,
            seed=config.run.seed,
            may_stream=may_stream,
        )

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out rows; None: all."""
        return self.config.evaluation.num_prompts

    def make_trainer(self, data: Examples, system: System) -> SFTTrainer:
        """Make the trainer of the actor."""
        config = self.config
        return SFTTrainer(
            system.actor,
            data,
            batch_size=config.sft.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            stop_at_accuracy=config.sft.stop_at_accuracy,
            memory=self.memory_record(data, system),
            record=self.example_record(data),
            teacher=config.sft,
        )
