"""Training a reward model on preferences: pairs of rows of which the first should score higher.

Invariant: the rows of a pair go to one rank, so that its loss sees both. Deliberately not here: scoring rollouts,
which is the reward role's part in `rl.py`.
"""

from __future__ import annotations

import numpy as np

from controllers.system.build import System
from controllers.trainers.base import Evaluation, MakeTrainer, tell_skipped
from controllers.trainers.supervised import SupervisedTask, SupervisedTrainer
from controllers.watch import measures
from controllers.watch.memory import MemoryRecord
from verl_ray.algorithms.objectives import PreferenceObjective
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.data.packing import lengths_of_units, rows_of_units
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import TrainingBatch
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ConfigError, Problem
from verl_ray.models.families import VALUE_HEAD
from verl_ray.preflight.model_directories import tensor_shapes
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
        memory: MemoryRecord | None = None,
    ) -> None:
        super().__init__("reward", reward, train, held_out, batch_size, max_skipped_steps, memory)
        self._objective = objective

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        pair = self._objective.rows_per_unit
        shares = self.group.deal(lengths_of_units(rows.lengths, pair))
        assignment = [rows_of_units(share, pair) for share in shares]
        return self.group.scatter(RewardModelWorker.train_preferences, rows, self._objective, assignment=assignment)

    def evaluate(self) -> Evaluation:
        """Pair accuracy, calibration and reward statistics on the held-out pairs."""
        scores = self.group.scatter(RewardModelWorker.compute_scores, self.held_out).result().row("score")
        return measures.of_preferences(scores[0::2].astype(np.float64), scores[1::2].astype(np.float64)), []


class RewardModelTask(SupervisedTask[RewardModelConfig]):
    """`train --config-name reward_model`."""

    def read(self, *, trains: bool = True) -> MakeTrainer:
        """The pairs."""
        config, wanted = self.config, self.config.preference
        tokenizer = load_tokenizer(config.reward.model.path)

        def pairs(path: str, kind: str) -> PreferenceSource:
            source = PreferenceSource(
                path, tokenizer, config.data, max_tokens=wanted.max_tokens, seed=config.run.seed, margin=wanted.margin
            )
            for reason, count in source.skipped.items():
                tell_skipped(count, f"pairs of {kind} are {reason.replace('_', ' ')}")
            return source

        train = pairs(config.data.train_path, "the training data") if trains else None
        held_out = None
        if config.data.validation_path is not None and (config.run.evaluate_every or not trains):
            held_out = pairs(config.data.validation_path, "the held-out data").all(config.evaluation.num_pairs)
        objective = PreferenceObjective(wanted.label_smoothing)

        def make(system: System) -> PreferenceTrainer:
            memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus) if trains else None
            return PreferenceTrainer(
                system.models["reward"], train, held_out, wanted.batch_size, config.run.max_skipped_steps, objective,
                memory,
            )  # fmt: skip

        return make

    def refuse_untrained(self) -> None:
        path = self.config.reward.model.path
        if VALUE_HEAD not in tensor_shapes(path):
            rule = (
                f"there is nothing to evaluate: this model has no {VALUE_HEAD}, and run.resume leads to no checkpoint"
            )
            fix = "Give the directory of a reward model, or run.resume=CHECKPOINT."
            raise ConfigError([Problem("reward.model.path", path, rule, fix)])

    def next_command(self) -> str:
        return f"verl-ray check --config-name ppo reward=model reward.model.path={self.model_folder}"
