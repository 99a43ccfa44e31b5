"""Micro-batches and balance: every row once, under the cap, evenly, and by the lengths
alone.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.columns.packing import balance, estimated_work, micro_batches
from verl_ray.errors import DataError

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=200).map(
    lambda values: np.array(values, dtype=np.int64)
)


def first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    """Give each row, from the longest down, to the first set that it fits into."""
    sets: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fitting = (rows for rows in sets if lengths[[*rows, row]].sum() <= cap)
        rows = next(fitting, None)
        if rows is None:
            sets.append(rows := [])
        rows.append(row)
    return [sorted(rows) for rows in sets]


@given(LENGTHS, st.integers(100, 500))
def test_each_row_goes_to_the_first_micro_batch_with_room(
    lengths: np.ndarray, cap: int
) -> None:
    plan = micro_batches(lengths, cap)
    assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
    assert max(lengths[rows].sum() for rows in plan) <= cap
    assert [rows.tolist() for rows in plan] == first_fit_decreasing(lengths, cap)


def test_by_hand() -> None:
    plan = micro_batches(np.array([3, 9, 5, 1]), 10)
    assert [index.tolist() for index in plan] == [[1, 3], [0, 2]]  # 9 + 1 | 5 + 3
    # Five pairs fill 300 tokens each; next-fit (180 | 180 | 180 | 180 | 180 + 120 |
    # 120 + 120 | 120 + 120) would make seven.
    plan = micro_batches(np.repeat([180, 120], 5), 300)
    assert [index.tolist() for index in plan] == [[i, i + 5] for i in range(5)]
    assert micro_batches(np.empty(0, np.int64), 10) == []


def test_a_row_above_the_cap_is_refused_with_its_length_and_the_key() -> None:
    with pytest.raises(
        DataError,
        match=r"row 1 has 11 tokens, .*micro_batch_tokens_per_rank = 10; .* at least 11",
    ):
        micro_batches(np.array([3, 11]), 10)


@given(LENGTHS, st.integers(1, 8))
def test_parts_differ_by_no_more_than_the_longest_row(
    lengths: np.ndarray, parts: int
) -> None:
    found = balance(lengths, parts)
    assert len(found) == parts and sorted(np.concatenate(found)) == list(
        range(len(lengths))
    )
    sums = [int(lengths[index].sum()) for index in found]
    assert max(sums) - min(sums) <= lengths.max()
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_balance_by_hand() -> None:
    assert [index.tolist() for index in balance(np.array([1, 7, 5, 3]), 2)] == [
        [0, 1],
        [2, 3],
    ]  # 7 + 1 | 5 + 3
    assert [index.tolist() for index in balance(np.array([4]), 3)] == [[0], [], []]


def test_rows_of_a_unit_stay_together_wherever_they_are() -> None:
    # Units 9, 4 and 7 of 3 + 5, 2 + 1 + 1 and 9 tokens.
    lengths = np.array([3, 2, 9, 1, 5, 1])
    unit = np.array([9, 4, 7, 4, 9, 4])
    found = micro_batches(lengths, 12, unit=unit)
    assert [rows.tolist() for rows in found] == [[2], [1, 3, 5, 0, 4]]
    with pytest.raises(
        DataError,
        match=r"the 2 rows of unit 9 together have 8 tokens, more than .* = 7; raise that key to at least 8",
    ):
        micro_batches(lengths[[0, 1, 4]], 7, unit=unit[[0, 1, 4]])


@given(LENGTHS, st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_every_unit_is_whole_and_in_order(
    lengths: np.ndarray, seed: int, count: int
) -> None:
    unit = np.random.default_rng(seed).integers(0, count, len(lengths))
    cap = int(np.bincount(unit, weights=lengths).max())
    plan = micro_batches(lengths, cap, unit=unit)
    assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
    for rows in plan:
        assert lengths[rows].sum() <= cap
        numbers = unit[rows]
        # Neighbours, and each unit in one micro-batch.
        assert np.count_nonzero(np.diff(numbers)) == len(set(numbers)) - 1
        assert all(
            rows[numbers == number].tolist() == np.flatnonzero(unit == number).tolist()
            for number in set(numbers)
        )


def test_ranks_that_share_a_micro_batch_hold_a_part_of_it_each() -> None:
    assert [
        rows.tolist() for rows in micro_batches(np.array([20, 19]), 20, peers=2)
    ] == [[0, 1]]
    message = r"row 0 has 40 tokens, more than backend.micro_batch_tokens_per_rank = 19, which 2 ranks share; .* least 20,"
    with pytest.raises(DataError, match=message):
        micro_batches(np.array([40]), 19, peers=2)


def test_work_counts_the_pairs_of_tokens() -> None:
    # 3 tokens see 1 + 2 + 3, and 1 token itself
    assert estimated_work(np.array([3, 1]), 0.5).tolist() == [3 + 0.5 * 6, 1 + 0.5]
    lengths = np.array([10, 6, 6, 1])
    assert [part.tolist() for part in balance(lengths, 2)] == [[0, 3], [1, 2]]
    # 55, 36, 36 and 6 with pairs alone
    assert estimated_work(np.array([10, 8, 8, 3]), 1e9).round(-9).tolist() == [
        55e9,
        36e9,
        36e9,
        6e9,
    ]
