"""Reward role by a judge: a language model that gives a verdict on each response.

Invariant: a reply depends on the question and its seed alone, not on the other
questions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.cluster.context import WorkerContext
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.stages import Finish, Rollouts, Scores
from verl_ray.config.reward import JudgeReward
from verl_ray.data.tokenizers import (
    TemplateArguments,
    load_tokenizer,
    strip_special_tokens,
)
from verl_ray.errors import DataError
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.judge import Judgement, question_tokens
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling
from verl_ray.rollout.server import RolloutServer
from workers.reward import (
    Grader,
    requests_of,
    scores_of,
    scores_without_grader,
    with_recorded_metrics,
)
from workers.rollout import start_engine

Tokens = npt.NDArray[np.int32]

OWN_WEIGHTS = 0
"""The judge's only policy version: the weights in its directory."""


class JudgeWorker(Grader):
    """One replica of a judge. Its role is the key of its section."""

    def __init__(
        self,
        context: WorkerContext,
        config: JudgeReward,
        policy_path: str,
        seed: int,
        template_arguments: TemplateArguments | None = None,
        trusts_code: bool = False,
    ) -> None:
        """Start the judge's engine.

        Args:
            template_arguments: What the run gives to the judge's chat template.
            trusts_code: Whether the code in the judge's directory may run.
        """
        self._template_arguments = template_arguments or {}
        self._role = context.role
        self._config = config
        self._seed = seed
        self._policy_tokenizer = load_tokenizer(policy_path)
        self._judge_tokenizer = load_tokenizer(config.model.folder)
        self._judgement = Judgement(config)
        self._sampling = Sampling(
            config.temperature, 1.0, -1, config.max_response_tokens
        )

        def start() -> RolloutEngine:
            return start_engine(
                context,
                config.model.folder,
                config.engine,
                seed=seed,
                initial_version=OWN_WEIGHTS,
                max_model_len=config.max_prompt_tokens + config.max_response_tokens,
                trusts_code=trusts_code,
            )

        self.server = RolloutServer(start)

    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        """Return the judge's verdict on each response."""
        # Each step may give some rows a score; the others go on to the next.
        scores = scores_without_grader(rows)
        texts: dict[int, str] = {}
        for row, question in enumerate(self._questions(rows, step)):
            if row in scores:
                continue
            if isinstance(question, Score):
                scores[row] = question
            else:
                texts[row] = question

        seeds = row_seeds(self._seed, self._role, rows.row_id)
        requests = []
        questions = self._question_tokens(list(texts.values()))
        for row, tokens in zip(texts, questions, strict=True):
            if isinstance(tokens, Score):
                scores[row] = tokens
                continue
            request = GenerationRequest(
                row,
                tokens,
                self._sampling,
                int(seeds[row]),
                # The questions about one prompt share a prefix.
                session=str(rows.group_id[row]),
            )
            requests.append(request)

        # Waits for replies as they finish, and ends with the last one.
        for chunks in self.server.respond(requests):
            for chunk in chunks:
                scores[chunk.request_id] = self._verdict(chunk)
        in_order = [scores[row] for row in range(rows.num_rows)]
        return scores_of(with_recorded_metrics(in_order, rows))

    def _questions(self, rows: Rollouts, step: int) -> list[str | Score]:
        """Question about each response, or the failure to make one.

        The names of the judge's special tokens are removed from what was written. A
        response could otherwise end the question, and write the reply itself.
        """
        questions = []
        for request in requests_of(rows, step, self._policy_tokenizer):
            shown = replace(
                request,
                response=self._stripped(request.response),
                episode_conversations=self._stripped(request.episode_conversations),
            )
            questions.append(self._judgement.question(shown))
        return questions

    def _stripped(self, value: Any) -> Any:
        """Return a text, or values in JSON, without names of special tokens."""
        if isinstance(value, str):
            return strip_special_tokens(value, self._judge_tokenizer)
        if isinstance(value, list):
            return [self._stripped(each) for each in value]
        if isinstance(value, dict):
            return {name: self._stripped(each) for name, each in value.items()}
        return value

    def _verdict(self, chunk: Chunk) -> Score:
        reply = self._judge_tokenizer.decode(chunk.tokens, skip_special_tokens=True)
        return self._judgement.verdict(reply, cut=chunk.finish is not Finish.STOP)

    def _question_tokens(self, texts: list[str]) -> list[Tokens | Score]:
        """Each question in the judge's tokens, or the reason why it cannot be sent."""
        try:
            questions = question_tokens(
                texts, self._judge_tokenizer, self._role, self._template_arguments
            )
            return [self._fit_or_failure(tokens) for tokens in questions]
        except DataError as error:
            if len(texts) == 1:
                return [Score(math.nan, ScoreHealth.EXCEPTION, str(error))]

        # Question by question, so that a bad one costs its own score alone.
        results = []
        for text in texts:
            results += self._question_tokens([text])
        return results

    def _fit_or_failure(self, tokens: Tokens) -> Tokens | Score:
        """Return a question that the judge's context holds, or a failure."""
        limit = self._config.max_prompt_tokens
        if not len(tokens):
            detail = f"{self._role}.template makes an empty question of this response"
            return Score(math.nan, ScoreHealth.EXCEPTION, detail)
        if len(tokens) > limit:
            detail = (
                f"the question has {len(tokens)} tokens, more than"
                f" {self._role}.max_prompt_tokens = {limit}"
            )
            return Score(math.nan, ScoreHealth.TOO_LONG, detail)
        return tokens

    def abort(self) -> None:
        """Abort all requests in flight."""
        self.server.abort()

    def close(self) -> None:
        """Close the server; the process exits afterwards."""
        self.server.close(process_exits=True)
