"""Rollouts from a few lists, for tests that compute by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_ray.algorithms.estimators import ResponseColumns
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import (
    Finish,
    Float32,
    LogProbs,
    Rollouts,
    RowRewards,
    Values,
    versions_of,
)


def rollouts_of(
    responses: Sequence[int],
    *,
    prompts: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    finish: Sequence[Finish] | None = None,
) -> Rollouts:
    """Rows with prompts and responses of these numbers of tokens; prompts have two
    tokens unless told otherwise.
    """
    count = len(responses)
    prompts = [2] * count if prompts is None else prompts
    masks = [[False] * p + [True] * r for p, r in zip(prompts, responses, strict=True)]
    mask = np.array([m for row in masks for m in row], bool)
    row_id = np.arange(count, dtype=np.int64)
    texts = Ragged.of_texts([""] * count)
    spans = Ragged(
        np.array([[p, 0] for p in prompts], np.int64).reshape(-1, 2),
        np.arange(count + 1),
    )
    return Rollouts(
        offsets=offsets_of([len(row) for row in masks]),
        tokens=np.arange(len(mask), dtype=np.int32),
        response_mask=mask,
        row_id=row_id,
        trajectory_id=row_id,
        group_id=row_id if groups is None else np.array(groups, np.int64),
        prompt_length=np.array(prompts, np.int32),
        response_length=np.array(responses, np.int32),
        finish=np.array([Finish.STOP] * count if finish is None else finish, np.int8),
        rollout_log_probs=np.zeros(len(mask), np.float32),
        version_spans=spans,
        **versions_of(spans),
        has_answer=np.ones(count, np.bool_),
        messages=texts,
        data_source=texts,
        answer=texts,
        extra=texts,
    )


def columns_of(rollouts: Rollouts) -> ResponseColumns:
    """What the driver knows of rows whose groups lie one after another."""
    group = rollouts.group_id
    return ResponseColumns(
        finish=rollouts.finish,
        group_id=group,
        trajectory_id=rollouts.trajectory_id,
        length=rollouts.response_length.astype(np.int64),
        is_last=np.append(group[1:] != group[:-1], True),
    )


def on_responses(rollouts: Rollouts, values: Sequence[float]) -> Float32:
    """A token column: these values at the response tokens, one after another, 0
    elsewhere.
    """
    column = np.zeros(rollouts.num_tokens, np.float32)
    column[rollouts.response_mask] = values
    return column


def log_probs_of(rollouts: Rollouts, values: Sequence[float]) -> LogProbs:
    return LogProbs(offsets=rollouts.offsets, log_probs=on_responses(rollouts, values))


def values_of(
    rollouts: Rollouts, values: Sequence[float], final: Sequence[float]
) -> Values:
    return Values(
        offsets=rollouts.offsets,
        values=on_responses(rollouts, values),
        final_value=np.array(final, np.float32),
    )


def rewards_of(
    reward: Sequence[float],
    advantage: Sequence[float] | None = None,
    in_loss: Sequence[bool] | None = None,
) -> RowRewards:
    count = len(reward)
    return RowRewards(
        offsets=np.zeros(count + 1, np.int64),
        reward=np.array(reward, np.float32),
        advantage=np.array(
            [0.0] * count if advantage is None else advantage, np.float32
        ),
        in_loss=np.array([True] * count if in_loss is None else in_loss, bool),
        is_member=np.ones(count, bool),
        is_positive=np.array(reward, np.float32) > 0,
    )
