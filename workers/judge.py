"""The reward role by a judge: a language model of its own that is asked for a verdict on each response.

Invariant: an answer depends on the question and its seed alone, not on what is judged beside it. Deliberately not
here: what is asked and how a verdict is read (`verl_ray/rewards/judge.py`).
"""

from __future__ import annotations

import math

import numpy as np

from verl_ray.cluster.context import WorkerContext
from verl_ray.config.schema import JudgeReward
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.data.tokenizers import encode, load_tokenizer, render
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.judge import Judgement
from verl_ray.rollout.base import Chunk, Request, RolloutEngine, Sampling
from verl_ray.rollout.seeds import row_seeds
from workers.reward import requests_of, scores_of
from workers.rollout import start_engine

OWN_WEIGHTS = 0  # the judge's only policy version: what its directory holds


class JudgeWorker:
    """One replica of a judge."""

    def __init__(self, context: WorkerContext, config: JudgeReward, policy_path: str, seed: int) -> None:
        self._config, self._seed = config, seed
        self._policy, self._own = load_tokenizer(policy_path), load_tokenizer(config.model.path)
        self._judgement = Judgement(config)
        self._sampling = Sampling(config.temperature, 1.0, -1, config.max_response_tokens)
        self.engine: RolloutEngine = start_engine(
            context, config.model.path, config.engine, seed=seed, initial_version=OWN_WEIGHTS,
            max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        )  # fmt: skip

    def score(self, rows: Rollouts) -> Scores:
        """The judge's verdict on each response."""
        asked = [self._judgement.question(request) for request in requests_of(rows, self._policy)]
        texts = {row: text for row, text in enumerate(asked) if isinstance(text, str)}
        graded = {row: score for row, score in enumerate(asked) if isinstance(score, Score)}
        seeds = row_seeds(self._seed, "judge", rows.row_id)
        requests = []
        for row, tokens in zip(texts, self._tokens(list(texts.values())), strict=True):
            if len(tokens) > self._config.max_prompt_tokens:
                limit = self._config.max_prompt_tokens
                detail = f"the question has {len(tokens)} tokens, more than max_prompt_tokens = {limit}"
                graded[row] = Score(math.nan, Health.TOO_LONG, detail)
            else:
                requests.append(Request(row, tokens, self._sampling, int(seeds[row]), session=str(row)))
        answers = self._answers(requests)
        said = self._own.batch_decode([chunk.tokens for chunk in answers], skip_special_tokens=True)
        graded |= {chunk.request_id: self._judgement.verdict(text) for chunk, text in zip(answers, said, strict=True)}
        return scores_of([graded[row] for row in range(rows.num_rows)])

    def _tokens(self, texts: list[str]) -> list[np.ndarray]:
        def where(index: int) -> str:
            return f"the question about response {index}"

        chat = bool(self._own.chat_template)
        if chat:
            conversations: list[list[dict[str, object]]] = [[{"role": "user", "content": text}] for text in texts]
            texts = render(self._own, conversations, add_generation_prompt=True, where=where)
        rows = encode(self._own, texts, special=not chat, where=where)
        return [rows[index] for index in range(len(rows))]

    def _answers(self, requests: list[Request]) -> list[Chunk]:
        self.engine.submit(requests)
        answers: list[Chunk] = []
        while self.engine.unfinished:
            answers += self.engine.step()
        return answers

    def abort(self) -> None:
        """End all requests in flight early."""
        self.engine.abort()

    def close(self) -> None:
        self.engine.close()
