"""Which rows go through a model together, and which rank computes which rows.

Invariant: every row is in exactly one micro-batch, no micro-batch holds more tokens than the cap, and the result
depends on nothing but the lengths. Deliberately not here: moving rows.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from verl_ray.data.batch import Int64
from verl_ray.errors import DataError

Float64 = npt.NDArray[np.float64]


def micro_batches(lengths: Int64, max_tokens: int, unit: int = 1, peers: int = 1) -> list[Int64]:
    """Row indices of each micro-batch, rows of similar length together (attention pads within such a set).

    `lengths` int64 [rows]; each `unit` neighbouring rows stay together, in their order; `peers` ranks share a
    micro-batch, and each may hold `max_tokens` of it. Raises DataError for a unit that is too long by itself.
    """
    if not len(lengths):
        return []
    units = lengths_of_units(lengths, unit)
    worst = int(units.argmax())
    if units[worst] > max_tokens * peers:
        which = f"row {worst} has" if unit == 1 else f"rows {worst * unit} to {worst * unit + unit - 1} together have"
        shared = f", which {peers} ranks share" if peers > 1 else ""
        raise DataError(
            f"{which} {units[worst]} tokens, more than backend.micro_batch_tokens_per_rank = {max_tokens}{shared}; "
            f"raise that key to at least {-(-units[worst] // peers)}, or lower data.max_prompt_tokens or "
            f"rollout.max_response_tokens"
        )
    found = _packed(units, max_tokens * peers)
    return found if unit == 1 else [rows_of_units(chosen, unit) for chosen in found]


def _packed(lengths: Int64, max_tokens: int) -> list[Int64]:
    """As `micro_batches`, of lengths that fit."""
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    cuts = [0]
    while cuts[-1] < len(order):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(np.searchsorted(ends, before + max_tokens, side="right")))
    return [np.sort(order[a:b]) for a, b in pairwise(cuts)]


def lengths_of_units(lengths: Int64, unit: int) -> Int64:
    """Tokens of each `unit` neighbouring rows, int64 [rows / unit]."""
    sums: Int64 = lengths.reshape(-1, unit).sum(axis=1)
    return sums


def rows_of_units(units: Int64, unit: int) -> Int64:
    """The rows of the given units of `unit` neighbouring rows, int64 [units * unit]."""
    rows: Int64 = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    return rows


def estimated_work(lengths: Int64, quadratic: float) -> Float64:
    """What rows cost, in units of one token's matrix products, float64 [rows]. `quadratic`: a pair of tokens as a
    fraction of that; a row has a pair for each token and those before it."""
    work: Float64 = lengths + quadratic * lengths * (lengths + 1.0) / 2
    return work


def balance(work: Int64 | Float64, parts: int) -> list[Int64]:
    """Row indices of each part, ascending: as many rows each, but for one, with near equal sums of work.

    `work` [rows]. Rows are dealt from the most work down, one to each part at a time, the next most to the part that
    has least so far; a part may be empty when there are fewer rows than parts.
    """
    order = np.argsort(-work, kind="stable")
    load = np.zeros(parts)
    part = np.empty(len(order), np.int64)
    for first in range(0, len(order) if parts > 1 else 0, parts):  # rounds of dealing, not rows
        dealt = order[first : first + parts]
        to = np.argsort(load, kind="stable")[: len(dealt)]
        part[dealt] = to
        load[to] += work[dealt]
    return [np.flatnonzero(part == i) for i in range(parts)] if parts > 1 else [np.arange(len(order))]
