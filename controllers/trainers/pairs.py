"""Learning from pairs of responses: what reward models and policies share.

A pair is two neighbouring rows of which the first should have the larger reward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from controllers.trainers.supervised import Source, SupervisedTask, SupervisedTrainer
from controllers.watch import held_out_measures
from controllers.watch.held_out_measures import LOG_LOSS, PAIR_ACCURACY, Evaluation
from verl_ray.columns.stages import Float64
from verl_ray.config.data import DataSet
from verl_ray.config.pairs import PreferenceTaskConfig
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.tokenizers import policy_tokenizer
from workers.model_worker import ModelWorker

W = TypeVar("W", bound=ModelWorker)
P = TypeVar("P", bound=PreferenceTaskConfig)


class PairsTrainer(SupervisedTrainer[W]):
    """The trainer of a role that gives a reward to each row."""

    @abstractmethod
    def held_out_rewards(self) -> Float64:
        """Return the reward of each held-out row, float64 [rows]."""

    def measure(self) -> Evaluation:
        """Measure pair accuracy, calibration and rewards on the held-out pairs."""
        rewards = self.held_out_rewards()
        chosen, rejected = rewards[0::2], rewards[1::2]
        pair_metrics = {
            PAIR_ACCURACY: held_out_measures.right(chosen, rejected),
            LOG_LOSS: held_out_measures.log_losses(chosen, rejected),
        }
        return Evaluation(
            held_out_measures.preference_metrics(chosen, rejected),
            scores=self.scores_of(pair_metrics, rows_per_problem=2),
        )


class PairsTask(SupervisedTask[P]):
    """A run that learns from pairs of responses."""

    @property
    def noun(self) -> str:
        """Plural of what the data sets hold, for messages."""
        return "pairs"

    def source(self, data_sets: Sequence[DataSet], *, may_stream: bool) -> Source:
        """Read the pairs of some data sets."""
        config = self.config
        row_format = config.row_format
        assert row_format is not None, "pairs have a format"
        return PreferenceSource(
            data_sets,
            policy_tokenizer(config),
            config.data,
            max_tokens=config.preference.max_tokens,
            seed=config.run.seed,
            margin=row_format.margin,
            may_stream=may_stream,
        )

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out pairs; None: all."""
        return self.config.evaluation.num_pairs
