"""Rows from the chunks of a rollout engine: whole rollouts, or parts of responses.

Invariant: pure functions of prompts and chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from verl_ray.data.batch import Ragged, offsets_of
from verl_ray.data.stages import (
    UNFINISHED,
    Finish,
    Prompts,
    Responses,
    Rollouts,
    versions_of,
)
from verl_ray.rollout.requests import Chunk


def whole_rollouts(
    prompts: Prompts, prompt_of: Mapping[int, int], chunks: list[Chunk]
) -> Rollouts:
    """Rows of finished responses, each behind its prompt.

    Args:
        prompt_of: The number of each response's prompt, by row id.
        chunks: One whole response each, whose request id is the row id.
    """
    row_id = np.array([chunk.request_id for chunk in chunks], np.int64)
    prompt_rows = prompts.select([prompt_of[chunk.request_id] for chunk in chunks])
    prompt_length = prompt_rows.lengths.astype(np.int32)
    response_length = np.array([len(chunk.tokens) for chunk in chunks], np.int32)

    # A token belongs to the response from the end of its row's prompt on.
    lengths = prompt_length + response_length
    offsets = offsets_of(lengths)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = position >= np.repeat(prompt_length, lengths)

    tokens = np.empty(len(mask), np.int32)
    tokens[~mask] = prompt_rows.tokens
    tokens[mask] = np.concatenate([chunk.tokens for chunk in chunks])
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = np.concatenate([chunk.log_probs for chunk in chunks])
    # The engine counts from the first response token, a rollout from its first token.
    spans = _version_spans(chunks, prompt_length)

    return Rollouts(
        offsets=offsets,
        tokens=tokens,
        response_mask=mask,
        row_id=row_id,
        trajectory_id=row_id,
        group_id=prompt_rows.group_id,
        prompt_length=prompt_length,
        response_length=response_length,
        finish=_finishes(chunks, unfinished=Finish.ABORTED),
        rollout_log_probs=log_probs,
        version_spans=spans,
        **versions_of(spans),
        has_answer=prompt_rows.has_answer,
        messages=prompt_rows.messages,
        data_source=prompt_rows.data_source,
        answer=prompt_rows.answer,
        extra=prompt_rows.extra,
    )


def response_parts(chunks: list[Chunk]) -> Responses:
    """Rows of parts of responses, without their prompts."""
    no_shift = np.zeros(len(chunks), np.int32)
    return Responses(
        offsets=offsets_of(np.array([len(chunk.tokens) for chunk in chunks])),
        request_id=np.array([chunk.request_id for chunk in chunks], np.int64),
        first_token=np.array([chunk.first_token for chunk in chunks], np.int32),
        finish=_finishes(chunks, unfinished=UNFINISHED),
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        log_probs=np.concatenate([chunk.log_probs for chunk in chunks]),
        version_spans=_version_spans(chunks, no_shift),
    )


def _finishes(chunks: list[Chunk], unfinished: int) -> npt.NDArray[np.int8]:
    """The `finish` of each chunk, int8 [chunks], with a number for None."""
    finishes = []
    for chunk in chunks:
        finishes.append(unfinished if chunk.finish is None else chunk.finish)
    return np.array(finishes, np.int8)


def _version_spans(chunks: list[Chunk], shift: npt.NDArray[np.int32]) -> Ragged:
    """Version spans of each chunk, int64 [spans, 2].

    Args:
        shift: Tokens to add to the position of each chunk's spans, int32 [chunks].
    """
    counts = np.array([len(chunk.version_spans) for chunk in chunks])
    pairs = [span for chunk in chunks for span in chunk.version_spans]
    # The shape of an array from an empty list has to be given.
    spans = np.array(pairs, np.int64).reshape(-1, 2)
    spans[:, 0] += np.repeat(shift, counts)
    return Ragged(spans, offsets_of(counts))
