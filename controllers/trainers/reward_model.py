"""Training of a reward model on preferences.

A preference is a pair of rows of which the first should score higher.

Invariant: the rows of a pair go to one rank, so that its loss sees both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from controllers.system.build import System
from controllers.trainers.base import warn_skipped
from controllers.trainers.supervised import SupervisedTask, SupervisedTrainer
from controllers.watch import held_out_measures
from controllers.watch.held_out_measures import LOG_LOSS, PAIR_ACCURACY, Evaluation
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.columns.packing import lengths_of_units, rows_of_units
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.errors import ConfigError, Problem
from verl_ray.learning.objectives import PreferenceObjective
from verl_ray.preflight.model_files import tensor_shapes
from verl_ray.settings.config_json import VALUE_HEAD
from workers.model_worker import UpdateReport
from workers.reward_model import RewardModelWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PreferenceTrainer(SupervisedTrainer[RewardModelWorker]):
    """The trainer of a reward model."""

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
        super().__init__(
            "reward",
            reward,
            train,
            held_out,
            batch_size,
            max_skipped_steps,
            memory,
        )
        self._objective = objective

    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        """Start one optimizer step on these pairs."""
        pair = self._objective.rows_per_unit
        # Pairs are partitioned over the ranks, not rows: both rows go to one rank.
        shares = self.group.partition(lengths_of_units(rows.lengths, pair))
        assignment = [rows_of_units(share, pair) for share in shares]
        return self.group.scatter(
            RewardModelWorker.train_preferences,
            rows,
            self._objective,
            assignment=assignment,
        )

    def measure(self) -> Evaluation:
        """Measure pair accuracy, calibration and rewards on the held-out pairs."""
        call = self.group.scatter(RewardModelWorker.compute_scores, self.held_out)
        scores = call.result().row("score")

        # The rows of a pair are neighbours: the chosen one, then the rejected one.
        chosen = scores[0::2].astype(np.float64)
        rejected = scores[1::2].astype(np.float64)
        metrics = held_out_measures.preference_metrics(chosen, rejected)
        pair_metrics = {
            PAIR_ACCURACY: held_out_measures.right(chosen, rejected),
            LOG_LOSS: held_out_measures.log_losses(chosen, rejected),
        }
        return Evaluation(
            metrics, scores=self.scores_of(pair_metrics, rows_per_problem=2)
        )


@dataclass(frozen=True)
class Preferences:
    """The pairs of a run, tokenized.

    Attributes:
        train: The pairs to learn from; None for an evaluation alone.
        held_out: The rows of the held-out pairs; None for a run without an evaluation.
    """

    train: PreferenceSource | None
    held_out: TrainingBatch | None


class RewardModelTask(SupervisedTask[RewardModelConfig, Preferences]):
    """The task of `train --config-name reward_model`."""

    def read(self, *, trains: bool = True) -> Preferences:
        """Read the pairs to learn from, and the held-out pairs."""
        config = self.config
        tokenizer = policy_tokenizer(config)
        # The command `evaluate` evaluates whatever run.evaluate_every is.
        evaluates = config.run.evaluate_every > 0 or not trains

        train: PreferenceSource | None = None
        if trains:
            train = self._read_pairs(
                config.data.train_sets,
                "the training data",
                tokenizer,
                may_stream=True,
            )

        held_out: TrainingBatch | None = None
        if config.data.validation_sets and evaluates:
            source = self._read_pairs(
                config.data.validation_sets,
                "the held-out data",
                tokenizer,
                may_stream=False,
            )
            held_out = source.all(config.evaluation.num_pairs)

        return Preferences(train, held_out)

    def num_examples(self, data: Preferences) -> int | None:
        """Return the number of pairs to learn from."""
        return None if data.train is None else len(data.train)

    def make_trainer(self, data: Preferences, system: System) -> PreferenceTrainer:
        """Make the trainer of the reward model."""
        config = self.config
        preference = config.preference

        # Memory is recorded with the steps, which an evaluation alone has not.
        memory: MemoryRecord | None = None
        if data.train is not None:
            memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)

        return PreferenceTrainer(
            system.models["reward"],
            data.train,
            data.held_out,
            batch_size=preference.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            objective=PreferenceObjective(preference.label_smoothing),
            memory=memory,
        )

    def _read_pairs(
        self,
        data_sets: Sequence[DataSet],
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        may_stream: bool,
    ) -> PreferenceSource:
        """Read the pairs of some data sets; report those that are left out."""
        config = self.config
        source = PreferenceSource(
            data_sets,
            tokenizer,
            config.data,
            max_tokens=config.preference.max_tokens,
            seed=config.run.seed,
            margin=config.preference.margin,
            may_stream=may_stream,
        )
        warn_skipped(source.skipped, f"pairs of {name}")
        return source

    def refuse_untrained(self) -> None:
        """Check that the model has a value head.

        Raises:
            ConfigError: It has none, so there is nothing to evaluate.
        """
        path = self.config.reward.model.folder
        if VALUE_HEAD in tensor_shapes(path):
            return

        rule = (
            f"there is nothing to evaluate: this model has no {VALUE_HEAD}, and"
            " run.resume leads to no checkpoint"
        )
        fix = "Give the directory of a reward model, or run.resume=CHECKPOINT."
        raise ConfigError([Problem("reward.model.path", path, rule, fix)])
