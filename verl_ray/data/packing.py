"""Which rows go through a model together, and which rank computes which rows.

Invariant: every row is in exactly one micro-batch, no micro-batch holds more tokens than the cap, and the result
depends on nothing but the lengths. Deliberately not here: moving rows.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.errors import DataError


def micro_batches(lengths: Int64, max_tokens: int) -> list[Int64]:
    """Row indices of each micro-batch, rows of similar length together (attention pads within such a set).

    `lengths` int64 [rows]. Raises DataError for a row that exceeds `max_tokens` by itself.
    """
    if not len(lengths):
        return []
    worst = int(lengths.argmax())
    if lengths[worst] > max_tokens:
        raise DataError(
            f"row {worst} has {lengths[worst]} tokens, more than backend.micro_batch_tokens_per_rank = {max_tokens}; "
            f"raise that key to at least {lengths[worst]}, or lower data.max_prompt_tokens or "
            f"rollout.max_response_tokens"
        )
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    cuts = [0]
    while cuts[-1] < len(order):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(np.searchsorted(ends, before + max_tokens, side="right")))
    return [np.sort(order[a:b]) for a, b in pairwise(cuts)]


def balance(lengths: Int64, parts: int) -> list[Int64]:
    """Row indices of each part, ascending, with near equal sums of tokens: longest rows first, dealt back and forth.

    `lengths` int64 [rows]; a part may be empty when there are fewer rows than parts.
    """
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) % (2 * parts)
    part = np.where(turn < parts, turn, 2 * parts - 1 - turn)
    return [np.sort(order[part == i]) for i in range(parts)]
