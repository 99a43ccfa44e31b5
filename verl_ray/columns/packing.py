"""Packing of rows into micro-batches, and their partition over ranks.

Invariant: every row is in exactly one micro-batch, no micro-batch holds more tokens
than the cap, and the result depends on nothing but the lengths. Ranks with the same
`dp_rank` (tensor-, pipeline-, context- and sequence-parallel peers) get the same rows,
and exactly one of them returns results.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import Int64
from verl_ray.errors import DataError

Float64 = npt.NDArray[np.float64]


# ------------------------------------------------------------------------ micro-batches


def micro_batches(
    lengths: Int64, max_tokens: int, peers: int = 1, unit: Int64 | None = None
) -> list[Int64]:
    """Return the row indices of each micro-batch.

    There are few of them: first-fit decreasing makes at most 11/9 of the fewest
    possible and 6/9 more (Dosa 2007), and mostly fills all but the last.

    Args:
        lengths: Tokens of each row, int64 [rows].
        max_tokens: Tokens of a micro-batch that one rank may hold.
        peers: This many ranks share a micro-batch.
        unit: int64 [rows], equal for rows that one loss compares or judges; None: each
            row is one. They become neighbours, in their order, wherever they are.

    Raises:
        DataError: a unit is too long by itself.
    """
    if not len(lengths):
        return []
    if unit is not None:
        return _whole_units(lengths, unit, max_tokens, peers)

    cap = max_tokens * peers
    longest = int(lengths.argmax())
    num_tokens = int(lengths[longest])
    if num_tokens > cap:
        raise _too_long(f"row {longest} has", num_tokens, max_tokens, peers, _SHORTER)
    return _pack(lengths, cap)


def equal_micro_batches(
    lengths: Int64, max_tokens: int, unit: Int64 | None = None
) -> list[Int64]:
    """Return the row indices of micro-batches whose rows have the same length.

    Args:
        lengths: Tokens of each row, int64 [rows].
        max_tokens: Tokens of a micro-batch that one rank may hold.
        unit: As in `micro_batches`.

    Raises:
        DataError: a row is too long by itself, or rows of different lengths would have
            to stay together.
    """
    if unit is not None and len(np.unique(unit)) < len(unit):
        raise DataError(
            "rows that one loss judges together (a pair, a trajectory of several rows)"
            " are computed together, and this model computes rows of the same length"
            " alone, since its layers do not keep packed rows apart: set"
            " algorithm.sequence=row, or take another model.path"
        )

    plan = []
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        if length > max_tokens:
            raise _too_long(f"row {rows[0]} has", int(length), max_tokens, 1, _SHORTER)
        count = max_tokens // int(length)
        plan += [rows[start : start + count] for start in range(0, len(rows), count)]
    return plan


def _whole_units(
    lengths: Int64, unit: Int64, max_tokens: int, peers: int
) -> list[Int64]:
    """Return the row indices of each micro-batch, unit after unit."""
    _, number, rows_of = np.unique(unit, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    tokens = np.bincount(number, weights=lengths).astype(np.int64)
    longest = int(tokens.argmax())
    if tokens[longest] > max_tokens * peers:
        name = int(unit[number == longest][0])
        subject = f"the {rows_of[longest]} rows of unit {name} together have"
        apart = "judge rows of a trajectory one by one (algorithm.sequence=row)"
        raise _too_long(subject, int(tokens[longest]), max_tokens, peers, apart)

    # Rows by unit: those of one are at starts[u] to starts[u] + rows_of[u].
    order = np.argsort(number, kind="stable")
    starts = np.cumsum(rows_of) - rows_of
    plan = []
    for units in _pack(tokens, max_tokens * peers):
        count = rows_of[units]
        shift = starts[units] - (np.cumsum(count) - count)
        plan.append(order[np.arange(int(count.sum())) + np.repeat(shift, count)])
    return plan


_SHORTER = (
    "lower data.max_prompt_tokens or rollout.max_response_tokens, or the max_tokens of"
    " a task without rollouts"
)


def _too_long(
    subject: str, num_tokens: int, max_tokens: int, peers: int, other_fix: str
) -> DataError:
    needed = -(-num_tokens // peers)  # rounded up
    return DataError(
        f"{subject} {num_tokens} tokens, more than"
        f" backend.micro_batch_tokens_per_rank = {max_tokens}{_shared(peers)}",
        fix=f"raise that key to at least {needed}, or {other_fix}",
    )


def _shared(peers: int) -> str:
    return f", which {peers} ranks share" if peers > 1 else ""


def _pack(lengths: Int64, max_tokens: int) -> list[Int64]:
    """Pack lengths of at most `max_tokens` by first-fit decreasing.

    From the longest row down, each goes to the first micro-batch that it fits into. So
    what a micro-batch gets depends only on those before it, and each in turn is filled
    with the longest of the rows that remain and fit, a run of neighbours at a time.

    Returns:
        The indices of each micro-batch, ascending. Of equal lengths the first comes
        first.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    ascending = (-descending).tolist()
    starts = [0, *np.cumsum(descending).tolist()]

    # The last entry is no row: a search that comes to it has run out of rows.
    num_rows = len(order)
    remains = np.ones(num_rows + 1, np.bool_)
    batch = np.empty(num_rows, np.int64)
    num_batches = 0
    first = 0

    while first < num_rows:
        start = first
        free_tokens = max_tokens

        # Takes the neighbours that fit, and goes on at the next row that does. Where
        # all neighbours remain, that more than halves what is free: rounds are few.
        while start < num_rows:
            end = bisect_right(starts, starts[start] + free_tokens) - 1
            is_taken = remains[start:end]
            free_tokens -= int(descending[start:end] @ is_taken)
            batch[start:end][is_taken] = num_batches
            is_taken[:] = False

            start = bisect_left(ascending, -free_tokens, end)
            start += int(remains[start:].argmax())

        num_batches += 1
        first += int(remains[first:].argmax())

    batch_of_row = np.empty_like(batch)
    batch_of_row[order] = batch
    rows = np.argsort(batch_of_row, kind="stable")
    return np.split(rows, np.cumsum(np.bincount(batch))[:-1])


