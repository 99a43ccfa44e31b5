"""Training of a policy on preferences: direct preference optimization and its kin.

A preference is a pair of rows of which the first should become more probable, compared
with the reference.
"""

from __future__ import annotations

import sys

import numpy as np

from controllers.system.build import System
from controllers.trainers.pairs import PairsTask, PairsTrainer
from controllers.trainers.reference import ReferenceLogProbs
from controllers.trainers.supervised import Examples
from verl_ray.columns.stages import Float64, TrainingBatch
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker


class DPOTrainer(PairsTrainer[ActorWorker]):
    """The trainer of a policy on pairs of responses."""

    objective: PolicyPreferenceObjective

    reference: ReferenceLogProbs | None = None
    """The reference; None for a loss without one."""

    def complete(self, rows: TrainingBatch) -> TrainingBatch:
        """Return these pairs with the log-probs of the reference."""
        if self.reference is None:
            return rows
        with self.timers.timed("comparing with the reference", "ref", waits=True):
            return rows.replace(ref_log_prob=self.reference.log_probs(rows))

    def held_out_rewards(self) -> Float64:
        """Return the implicit reward of each held-out row, float64 [rows]."""
        call = self.group.scatter(ModelWorker.evaluate_teacher_forced, self.held_out)
        results = call.result()
        log_ratio = results.row("log_prob")
        if self.reference is not None:
            log_ratio = log_ratio - self.reference.log_probs(self.held_out_rows)
        num_tokens = results.row("response_length").astype(np.float64)
        rewards: Float64 = self.objective.config.implicit_reward(log_ratio, num_tokens)
        return rewards


class DPOTask(PairsTask[DPOConfig]):
    """The task of `train --config-name dpo`."""

    def refuse_untrained(self) -> None:
        """Warn if the model is compared with itself; it may be the first of several."""
        config = self.config
        if config.preference.declared.has_reference and config.reference.model.is_same(
            config.actor.model
        ):
            print(
                "warning: the reference is the measured model, so no implicit reward"
                " differs from 0; set reference.model.path to the model that its"
                " training began with",
                file=sys.stderr,
                flush=True,
            )

    def make_trainer(self, data: Examples, system: System) -> DPOTrainer:
        """Make the trainer of the actor."""
        config = self.config
        trainer = DPOTrainer(
            "actor",
            system.actor,
            PolicyPreferenceObjective(config.preference),
            data,
            batch_size=config.preference.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            memory=self.memory_record(data, system),
        )
        if config.preference.declared.has_reference:
            trainer.reference = ReferenceLogProbs(
                system.reference or system.actor,
                self.folder,
                config.actor if config.reference_is_base else config.reference,
            )
        return trainer
