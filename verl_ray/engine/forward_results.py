"""Results of a forward pass, joined over its micro-batches.

Invariant: every number is at the position of its token or row in the batch of the
call, whatever micro-batch computed it. All else is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rows
from verl_ray.engine.base import (
    ForwardResult,
)
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs


def join_column(
    results: Sequence[TokenOutputs],
    name: str,
    positions: Sequence[Int64],
    size: int,
) -> np.ndarray[Any, Any] | None:
    """Join one output of all micro-batches to a column on the host.

    Args:
        results: The outputs of each micro-batch.
        name: The output to join.
        positions: The places of each micro-batch's numbers in the column.
        size: The length of the column.

    Returns:
        The column, [size] or [size, width], or None if the output was not requested.
    """
    parts = [getattr(result, name) for result in results]
    if parts[0] is None:
        return None

    values = torch.cat(parts).cpu().numpy()
    column = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    column[np.concatenate(positions)] = values
    return column


def zero_result(rows: Rows, outputs: RequestedOutputs) -> ForwardResult:
    """Return zeros for every requested output, on a rank that computes none."""

    def zeros(requested: bool, size: int | tuple[int, int], dtype: Any) -> Any:
        if not requested:
            return None
        return np.zeros(size, dtype)

    tokens = rows.num_tokens
    has_top = outputs.top is not None
    top = tokens, 0 if outputs.top is None else outputs.top.count
    return ForwardResult(
        log_probs=zeros(outputs.log_probs, tokens, np.float32),
        entropy=zeros(outputs.entropy, tokens, np.float32),
        greedy=zeros(outputs.greedy, tokens, np.bool_),
        squared_probs=zeros(outputs.squared_probs, tokens, np.float32),
        values=zeros(outputs.values, tokens, np.float32),
        top_tokens=zeros(has_top, top, np.int64),
        top_log_probs=zeros(has_top, top, np.float32),
        scores=zeros(outputs.scores, rows.num_rows, np.float32),
    )
