"""The worked example in the docstring of `verl_ray/columns/stages.py`, computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.learning.test_credit import algorithm
from tests.rows import columns_of
from verl_ray.algorithms.row_weights import row_weights
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import (
    Credit,
    Finish,
    LogProbs,
    Prompts,
    Rollouts,
    RowRewards,
    Scores,
    TrainingBatch,
    versions_of,
)
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.encoding import encode
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.learning.credit import response_rewards, token_credit

LOG_PROBS = np.array([0, 0, 0, 0, -0.5, -0.25, 0, 0, 0, 0, -1.5, -1, -0.25], np.float32)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    tokenizer = character_tokenizer(tmp_path, ALPHABET)
    rows = encode(tokenizer, ["1+2="], special=False, where=str)
    texts = Ragged.of_texts([""])
    return Prompts(
        offsets=rows.offsets,
        group_id=np.array([7]),
        tokens=rows.values,
        has_answer=np.array([True]),
        messages=texts,
        data_source=texts,
        answer=texts,
        extra=texts,
    )


@pytest.fixture
def rollouts(prompts: Prompts, tmp_path: Path) -> Rollouts:
    tokenizer = character_tokenizer(tmp_path, ALPHABET)
    texts = ["1+2=3<eos>", "1+2=12<eos>"]
    rows = encode(tokenizer, texts, special=False, where=str)
    prompt_length = np.repeat(prompts.lengths, 2).astype(np.int32)
    response_length = (rows.lengths - prompt_length).astype(np.int32)
    position = np.arange(len(rows.values)) - np.repeat(rows.offsets[:-1], rows.lengths)
    spans = Ragged.of_rows([[[4, 0]], [[4, 0]]], np.int64)
    empty = Ragged.of_texts(["", ""])
    return Rollouts(
        offsets=rows.offsets,
        tokens=rows.values,
        response_mask=position >= np.repeat(prompt_length, rows.lengths),
        row_id=prompts.group_id[0] * 2 + np.arange(2),
        trajectory_id=prompts.group_id[0] * 2 + np.arange(2),
        group_id=np.repeat(prompts.group_id, 2),
        prompt_length=prompt_length,
        response_length=response_length,
        finish=np.array([Finish.STOP, Finish.STOP], np.int8),
        rollout_log_probs=LOG_PROBS,
        version_spans=spans,
        **versions_of(spans),
        has_answer=np.array([True, True]),
        messages=empty,
        data_source=empty,
        answer=empty,
        extra=empty,
    )


def test_prompt_and_responses_are_the_tokens_of_the_example(
    prompts: Prompts, rollouts: Rollouts
) -> None:
    assert prompts.offsets.tolist() == [0, 4]
    assert prompts.tokens.tolist() == [3, 12, 4, 13]

    first, second = np.split(rollouts.tokens, rollouts.offsets[1:-1])
    assert rollouts.offsets.tolist() == [0, 6, 13]
    assert first.tolist() == [3, 12, 4, 13, 5, 1]
    assert second.tolist() == [3, 12, 4, 13, 3, 4, 1]
    assert rollouts.row_id.tolist() == [14, 15]
    assert rollouts.group_id.tolist() == [7, 7]
    assert rollouts.prompt_length.tolist() == [4, 4]
    assert rollouts.response_length.tolist() == [2, 3]
    mask = [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3
    assert rollouts.response_mask.tolist() == mask
    assert (rollouts.rollout_log_probs != 0).tolist() == mask


def test_scores_become_the_advantages_and_weights_of_the_example(
    rollouts: Rollouts,
) -> None:
    scores = Scores.ok(np.array([1, 0], np.float32))
    policy = LogProbs(offsets=rollouts.offsets, log_probs=LOG_PROBS)
    rewards: RowRewards = response_rewards(
        algorithm("dr_grpo"),
        scores.score,
        scores.health == 0,
        columns_of(rollouts),
        None,
    )
    credit: Credit = token_credit(
        algorithm("dr_grpo"), 0.0, rollouts, rewards, policy, None, None
    )
    weights = row_weights(
        "token_mean",
        rollouts.response_length.astype(np.int64),
        total_tokens=5,
        total_rows=2,
        horizon=None,
    )
    batch = TrainingBatch(
        offsets=rollouts.offsets,
        tokens=rollouts.tokens,
        response_mask=rollouts.response_mask,
        loss_weight=weights,
        old_log_probs=policy.log_probs,
        advantages=credit.advantages,
    )

    assert scores.offsets.tolist() == rewards.offsets.tolist() == [0, 0, 0]
    assert rewards.reward.tolist() == [1, 0]
    assert rewards.advantage.tolist() == [0.5, -0.5]
    assert rewards.in_loss.tolist() == [True, True]
    expected = [0, 0, 0, 0, 0.5, 0.5, 0, 0, 0, 0, -0.5, -0.5, -0.5]
    assert credit.advantages.tolist() == expected
    assert batch.loss_weight.tolist() == [np.float32(0.2)] * 2
    assert batch.offsets.tolist() == offsets_of([6, 7]).tolist()
