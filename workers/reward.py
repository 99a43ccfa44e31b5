"""The reward role by functions or by a service: grades responses as texts.

Invariant: every row gets a score or a typed failure, never a silent 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verl_ray.cluster.context import WorkerContext
from verl_ray.config.reward import FunctionReward, HttpReward
from verl_ray.data.batch import Ragged
from verl_ray.data.prompts import prompt_text
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.rewards.health import Score
from verl_ray.rewards.process import ScoreRequest, ScoringPool
from verl_ray.rewards.remote import RemoteScorer
from workers.grader import Grader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextGrader(Protocol):
    """A pool of processes, a service, a judge."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]: ...

    def close(self) -> None: ...


class RewardWorker(Grader):
    """Grades each response by the function of its data source, or by a service."""

    def __init__(self, context: WorkerContext, config: FunctionReward | HttpReward, policy_path: str) -> None:
        self._tokenizer = load_tokenizer(policy_path)
        self._grader: TextGrader = (
            RemoteScorer(config, context.role)
            if config.kind == "http"
            else ScoringPool(
                config.functions, config.processes_per_rank, config.deadline_s, key=f"{context.role}.functions"
            )
        )

    def score(self, rows: Rollouts) -> Scores:
        """Texts are decoded without special tokens."""
        return scores_of(self._grader.score(requests_of(rows, self._tokenizer)))

    def close(self) -> None:
        self._grader.close()


def requests_of(rows: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[ScoreRequest]:
    """What is to be graded, as texts: prompts as the data set has them, responses without special tokens."""
    return [
        ScoreRequest(response=response, answer=answer, prompt=prompt, data_source=source, extra=extra)
        for response, answer, prompt, source, extra in zip(
            response_texts(rows, tokenizer),
            rows.answer.texts(),
            map(prompt_text, rows.messages.texts()),
            rows.data_source.texts(),
            map(json.loads, rows.extra.texts()),
            strict=True,
        )
    ]


def response_texts(rows: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each row's response tokens as text, without special tokens."""
    responses = np.split(rows.tokens[rows.response_mask], np.cumsum(rows.response_length))[:-1]
    return [str(tokenizer.decode(response, skip_special_tokens=True)) for response in responses]


def scores_of(graded: Sequence[Score]) -> Scores:
    """One grade per row, as columns."""
    return Scores(
        offsets=np.zeros(len(graded) + 1, np.int64),
        score=np.array([score.value for score in graded], np.float32),
        health=np.array([score.health for score in graded], np.int8),
        detail=Ragged.of_texts([score.detail for score in graded]),
        rescored=np.array([score.rescored for score in graded], np.bool_),
    )
