"""Rows as arguments and results of calls: split over ranks, and joined again.

Invariant: results that come back stand in the order of the rows that went out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ray.cluster.context import (
    Value,
)
from verl_ray.columns.batch import Int64
from verl_ray.columns.packing import Topology
from verl_ray.columns.sharded import Receipt, Sharded, join
from verl_ray.errors import DataError

RankReply = tuple[Any, Any]
"""Reference to the batch that one rank stored, and the reply of that rank."""


def check_aligned(role: str, rows: Sharded[Any], others: Sequence[object]) -> None:
    """Raise DataError if a `Sharded` in `others` has another number of rows."""
    for other in others:
        if isinstance(other, Sharded) and len(other) != len(rows):
            raise DataError(
                f"{role}: one argument holds {len(rows)} rows of"
                f" {rows.stage.__name__} and another {len(other)} rows of"
                f" {other.stage.__name__}; all must hold the same number of rows"
            )


def check_assignment(
    role: str, assignment: Sequence[Int64], num_rows: int, dp_size: int
) -> None:
    """Raise DataError unless `assignment` gives each row to one of `dp_size` ranks."""
    num_assigned = sum(map(len, assignment))
    if len(assignment) != dp_size or num_assigned != num_rows:
        raise DataError(
            f"{role}: the assignment holds {num_assigned} rows for"
            f" {len(assignment)} data-parallel ranks, expected {num_rows} rows for"
            f" {dp_size}"
        )

    # A row that is assigned twice, or that does not exist, takes the place of another.
    left_out = np.setdiff1d(np.arange(num_rows), np.concatenate(assignment))
    if len(left_out):
        raise DataError(
            f"{role}: the assignment must hold each of {num_rows} rows once, but it"
            f" lacks {len(left_out)} of them, the first is row {left_out[0]}"
        )


def select_rows(args: tuple[object, ...], indices: Int64) -> tuple[object, ...]:
    """Arguments with every `Sharded` reduced to `indices`, and the others unchanged."""
    return tuple(_select(argument, indices) for argument in args)


def _select(argument: object, indices: Int64) -> object:
    if not isinstance(argument, Sharded):
        return argument

    # A selection of all rows would only copy the index.
    is_whole = len(indices) == len(argument) and _is_identity(indices)
    if is_whole:
        return argument
    return argument.select(indices)


def join_results(
    replies: Sequence[RankReply],
    topologies: Sequence[Topology],
    assignment: Sequence[Int64],
) -> Any:
    """Result of a call whose rows were assigned to data-parallel ranks.

    Args:
        replies: One reply per rank.
        topologies: One topology per rank.
        assignment: Row numbers of each data-parallel rank.

    Returns:
        A `Sharded` in the order of the rows that went out if the method returns
        batches, else a list with one value per data-parallel rank.
    """
    ordered = _in_order_of_dp_rank(replies, topologies)
    _, first_reply = ordered[0]
    if not isinstance(first_reply, Receipt):
        return [reply.value for _, reply in ordered]

    order = np.empty(0, np.int64)
    if assignment:
        order = np.concatenate(assignment)

    parts = [Sharded.stored(payload, reply) for payload, reply in ordered]
    if len(parts) == 1 and _is_identity(order):
        return parts[0]
    return join(parts, order)


def result_of_replica(replies: Sequence[RankReply]) -> Any:
    """Result of the rank that replies for its replica: a `Sharded` or a value."""
    payload, reply = next(pair for pair in replies if pair[1] is not None)
    if isinstance(reply, Receipt):
        return Sharded.stored(payload, reply)
    return reply.value


def plain_value(reply: Any) -> Any:
    """Value of a reply that holds no batch.

    Raises:
        DataError: The reply holds a batch, whose rows would have no order.
    """
    if isinstance(reply, Value):
        return reply.value
    raise DataError(
        f"a method that returns {reply.stage.__name__} must be called by scatter or"
        " route"
    )


def _in_order_of_dp_rank(
    replies: Sequence[RankReply], topologies: Sequence[Topology]
) -> list[RankReply]:
    """Replies of the ranks that return results, by data-parallel rank."""
    by_dp_rank: dict[int, RankReply] = {}
    for reply, topology in zip(replies, topologies, strict=True):
        if topology.returns_results:
            by_dp_rank[topology.dp_rank] = reply
    return [by_dp_rank[dp_rank] for dp_rank in sorted(by_dp_rank)]


def _is_identity(order: Int64) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))
