from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.crew import Echo, Paired, answers, rows_of
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.context import CONCURRENCY_GROUPS, SERVING
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.packing import balance
from verl_ray.errors import DataError

Crew = Callable[..., WorkerGroup[Any]]
LENGTHS = [3, 5, 2, 4, 1]


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 7))
def test_balanced_parts_hold_every_row_once_in_ascending_order(
    lengths: list[int], parts: int
) -> None:
    chosen = balance(np.array(lengths, dtype=np.int64), parts)
    assert len(chosen) == parts
    assert sorted(np.concatenate(chosen).tolist()) == list(range(len(lengths)))
    assert all(bool(np.all(np.diff(index) > 0)) for index in chosen)
    counts = [len(index) for index in chosen]
    assert max(counts) - min(counts) <= 1


def test_balanced_parts_have_nearly_equal_tokens() -> None:
    # From long to short 8 7 6 5 4 3 2 1, dealt 0 1 1 0 0 1 1 0: 8 + 5 + 4 + 1 and 7 + 6
    # + 3 + 2.
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert [int(lengths[index].sum()) for index in balance(lengths, 2)] == [18, 18]


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_scatter_returns_rows_in_the_order_they_went_out(
    crew: Crew, ranks: int
) -> None:
    group = crew(Echo, ranks)
    batch = rows_of(LENGTHS)
    rows = put(batch).select([4, 0, 3, 1, 2])
    expected = batch.select([4, 0, 3, 1, 2])

    halves = group.scatter(Echo.halve, rows).result()
    assert halves.lengths.tolist() == [1, 3, 4, 5, 2]
    answer = read(halves, 5)
    assert np.array_equal(answer.log_probs, expected.tokens / 2)
    assert np.array_equal(answer.offsets, expected.offsets)

    sums = group.scatter(Echo.sum_with, rows, halves, 4).result()
    assert np.array_equal(read(sums, 5).log_probs, expected.tokens * 3)

    assert sorted(
        itertools.chain(*group.scatter(Echo.first_tokens, rows).result())
    ) == [0, 1000, 2000, 3000, 4000]


@pytest.mark.cluster
def test_scatter_follows_topology_and_assignment(crew: Crew) -> None:
    group = crew(Paired, 4)
    rows = put(rows_of(LENGTHS))
    assert group.dp_size == 2
    first = group.scatter(
        Echo.first_tokens, rows, assignment=[np.array([4, 1]), np.array([0, 2, 3])]
    ).result()
    assert first == [[4000, 1000], [0, 2000, 3000]]
    answer = group.scatter(
        Echo.halve, rows, assignment=[np.array([4, 1]), np.array([0, 2, 3])]
    ).result()
    assert np.array_equal(read(answer, 5).log_probs, rows_of(LENGTHS).tokens / 2)
    assert (
        len(set(group.broadcast(Echo.pid).result())) == 4
    )  # not about rows: each rank speaks for itself
    with pytest.raises(
        DataError,
        match="the assignment holds 4 rows for 2 data-parallel ranks, expected 5 rows",
    ):
        group.scatter(Echo.halve, rows, assignment=[np.array([0, 1]), np.array([2, 3])])
    with pytest.raises(DataError, match=r"lacks 1 of them, the first is row 2$"):
        group.stream(
            Echo.one_by_one,
            rows,
            0.0,
            assignment=[np.array([0, 1]), np.array([3, 4, 4])],
        )
    with pytest.raises(
        DataError, match="one argument holds 5 rows of Rows and another 3 rows of Rows"
    ):
        group.scatter(Echo.sum_with, rows, rows.select([0, 1, 2]), 1)


