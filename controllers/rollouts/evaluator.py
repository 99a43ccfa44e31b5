"""Evaluation on held-out problems: accuracy per data source, and rollouts to read.

Responses are greedy or sampled, as the configuration has it. Deliberately not here:
when a run evaluates (`controllers/run/loop.py`), and the command that does nothing else
(`controllers/commands/evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from controllers.rollouts.producer import Producer
from controllers.watch import held_out_measures, measures
from controllers.watch.measures import Metrics
from verl_ray.cluster.store import read
from verl_ray.config.reward import HELD_OUT_GRADER
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, Prompts, Rollouts
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import ResponseScores, Shaping
from verl_ray.tracking.base import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Evaluator:
    """The held-out problems of a run, and what is measured on them."""

    def __init__(
        self,
        config: RLConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
    ) -> None:
        """Take the held-out problems."""
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._shaping = Shaping(config)

    def evaluate(
        self,
        producer: Producer,
        policy_version: int,
        timers: Timers,
    ) -> tuple[Metrics, list[Sample]]:
        """Evaluate the present policy.

        A response that a function failed to score counts as wrong. Any other failed
        score is left out. val-aux/failed_scores counts both.

        Args:
            producer: Generates the responses and scores them.
            policy_version: Version of the policy that the replicas hold.
            timers: Timers that record the evaluation.

        Returns:
            Accuracy on the held-out problems, and the first rollouts as text.
        """
        evaluation = self._config.evaluation
        staleness = self._config.rollout.staleness
        buffer = RolloutBuffer(evaluation.group_size, staleness)

        with timers("testing"):
            generation = producer.evaluation_generation()
            producer.begin(self._prompts, generation, buffer)
            experience = producer.take(self._prompts, buffer, policy_version, timers)

        raw_scores = measures.response_scores(experience.scores)
        scores = self._shaping.weigh(raw_scores)

        metrics = self._score_metrics(scores, raw_scores)
        response_length = experience.rollouts.row("response_length")
        metrics |= {
            "val-aux/failed_scores": float((~scores.ok).sum()),
            "val-aux/num_prompts": float(self._prompts.num_rows),
            "val-aux/response_length/mean": float(response_length.mean()),
        }
        return metrics, self._samples(experience.rollouts, scores)

    def _score_metrics(
        self,
        scores: ResponseScores,
        raw_scores: Mapping[str, ResponseScores],
    ) -> Metrics:
        """Return accuracy or mean reward per data source, and each grader's scores."""
        group_size = self._config.evaluation.group_size
        prompt_sources = self._prompts.data_source.texts()
        sources: list[str] = np.repeat(prompt_sources, group_size).tolist()

        # Scores of a function are right or wrong. Those of a model have any scale, so
        # their mean is no accuracy.
        scored_by_function = (
            HELD_OUT_GRADER in raw_scores or self._config.reward.kind == "function"
        )
        if scored_by_function:
            metrics = held_out_measures.accuracy(sources, scores, group_size)
        else:
            metrics = held_out_measures.held_out_rewards(sources, scores, group_size)
        return metrics | measures.component_metrics(raw_scores, "val-aux/reward")

    def _samples(
        self,
        rollouts: Sharded[Rollouts],
        scores: ResponseScores,
    ) -> list[Sample]:
        """Return the first rollouts as text, with their scores."""
        count = min(self._config.evaluation.samples, len(rollouts))
        rows = read(rollouts.select(np.arange(count)), self._config.run.stall_s)
        answers = rows.answer.texts()
        sources = rows.data_source.texts()

        samples: list[Sample] = []
        for i in range(count):
            start = rows.offsets[i]
            end = rows.offsets[i + 1]
            response_start = start + rows.prompt_length[i]
            sample = Sample(
                prompt=self._text(rows.tokens[start:response_start]),
                response=self._text(rows.tokens[response_start:end]),
                answer=answers[i],
                data_source=sources[i],
                score=float(scores.score[i]),
                truncated=bool(rows.finish[i] == Finish.LENGTH),
            )
            samples.append(sample)
        return samples

    def _text(self, tokens: np.ndarray) -> str:
        """Return tokens as text, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
