"""The reward role by functions: scores responses in killable processes.

Invariant: every row gets a score or a typed failure, never a silent 0. A reward model on a backend is another worker
class with the same `score` verb.
"""

from __future__ import annotations

import json

import numpy as np

from verl_ray.cluster.context import WorkerContext
from verl_ray.config.schema import FunctionReward
from verl_ray.data.batch import Ragged
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.rewards.process import ScoreRequest, ScoringPool


class RewardWorker:
    def __init__(self, context: WorkerContext, config: FunctionReward, tokenizer_path: str) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._pool = ScoringPool(config.functions, config.processes_per_rank, config.deadline_s)

    def score(self, rows: Rollouts) -> Scores:
        """Grade each response by the function of its data source; texts are decoded without special tokens."""
        response = np.split(rows.tokens[rows.response_mask], np.cumsum(rows.response_length)[:-1])
        prompt = [tokens[:length] for tokens, length in zip(
            np.split(rows.tokens, rows.offsets[1:-1]), rows.prompt_length, strict=True)]  # fmt: skip
        texts = self._decode(response)
        requests = [
            ScoreRequest(*fields)
            for fields in zip(
                texts,
                rows.answer.texts(),
                self._decode(prompt),
                rows.data_source.texts(),
                map(json.loads, rows.extra.texts()),
                strict=True,
            )
        ]
        graded = self._pool.score(requests)
        return Scores(
            offsets=np.zeros(rows.num_rows + 1, np.int64),
            score=np.array([score.value for score in graded], np.float32),
            health=np.array([score.health for score in graded], np.int8),
            detail=Ragged.of_texts([score.detail for score in graded]),
        )

    def _decode(self, rows: list[np.ndarray]) -> list[str]:
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=True))

    def close(self) -> None:
        self._pool.close()