# ---------------------------------------------------------------------------- partition


def estimated_work(lengths: Int64, quadratic: float) -> Float64:
    """Cost of each row, in units of one token's matrix products, float64 [rows].

    Args:
        lengths: Tokens of each row, int64 [rows].
        quadratic: Cost of a pair of tokens in attention, as a fraction of that unit. A
            row has a pair for each token and every token up to it.
    """
    work: Float64 = lengths + quadratic * lengths * (lengths + 1.0) / 2
    return work


def balance(work: Int64 | Float64, parts: int) -> list[Int64]:
    """Partition rows into parts of near equal sums of work.

    The rows are assigned in rounds, from the most work down. A round assigns one row to
    each part, the most work to the part that has the least so far. The numbers of rows
    therefore differ by at most one, and a part is empty where there are fewer rows than
    parts.

    Args:
        work: Cost of each row, [rows].

    Returns:
        The row indices of each part, ascending.
    """
    if parts == 1:
        return [np.arange(len(work))]

    order = np.argsort(-work, kind="stable")
    load = np.zeros(parts)
    part = np.empty(len(order), np.int64)

    for first in range(0, len(order), parts):
        assigned = order[first : first + parts]
        receivers = np.argsort(load, kind="stable")[: len(assigned)]
        part[assigned] = receivers
        load[receivers] += work[assigned]

    return [np.flatnonzero(part == index) for index in range(parts)]


def assignment_of_units(
    partition: Callable[[Int64], list[Int64]], lengths: Int64, unit: Int64
) -> list[Int64]:
    """Return the row numbers of each data-parallel rank, ascending, in whole units.

    Ranks get near equal shares of work, as far as units allow.

    Args:
        partition: Returns the numbers of each rank's pieces of work, of some lengths:
            `WorkerGroup.partition` of the role that gets the rows.
        lengths: int64 [rows], tokens of each row.
        unit: int64 [rows], equal for rows that stay together.
    """
    units, number = np.unique(unit, return_inverse=True)
    tokens = np.bincount(number, weights=lengths, minlength=len(units))
    rank_of_unit = np.empty(len(units), np.int64)
    shares = partition(tokens.astype(np.int64))
    for rank, share in enumerate(shares):
        rank_of_unit[share] = rank
    rank_of_row = rank_of_unit[number]
    return [np.flatnonzero(rank_of_row == rank) for rank in range(len(shares))]


# ------------------------------------------------------------------ the place of a rank


@dataclass(frozen=True)
class Topology:
    """The rows that a rank gets, and whether it returns the results for them.

    A worker may carry one as its attribute `topology`. Without it, every rank has its
    own rows and returns results.
    """

    dp_rank: int
    """Data-parallel rank, in [0, dp_size)."""

    dp_size: int
    """Number of parts that a batch's rows are partitioned into."""

    returns_results: bool
    """Whether this rank returns the results of its data-parallel rank."""

    quadratic: float = 0.0
    """Cost of a pair of tokens (attention) relative to the cost of one token."""
