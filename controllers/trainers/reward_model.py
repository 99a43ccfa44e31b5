"""Training of a reward model on pairs of responses."""

from __future__ import annotations

import numpy as np

from controllers.system.build import System
from controllers.trainers.pairs import PairsTask, PairsTrainer
from controllers.trainers.supervised import Examples
from verl_ray.columns.stages import Float64
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.learning.objectives import PreferenceObjective
from verl_ray.preflight.model_files import tensor_shapes
from verl_ray.settings.config_json import VALUE_HEAD
from workers.reward_model import RewardModelWorker


class PreferenceTrainer(PairsTrainer[RewardModelWorker]):
    """The trainer of a reward model."""

    def held_out_rewards(self) -> Float64:
        """Return the score of each held-out row, float64 [rows]."""
        call = self.group.scatter(RewardModelWorker.compute_scores, self.held_out)
        return call.result().row("score").astype(np.float64)


class RewardModelTask(PairsTask[RewardModelConfig]):
    """The task of `train --config-name reward_model`."""

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
            record=self.example_record(data),
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