@pytest.mark.cluster
def test_one_group_through_every_other_verb(crew: Crew) -> None:
    group = crew(Echo, 2)
    single, rows = put(rows_of([3])), put(rows_of(LENGTHS))
    # A rank without rows is called all the same.
    assert group.scatter(Echo.count, single).result() == [3, 0]
    assert np.array_equal(
        read(group.scatter(Echo.halve, single).result(), 5).log_probs, [0, 0.5, 1]
    )

    pids = group.broadcast(Echo.pid).result()
    assert len(set(pids)) == 2
    assert group.rank_zero(Echo.pid).result() == pids[0]
    assert [info.pid for info in answers(group, "process_info")] == pids

    # Calls arrive in the order they were made, and none waits for the one before.
    calls = [group.broadcast(Echo.remember, number) for number in range(100)]
    assert group.broadcast(Echo.remembered).result() == [list(range(100))] * 2
    wait_all(calls)

    # A replica of choice, or the one with the fewest open calls.
    assert group.route(Echo.first_tokens, rows, replica=1).result() == [
        0,
        1000,
        2000,
        3000,
        4000,
    ]
    routed = [group.route(Echo.halve, rows) for _ in range(4)]
    assert [int(read(answer, 5).num_rows) for answer in wait_all(routed)] == [5] * 4


@pytest.mark.cluster
def test_stream_yields_pieces_as_they_finish_anywhere(crew: Crew) -> None:
    group = crew(Echo, 2)
    rows = put(rows_of([1] * 6))
    halves = [np.array([0, 1, 2]), np.array([3, 4, 5])]
    pieces = group.stream(Echo.one_by_one, rows, 0.3, assignment=halves)
    arrived = [read(piece, 5).log_probs[0] * 2 // 1000 for piece in pieces]
    # Rank 0 pauses 0.3 s before each piece and rank 1 0.6 s: so no rank waits for the
    # other one to be done.
    assert sorted(arrived) == [0, 1, 2, 3, 4, 5]
    assert arrived.index(0) < arrived.index(5) and arrived.index(3) < 5
    # A replica without rows is not called, and a listener who leaves stops the
    # replicas. Both of them have begun by then.
    parts = [np.arange(1500), np.arange(1500, 3000)]
    pieces = group.stream(
        Echo.one_by_one, put(rows_of([1] * 3000)), 0.2, assignment=parts
    )
    begun = set()
    while len(begun) < 2:
        begun.add(read(next(pieces), 5).log_probs[0] * 2 // 1000 < 1500)
    pieces.close()
    assert group.broadcast(Echo.was_aborted).result() == [
        True,
        True,
    ]  # all 3000 pieces would take 10 minutes
    assert len(list(group.stream(Echo.one_by_one, put(rows_of([1])), 0.0))) == 1


@pytest.mark.cluster
def test_what_steers_calls_that_are_served_waits_for_none_of_them(crew: Crew) -> None:
    group = crew(Echo, 1)
    waiting = [
        group.broadcast(Echo.wait_at_the_gate)
        for _ in range(CONCURRENCY_GROUPS[SERVING] + 3)
    ]
    group.broadcast(Echo.open_the_gate).result()
    assert all(
        call.result() == [True] for call in waiting
    )  # False from one that waited in vain


@pytest.mark.cluster
def test_a_stream_that_is_served_ends_alone(crew: Crew) -> None:
    group = crew(Echo, 1)
    pieces = group.stream(Echo.number_at_the_gate, put(rows_of([1])))
    next(pieces)
    pieces.close()
    assert group.broadcast(Echo.wait_at_the_gate).result() == [True]
    assert group.broadcast(Echo.was_aborted).result() == [False]


@pytest.mark.cluster
def test_arguments_are_read_in_place_and_the_driver_never_holds_tokens(
    crew: Crew,
) -> None:
    group = crew(Echo, 2)
    seeds = put(rows_of([1] * 40))
    group.scatter(Echo.count, seeds).result()
    driver = psutil.Process()
    before = driver.memory_info().rss
    rows = group.scatter(
        Echo.make_long, seeds
    ).result()  # 40 rows of a million tokens, 5 bytes each
    assert rows.num_tokens == 40_000_000
    assert sum(group.scatter(Echo.count, rows).result()) == 40_000_000
    group.scatter(Echo.halve, rows).result()
    assert driver.memory_info().rss - before < 20e6
