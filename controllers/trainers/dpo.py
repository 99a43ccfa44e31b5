"""Training of a policy on preferences: direct preference optimization and its kin.

A preference is a pair of rows of which the first should become more probable, compared
with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from controllers.system.build import System
from controllers.trainers.reference import ReferenceLogProbs
from controllers.trainers.supervised import Examples, SupervisedTask, SupervisedTrainer
from controllers.watch import held_out_measures
from controllers.watch.held_out_measures import LOG_LOSS, PAIR_ACCURACY, Evaluation
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker


class DPOTrainer(SupervisedTrainer[ActorWorker]):
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

    def measure(self) -> Evaluation:
        """Measure how well implicit rewards tell the responses of held-out pairs."""
        call = self.group.scatter(ModelWorker.evaluate_teacher_forced, self.held_out)
        results = call.result()
        log_ratio = results.row("log_prob")
        if self.reference is not None:
            log_ratio = log_ratio - self.reference.log_probs(self.held_out_rows)
        num_tokens = results.row("response_length").astype(np.float64)
        rewards = self.objective.config.implicit_reward(log_ratio, num_tokens)

        # The rows of a pair are neighbours: the chosen one, then the rejected one.
        chosen, rejected = rewards[0::2], rewards[1::2]
        pair_metrics = {
            PAIR_ACCURACY: held_out_measures.right(chosen, rejected),
            LOG_LOSS: held_out_measures.log_losses(chosen, rejected),
        }
        return Evaluation(
            held_out_measures.preference_metrics(chosen, rejected),
            scores=self.scores_of(pair_metrics, rows_per_problem=2),
        )


class DPOTask(SupervisedTask[DPOConfig]):
    """The task of `train --config-name dpo`."""

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
            margin=None,
            may_stream=may_stream,
        )

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out pairs; None: all."""
        return self.config.evaluation.num_pairs

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
