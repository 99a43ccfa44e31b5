"""Training of a reward model on preferences.

A preference is a pair of rows of which the first should score higher.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controllers.system.build import System
from controllers.trainers.supervised import Examples, SupervisedTask, SupervisedTrainer
from controllers.watch import held_out_measures
from controllers.watch.held_out_measures import LOG_LOSS, PAIR_ACCURACY, Evaluation
from verl_ray.config.data import DataSet
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.errors import ConfigError, Problem
from verl_ray.learning.objectives import PreferenceObjective
from verl_ray.preflight.model_files import tensor_shapes
from verl_ray.settings.config_json import VALUE_HEAD
from workers.reward_model import RewardModelWorker


class PreferenceTrainer(SupervisedTrainer[RewardModelWorker]):
    """The trainer of a reward model."""

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


class RewardModelTask(SupervisedTask[RewardModelConfig]):
    """The task of `train --config-name reward_model`."""

    noun = "pairs"

    def source(
        self, data_sets: Sequence[DataSet], *, may_stream: bool
    ) -> PreferenceSource:
        """Read the pairs of some data sets."""
        config = self.config
        return PreferenceSource(
            data_sets,
            policy_tokenizer(config),
            config.data,
            max_tokens=config.preference.max_tokens,
            seed=config.run.seed,
            margin=config.preference.margin,
            may_stream=may_stream,
        )

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out pairs; None: all."""
        return self.config.evaluation.num_pairs

    def make_trainer(self, data: Examples, system: System) -> PreferenceTrainer:
        """Make the trainer of the reward model."""
        preference = self.config.preference
        return PreferenceTrainer(
            "reward",
            system.models["reward"],
            PreferenceObjective(preference.label_smoothing),
            data,
            batch_size=preference.batch_size,
            max_skipped_steps=self.config.run.max_skipped_steps,
            memory=self.memory_record(data, system),
        )

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
