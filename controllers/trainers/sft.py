"""Supervised training: SFT runs, and the warm start of a quickstart.

Invariant: greedy accuracy is measured without generating: decoding greedily from a prompt gives the answer exactly
when every answer token is the most probable one after the answer tokens before it.
"""

from __future__ import annotations

import math

from controllers.system.build import System
from controllers.trainers.base import Evaluation, MakeTrainer, tell_skipped
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
    """`enough`: the greedy accuracy at which training is finished; None = never."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        train: SupervisedSource,
        held_out: TrainingBatch | None,
        batch_size: int,
        max_skipped_steps: int,
        enough: float | None = None,
        memory: MemoryRecord | None = None,
    ) -> None:
        super().__init__("actor", actor, train, held_out, batch_size, max_skipped_steps, memory)
        self._enough = enough

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        return self.group.scatter(ActorWorker.train_supervised, rows)

    def step(self, number: int) -> Metrics:
        metrics = super().step(number)
        return metrics | {"train/perplexity": math.exp(min(metrics["train/loss"], 700))}

    def evaluate(self) -> Evaluation:
        """Greedy accuracy on the held-out rows."""
        accuracy = self.accuracy()
        self.finished = self._enough is not None and accuracy >= self._enough
        return {ACCURACY: accuracy}, []

    def accuracy(self) -> float:
        """Greedy exact match on the held-out rows."""
        graded = self.group.scatter(ActorWorker.grade_supervised, self.held_out).result()
        return float(graded.row("score").mean())


class SFTTask(SupervisedTask[SFTConfig]):
    """`train --config-name sft`."""

    def read(self, *, trains: bool = True) -> MakeTrainer:
        """The demonstrations."""
        assert trains, "the check of the command `evaluate` refuses a supervised run"
        config = self.config
        tokenizer = load_tokenizer(config.actor.model.path)
        limits = {"max_tokens": config.sft.max_tokens, "seed": config.run.seed}
        source = SupervisedSource(config.data.train_path, tokenizer, config.data, **limits)
        tell_skipped(source.skipped, "rows of the training data are too long")
        held_out = None
        if config.run.evaluate_every and config.data.validation_path is not None:
            everything = SupervisedSource(config.data.validation_path, tokenizer, config.data, **limits)
            tell_skipped(everything.skipped, "held-out rows are too long")
            held_out = everything.all(config.evaluation.num_prompts)

        def make(system: System) -> SFTTrainer:
            memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)
            return SFTTrainer(
                system.actor, source, held_out, config.sft.batch_size, config.run.max_skipped_steps,
                config.sft.stop_at_accuracy, memory,
            )  # fmt: skip

        return make

    def next_command(self) -> str:
        return f"verl-ray check --config-name ppo model.path={self.model_folder}"
