"""Training of a policy on preferences: direct preference optimization and its kin.

A preference is a pair of rows of which the first should become more probable, compared
with the reference; or a row that should become more probable, or less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from controllers.system.build import System
from controllers.trainers.pairs import PairsTask, PairsTrainer
from controllers.trainers.reference import ReferenceLogProbs
from controllers.trainers.supervised import Examples, Source
from controllers.watch import held_out_measures
from controllers.watch.held_out_measures import AUC, Evaluation
from verl_ray.cluster.waiting import put
from verl_ray.columns.stages import Float64, TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.data.records import holds_pairs
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.data.unpaired import UnpairedSource, with_next_responses
from verl_ray.learning.preference_objective import (
    PolicyPreferenceObjective,
    UnpairedPreferenceObjective,
)
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker


class DPOTrainer(PairsTrainer[ActorWorker]):
    """The trainer of a policy on pairs of responses."""

    objective: PolicyPreferenceObjective | UnpairedPreferenceObjective

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


class UnpairedTrainer(DPOTrainer):
    """The trainer of a policy on responses with labels."""

    objective: UnpairedPreferenceObjective

    max_tokens: int
    """The longest row (preference.max_tokens)."""

    def complete(self, rows: TrainingBatch) -> TrainingBatch:
        """Return these rows with the log-probs of the reference.

        The objective of the step gets its estimate of the divergence.
        """
        if self.objective.config.declared.needs_kl:
            with self.timers.timed("estimating the divergence", "kl", waits=True):
                self.objective = replace(self.objective, kl=self._divergence(rows))
        return super().complete(rows)

    def _divergence(self, rows: TrainingBatch) -> float:
        """Return an estimate of KL(pi, pi_ref), at least 0.

        It is the mean log ratio of responses to other prompts, which the policy has not
        learned: each prompt has the response of the next row, of which
        preference.max_tokens may cut the end.

        Source: KTO (arXiv:2402.01306, section 4.1).
        """
        assert self.reference is not None, "a divergence is from the reference"
        others = put(with_next_responses(rows, self.max_tokens))
        policy = self.group.scatter(ModelWorker.evaluate_teacher_forced, others)
        reference = self.reference.compute(others)
        log_ratio = policy.result().row("log_prob") - reference.result().row("log_prob")
        return max(0.0, float(np.mean(log_ratio)))

    def measure(self) -> Evaluation:
        """Measure how well implicit rewards tell the labels of held-out responses."""
        is_desirable = self.held_out_rows.desirable
        # The held-out files may be those of pairs.
        if is_desirable is None:
            return super().measure()

        rewards = self.held_out_rewards()
        scores = held_out_measures.auc_scores(rewards, is_desirable)
        return Evaluation(
            held_out_measures.label_metrics(rewards, is_desirable),
            scores=self.scores_of({AUC: scores}),
        )


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

    @property
    def noun(self) -> str:
        """Plural of what the data sets hold, for messages."""
        return "records" if self._is_unpaired else super().noun

    @property
    def _is_unpaired(self) -> bool:
        return self.config.preference.declared.is_unpaired

    def source(self, data_sets: Sequence[DataSet], *, may_stream: bool) -> Source:
        """Read the pairs of some data sets, or their responses with labels."""
        if not self._is_unpaired:
            return super().source(data_sets, may_stream=may_stream)
        return UnpairedSource(
            data_sets,
            policy_tokenizer(self.config),
            self.config.data,
            max_tokens=self.config.preference.max_tokens,
            seed=self.config.run.seed,
            may_stream=may_stream,
        )

    def held_out_source(self, data_sets: Sequence[DataSet]) -> Source:
        """Read the data sets of an evaluation; pairs are measured as pairs."""
        if self._is_unpaired and not all(map(holds_pairs, data_sets)):
            return self.source(data_sets, may_stream=False)
        return super().source(data_sets, may_stream=False)

    def make_trainer(self, data: Examples, system: System) -> DPOTrainer:
        """Make the trainer of the actor."""
        config = self.config
        objective: PolicyPreferenceObjective | UnpairedPreferenceObjective
        trainer_class: type[DPOTrainer]
        if self._is_unpaired:
            trainer_class = UnpairedTrainer
            objective = UnpairedPreferenceObjective(config.preference)
        else:
            trainer_class = DPOTrainer
            objective = PolicyPreferenceObjective(config.preference)
        trainer = trainer_class(
            "actor",
            system.actor,
            objective,
            data,
            batch_size=config.preference.batch_size,
            max_skipped_steps=config.run.max_skipped_steps,
            memory=self.memory_record(data, system),
            record=self.example_record(data),
        )
        if isinstance(trainer, UnpairedTrainer):
            trainer.max_tokens = config.preference.max_tokens
        if config.preference.declared.has_reference:
            trainer.reference = ReferenceLogProbs(
                system.reference or system.actor,
                self.folder,
                config.actor if config.reference_is_base else config.reference,
            )
        return trainer
