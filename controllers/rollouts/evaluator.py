"""Evaluation on held-out problems: accuracy per data source, and rollouts to read.

Responses are greedy or sampled, as the configuration has it. Deliberately not here:
when a run evaluates (`controllers/run/loop.py`), and the command that does nothing else
(`controllers/commands/evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from controllers.rollouts.producer import Producer
from controllers.watch import held_out_measures, measures
from controllers.watch.evaluation import Evaluation
from controllers.watch.measures import Metrics
from verl_ray.cluster.store import read
from verl_ray.config.reward import HELD_OUT_GRADER
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, Float32, Prompts, Rollouts
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import ResponseScores, Shaping
from verl_ray.tracking.base import HeldOutResponse, Sample
from verl_ray.tracking.evaluations import HeldOutScores, digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROWS_AT_ONCE = 256
"""Responses that the driver reads from the object store at once."""


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

        messages = prompts.messages.texts()
        answers = prompts.answer.texts()
        self._digests = [
            digest(prompt.encode(), answer.encode())
            for prompt, answer in zip(messages, answers, strict=True)
        ]

    def evaluate(
        self,
        producer: Producer,
        policy_version: int,
        timers: Timers,
    ) -> Evaluation:
        """Evaluate the present policy.

        A response that a function failed to score counts as wrong. Any other failed
        score is left out. val-aux/failed_scores counts both.

        Args:
            producer: Generates the responses and scores them.
            policy_version: Version of the policy that the replicas hold.
            timers: Timers that record the evaluation.

        Returns:
            Accuracy on the held-out problems, the scores of each problem, and the
            first rollouts as text.
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
        responses = HeldOutResponses(
            experience.rollouts,
            scores.score,
            self._tokenizer,
            stall_s=self._config.run.stall_s,
        )

        response_length = experience.rollouts.row("response_length")
        metrics = self._score_metrics(scores, raw_scores)
        metrics |= {
            "val-aux/failed_scores": float((~scores.ok).sum()),
            "val-aux/num_prompts": float(self._prompts.num_rows),
            "val-aux/response_length/mean": float(response_length.mean()),
        }
        return Evaluation(
            metrics,
            samples=responses.samples(evaluation.samples),
            scores=self._scores_of_problems(scores, raw_scores),
            responses=responses,
        )

    def _score_metrics(
        self,
        scores: ResponseScores,
        raw_scores: Mapping[str, ResponseScores],
    ) -> Metrics:
        """Return accuracy or mean reward per data source, and each grader's scores."""
        group_size = self._config.evaluation.group_size
        prompt_sources = self._prompts.data_source.texts()
        sources: list[str] = np.repeat(prompt_sources, group_size).tolist()

        if self._is_right_or_wrong(raw_scores):
            metrics = held_out_measures.accuracy(sources, scores, group_size)
        else:
            metrics = held_out_measures.held_out_rewards(sources, scores, group_size)
        return metrics | measures.component_metrics(raw_scores, "val-aux/reward")

    def _scores_of_problems(
        self,
        scores: ResponseScores,
        raw_scores: Mapping[str, ResponseScores],
    ) -> HeldOutScores:
        """Return the scores of each problem, as they count in its metric."""
        group_size = self._config.evaluation.group_size
        right_or_wrong = self._is_right_or_wrong(raw_scores)
        metrics = [
            held_out_measures.metric_name(
                source, group_size, right_or_wrong=right_or_wrong
            )
            for source in self._prompts.data_source.texts()
        ]

        failed_score = 0.0 if right_or_wrong else np.nan
        counted = np.where(scores.ok, scores.score, failed_score)
        return HeldOutScores(
            problems=self._prompts.group_id.tolist(),
            digests=self._digests,
            metrics=metrics,
            scores=counted.astype(np.float64).reshape(-1, group_size),
        )

    def _is_right_or_wrong(self, raw_scores: Mapping[str, ResponseScores]) -> bool:
        """Return whether scores are accuracies.

        Those of a model have any scale, so their mean is no accuracy.
        """
        return HELD_OUT_GRADER in raw_scores or self._config.reward.kind == "function"


class HeldOutResponses(Iterable[HeldOutResponse]):
    """The responses of an evaluation, which are read from the object store in pieces.

    Not all of them fit into the driver's memory, so nothing is kept.
    """

    def __init__(
        self,
        rollouts: Sharded[Rollouts],
        scores: Float32,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stall_s: float,
    ) -> None:
        """Take the responses, and the score of each, float32 [rows]."""
        self._rollouts = rollouts
        self._scores = scores
        self._tokenizer = tokenizer
        self._stall_s = stall_s

    def __iter__(self) -> Iterator[HeldOutResponse]:
        for start in range(0, len(self._rollouts), ROWS_AT_ONCE):
            yield from self._read(start, start + ROWS_AT_ONCE)

    def samples(self, count: int) -> list[Sample]:
        """Return the first `count` rollouts as text, with their scores."""
        return [
            Sample(
                prompt=response.prompt,
                response=response.response,
                answer=response.answer,
                data_source=response.data_source,
                score=response.score,
                truncated=response.finish == Finish.LENGTH.name.lower(),
            )
            for response in self._read(0, count)
        ]

    def _read(self, start: int, end: int) -> Iterator[HeldOutResponse]:
        """Yield the responses of some rows."""
        numbers = np.arange(start, min(end, len(self._rollouts)))
        rows = read(self._rollouts.select(numbers), self._stall_s)
        answers = rows.answer.texts()
        sources = rows.data_source.texts()

        for i, number in enumerate(numbers):
            first = rows.offsets[i]
            last = rows.offsets[i + 1]
            response_start = first + rows.prompt_length[i]
            yield HeldOutResponse(
                problem=int(rows.group_id[i]),
                data_source=sources[i],
                prompt=self._text(rows.tokens[first:response_start]),
                response=self._text(rows.tokens[response_start:last]),
                answer=answers[i],
                score=float(self._scores[number]),
                finish=Finish(rows.finish[i]).name.lower(),
            )

    def _text(self, tokens: np.ndarray) -> str:
        """Return tokens as text, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
