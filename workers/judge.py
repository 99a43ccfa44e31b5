"""The reward role by a judge: a language model of its own that is asked for a verdict on each response.

Invariant: an answer depends on the question and its seed alone, not on what is judged beside it. Deliberately not
here: what is asked and how a verdict is read (`verl_ray/rewards/judge.py`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from verl_ray.cluster.context import WorkerContext
from verl_ray.config.reward import JudgeReward
from verl_ray.data.stages import Finish, Rollouts, Scores
from verl_ray.data.tokenizers import encode, load_tokenizer, render, unspecial
from verl_ray.errors import DataError
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.judge import Judgement
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Request, Sampling
from verl_ray.rollout.seeds import row_seeds
from verl_ray.rollout.server import RolloutServer
from workers.grader import Grader
from workers.reward import requests_of, scores_of
from workers.rollout import start_engine

Tokens = npt.NDArray[np.int32]

OWN_WEIGHTS = 0  # the judge's only policy version: what its directory holds


class JudgeWorker(Grader):
    """One replica of a judge. Its role is the key of its section."""

    def __init__(self, context: WorkerContext, config: JudgeReward, policy_path: str, seed: int) -> None:
        self._role, self._config, self._seed = context.role, config, seed
        self._policy, self._own = load_tokenizer(policy_path), load_tokenizer(config.model.path)
        self._judgement = Judgement(config)
        self._sampling = Sampling(config.temperature, 1.0, -1, config.max_response_tokens)

        def start() -> RolloutEngine:
            return start_engine(
                context, config.model.path, config.engine, seed=seed, initial_version=OWN_WEIGHTS,
                max_model_len=config.max_prompt_tokens + config.max_response_tokens,
            )  # fmt: skip

        self.server = RolloutServer(start)

    def score(self, rows: Rollouts) -> Scores:
        """The judge's verdict on each response. It is shown without what spells the judge's special tokens: a response
        could end the question and write the answer itself."""
        responses = requests_of(rows, self._policy)
        asked = [
            self._judgement.question(replace(one, response=unspecial(one.response, self._own))) for one in responses
        ]
        texts = {row: text for row, text in enumerate(asked) if isinstance(text, str)}
        graded = {row: score for row, score in enumerate(asked) if isinstance(score, Score)}
        seeds = row_seeds(self._seed, self._role, rows.row_id)
        requests = []
        for row, tokens in zip(texts, self._tokens(list(texts.values())), strict=True):
            if isinstance(tokens, Score):
                graded[row] = tokens
            else:
                session = str(rows.group_id[row])
                requests.append(Request(row, tokens, self._sampling, int(seeds[row]), session=session))
        for chunk in itertools.chain.from_iterable(self.server.respond(requests)):
            said = self._own.decode(chunk.tokens, skip_special_tokens=True)
            graded[chunk.request_id] = self._judgement.verdict(said, cut=chunk.finish is not Finish.STOP)
        return scores_of([graded[row] for row in range(rows.num_rows)])

    def _tokens(self, texts: list[str]) -> list[Tokens | Score]:
        """Each question in the judge's tokens, or why it cannot be asked."""
        try:
            return [self._fitting(tokens) for tokens in self._encoded(texts)]
        except DataError as error:
            if len(texts) == 1:
                return [Score(math.nan, Health.EXCEPTION, str(error))]
            return [found for text in texts for found in self._tokens([text])]  # one of them costs its own score alone

    def _encoded(self, texts: list[str]) -> list[Tokens]:
        def where(_: int) -> str:
            return f"what {self._role} asks"

        chat = bool(self._own.chat_template)
        if chat:
            conversations: list[list[dict[str, object]]] = [[{"role": "user", "content": text}] for text in texts]
            texts = render(self._own, conversations, add_generation_prompt=True, where=where)
        rows = encode(self._own, texts, special=not chat, where=where)
        return [rows[index] for index in range(len(rows))]

    def _fitting(self, tokens: Tokens) -> Tokens | Score:
        limit = self._config.max_prompt_tokens
        if not len(tokens):
            return Score(math.nan, Health.EXCEPTION, f"{self._role}.template makes an empty question of this response")
        if len(tokens) > limit:
            detail = f"the question has {len(tokens)} tokens, more than {self._role}.max_prompt_tokens = {limit}"
            return Score(math.nan, Health.TOO_LONG, detail)
        return tokens

    def abort(self) -> None:
        """End all requests in flight early."""
        self.server.abort()

    def close(self) -> None:
        self.server.close(process_ends=True)
