"""Evaluation on held-out problems: a metric per data source, and rollouts to read.

Responses are greedy or sampled, as the configuration has it. Deliberately not here:
when a run evaluates (`controllers/run/loop.py`), and the command that does nothing else
(`controllers/commands/evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from controllers.rollouts.producer import Producer
from controllers.rollouts.score_failures import TooManyFailures
from controllers.watch import held_out_measures, measures, score_entries
from controllers.watch.held_out_measures import (
    CoreScores,
    Evaluation,
    EvaluationFailed,
)
from controllers.watch.measures import Metrics
from controllers.watch.rollout_record import (
    columns_of_turns,
    ends_of_rows,
    failures_of_rows,
    outputs_of_rows,
    sampled_columns,
    turns_of_rows,
)
from controllers.watch.token_texts import Pieces
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import Array, Int64
from verl_ray.columns.stages import Finish, Float32, Prompts, Rollouts
from verl_ray.config.reward import HELD_OUT_GRADER, MixedReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.profiling.phases import Timers
from verl_ray.rewards.built_in import is_accuracy
from verl_ray.rewards.health import Entries
from verl_ray.rewards.shaping import ResponseScores, Shaping, response_scores
from verl_ray.tracking.base import Sample
from verl_ray.tracking.evaluations import HeldOutScores, digest
from verl_ray.tracking.group_metrics import group_metric_means
from verl_ray.tracking.held_out_names import ACCURACY
from verl_ray.tracking.held_out_responses import ROWS_AT_ONCE, HeldOutResponse

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

        messages = prompts.messages.texts()
        answers = prompts.answer.texts()
        self._digests = [
            digest(prompt.encode(), answer.encode())
            for prompt, answer in zip(messages, answers, strict=True)
        ]

    def evaluate(
        self, producer: Producer, policy_version: int, timers: Timers
    ) -> Evaluation:
        """Evaluate the present policy.

        A failed score counts as wrong where an accuracy is measured, and is left out of
        a mean reward. val-aux/failed_scores counts both. An episode that was dropped is
        left out of either, and val-aux/dropped counts those.

        Args:
            producer: Generates the responses and scores them.
            policy_version: Version of the policy that the replicas hold.
            timers: Timers that record the evaluation.

        Returns:
            The metrics of the held-out problems, the scores of each problem, and the
            first rollouts as text.

        Raises:
            EvaluationFailed: More scores have failed than max_failed_fraction allows.
        """
        evaluation = self._config.evaluation
        with timers("testing"):
            taken = self._taken(producer, policy_version, timers)

        experience = taken.of_trajectories()
        raw_scores = response_scores(experience.scores)
        scores = self._shaping.weigh(raw_scores)
        stall_s = self._config.run.stall_s
        entries = score_entries.read_entries(experience.scores, stall_s)
        core = self._core_scores(scores, raw_scores, entries)
        responses = HeldOutResponses(
            experience,
            scores.score,
            entries,
            taken.response_lengths,
            self._tokenizer,
            self._config,
        )

        problem_scores = self._scores_of_problems(core, entries)
        lengths = self._lengths_of_problems(problem_scores, taken)
        rewards = held_out_measures.reward_scores(scores, core, problem_scores)
        metrics = self._score_metrics(raw_scores, core, entries, rewards)
        all_scores = HeldOutScores.joined([problem_scores, *rewards, *lengths])
        metrics |= group_metric_means(all_scores)
        metrics |= held_out_measures.length_metrics(lengths)
        metrics |= held_out_measures.problem_counts(self._prompts.data_source.texts())
        metrics |= measures.held_out_episode_metrics(self._sources, experience.rollouts)
        metrics |= held_out_measures.missing_scores(scores) | {
            "val-aux/num_prompts": float(self._prompts.num_rows),
            "val-aux/response_length/mean": float(taken.response_lengths.mean()),
        }
        return Evaluation(
            metrics,
            samples=responses.samples(evaluation.samples),
            scores=all_scores,
            responses=responses,
        )

    def _taken(
        self, producer: Producer, policy_version: int, timers: Timers
    ) -> Experience:
        """Return the scored responses to all problems."""
        # Every row is of the version that is evaluated.
        buffer = RolloutBuffer(self._config.evaluation.group_size, staleness=0)
        generation = producer.evaluation_generation()
        producer.begin(self._prompts, generation, buffer, policy_version)
        ordinals = self._prompts.group_id
        try:
            return producer.take(ordinals, buffer, policy_version, timers)
        except TooManyFailures as failure:
            failed = self._without_scores(failure.failed)
            raise EvaluationFailed(str(failure), failed) from None

    def _without_scores(self, failed: Experience) -> HeldOutResponses:
        """Return responses that have failed."""
        experience = failed.of_trajectories()
        return HeldOutResponses(
            experience,
            np.full(len(experience.rollouts), np.nan, np.float32),
            score_entries.read_entries(experience.scores, self._config.run.stall_s),
            failed.response_lengths,
            self._tokenizer,
            self._config,
        )

    @property
    def _sources(self) -> list[str]:
        """Data source of each response."""
        sources = self._prompts.data_source.texts()
        repeated: list[str] = np.repeat(
            sources, self._config.evaluation.group_size
        ).tolist()
        return repeated

    def _core_scores(
        self,
        scores: ResponseScores,
        raw_scores: Mapping[str, ResponseScores],
        entries: Sequence[Entries],
    ) -> CoreScores:
        """Return what counts in the main metric of each data source."""
        graders = self._config.active_graders(learns=True)
        functions: Mapping[str, str] = {}
        # A weighted sum of scores is no accuracy.
        is_mixed = isinstance(self._config.reward, MixedReward)
        if not is_mixed or HELD_OUT_GRADER in raw_scores:
            (grader,) = raw_scores
            functions = graders[grader].named_functions or {}
        right_or_wrong = {
            source
            for source in self._prompts.data_source.texts()
            if is_accuracy(functions.get(source, functions.get("default", "")))
        }
        group_size = self._config.evaluation.group_size
        return held_out_measures.core_scores(
            self._sources, scores, entries, right_or_wrong, group_size
        )

    def _score_metrics(
        self,
        raw_scores: Mapping[str, ResponseScores],
        core: CoreScores,
        entries: Sequence[Entries],
        rewards: Sequence[HeldOutScores],
    ) -> Metrics:
        """Return the metrics of each data source and grader."""
        group_size = self._config.evaluation.group_size
        sources = self._sources
        metrics = score_entries.held_out_entry_metrics(sources, entries, group_size)
        metrics |= held_out_measures.reward_metrics(rewards)
        # An accuracy that is the main metric of its data source has one name.
        for name in core.names:
            if name.kind == ACCURACY:
                metrics.pop(str(name.aside), None)
        metrics |= core.means()
        return metrics | measures.component_metrics(raw_scores, "val-aux/reward")

    def _lengths_of_problems(
        self, problem_scores: HeldOutScores, taken: Experience
    ) -> list[HeldOutScores]:
        """Return the lengths of the responses to each problem, see `length_scores`."""
        return held_out_measures.length_scores(
            problem_scores,
            self._prompts.data_source.texts(),
            taken.response_lengths,
            taken.of_trajectories().rollouts.row("finish") == Finish.LENGTH,
        )

    def _scores_of_problems(
        self, core: CoreScores, entries: Sequence[Entries]
    ) -> HeldOutScores:
        """Return the scores of each problem, as they count in its metric."""
        group_size = self._config.evaluation.group_size
        return HeldOutScores(
            problems=self._prompts.group_id.tolist(),
            digests=self._digests,
            metrics=core.metrics[::group_size],
            scores=core.values.reshape(-1, group_size),
            answers=held_out_measures.numbered_answers(entries, group_size),
        )


class HeldOutResponses(Iterable[HeldOutResponse]):
    """The responses of an evaluation, which are read from the object store in pieces.

    Not all of them fit into the driver's memory, so nothing is kept.
    """

    def __init__(
        self,
        experience: Experience,
        scores: Float32,
        entries: Sequence[Entries],
        response_tokens: Int64,
        tokenizer: PreTrainedTokenizerBase,
        config: RLConfig,
    ) -> None:
        """Take the responses, [rows], and what is known of each.

        Args:
            experience: A row per response.
            scores: The score that counts, float32 [rows].
            entries: What graders returned beside it, [rows].
            response_tokens: Tokens of the whole trajectory, int64 [rows].
            tokenizer: The tokenizer of the policy.
            config: Configuration of the run.
        """
        self._experience = experience
        self._scores = scores
        self._entries = entries
        self._response_tokens = response_tokens
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._stall_s = config.run.stall_s
        self._group_size = config.evaluation.group_size

    def __iter__(self) -> Iterator[HeldOutResponse]:
        for start in range(0, len(self._scores), ROWS_AT_ONCE):
            yield from self._read(start, start + ROWS_AT_ONCE)

    def samples(self, count: int) -> list[Sample]:
        """Return the first `count` rollouts as text, with their scores."""
        return [Sample.of(response) for response in self._read(0, count)]

    def _read(self, start: int, end: int) -> Iterator[HeldOutResponse]:
        """Yield the responses of some rows."""
        numbers = np.arange(start, min(end, len(self._scores)))
        experience = self._experience.select(numbers)
        rows = read(experience.rollouts, self._stall_s)
        answers = rows.answer.texts()
        sources = rows.data_source.texts()
        ends = ends_of_rows(rows)
        row_numbers = np.arange(rows.num_rows)
        failures = failures_of_rows(rows, experience.scores, row_numbers, self._stall_s)

        outputs = outputs_of_rows(rows)
        turns = turns_of_rows(rows)
        turn_columns = columns_of_turns(rows)
        tokens = None if rows.end is None else self._tokens_of(rows)
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
                entries=self._entries[int(number)],
                member=int(rows.trajectory_id[i]) % self._group_size,
                end=ends[i],
                failure=failures[i],
                output=outputs[i],
                response_tokens=int(self._response_tokens[number]),
                num_turns=int(turns[i]),
                turns=turn_columns["turns"][i],
                turn_ends=turn_columns["turn_ends"][i],
                turn_rewards=turn_columns["turn_rewards"][i],
                tokens=None if tokens is None else tokens[i],
            )

    def _tokens_of(self, rows: Rollouts) -> list[dict[str, Array]]:
        """Return the tokens of each row, as `HeldOutResponse` has them."""
        columns = sampled_columns(rows)
        columns["pieces"] = np.array(self._pieces.of_rows(rows), dtype=object)
        # Nothing is learned from them, so no trainer computes anything.
        missing = np.full(rows.num_tokens, np.nan, np.float32)
        columns |= {"log_probs": missing, "advantages": missing}

        parts = {
            name: np.split(values, rows.offsets[1:-1])
            for name, values in columns.items()
        }
        return [
            {name: row_numbers[i] for name, row_numbers in parts.items()}
            for i in range(rows.num_rows)
        ]

    def _text(self, tokens: np.ndarray) -> str:
        """Return tokens as text, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
