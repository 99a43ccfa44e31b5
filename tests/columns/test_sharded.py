"""Rows by reference against plain lists: a driver's index arithmetic finds every row
again, and holds no token.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.columns.batch import offsets_of
from verl_ray.columns.sharded import Receipt, Sharded, join
from verl_ray.columns.stages import LogProbs, Rows, Values
from verl_ray.errors import DataError

Store = list[Values]


def stored(store: Store, first: int, lengths: list[int]) -> Sharded[Values]:
    """Rows numbered from `first`; row n holds the value n at each of its tokens, and 10
    n at its end.
    """
    numbers = np.arange(first, first + len(lengths), dtype=np.float32)
    values = np.repeat(numbers, lengths).astype(np.float32)
    store.append(
        Values(offsets=offsets_of(lengths), values=values, final_value=10 * numbers)
    )
    return Sharded.stored(len(store) - 1, Receipt.of(store[-1]))


def read(rows: Sharded[Values], store: Store) -> Values:
    def fetch(references: Sequence[int]) -> list[Values]:
        return [store[reference] for reference in references]

    return rows.read(fetch)


def check(
    rows: Sharded[Values], store: Store, expected: list[int], lengths: list[int]
) -> None:
    batch = read(rows, store)
    assert batch.final_value.tolist() == [10 * n for n in expected]
    assert (
        batch.lengths.tolist()
        == rows.lengths.tolist()
        == [lengths[n] for n in expected]
    )
    assert batch.values.tolist() == [n for n in expected for _ in range(lengths[n])]
    assert rows.row("final_value").tolist() == [10 * n for n in expected]


pieces_strategy = st.lists(
    st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4
)


@given(pieces=pieces_strategy, data=st.data())
def test_any_chain_of_selections_reads_the_rows_it_names(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    store: Store = []
    lengths = [length for piece in pieces for length in piece]
    firsts = np.cumsum([0, *map(len, pieces)]).tolist()
    rows = Sharded.concat(
        [
            stored(store, first, piece)
            for first, piece in zip(firsts, pieces, strict=False)
        ]
    )
    expected = list(range(len(lengths)))
    check(rows, store, expected, lengths)
    for _ in range(3):
        index = data.draw(
            st.lists(st.integers(0, len(expected) - 1), max_size=7)
            if expected
            else st.just([])
        )
        rows, expected = rows.select(index), [expected[i] for i in index]
        check(rows, store, expected, lengths)
        assert len(rows.parts) <= max(
            1, len(set(rows.part.tolist()))
        )  # parts nobody refers to are let go


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=9), data=st.data())
def test_what_is_split_in_any_way_is_joined_in_the_old_order(
    lengths: list[int], data: st.DataObject
) -> None:
    store: Store = []
    rows = stored(store, 0, lengths)
    shuffled = np.array(data.draw(st.permutations(range(len(lengths)))), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    assignment = np.split(shuffled, cuts)
    check(
        join(rows.split(assignment), np.concatenate(assignment)),
        store,
        list(range(len(lengths))),
        lengths,
    )


def test_a_whole_part_is_read_in_place_and_neighbours_are_views() -> None:
    store: Store = []
    rows = stored(store, 0, [2, 3, 1])
    assert read(rows, store) is store[0]
    assert np.shares_memory(read(rows.select([1, 2]), store).values, store[0].values)
    assert not np.shares_memory(
        read(rows.select([2, 0]), store).values, store[0].values
    )


def test_no_rows_still_know_their_columns() -> None:
    store: Store = []
    nothing = stored(store, 0, [2, 3]).select([])
    assert len(nothing) == 0
    assert read(nothing, store).final_value.shape == (0,)


def test_a_driver_holds_nothing_that_grows_with_tokens() -> None:
    def size(tokens: int) -> int:
        return len(pickle.dumps(stored([], 0, [tokens] * 8)))

    assert size(50_000) == size(5)


def test_a_receipt_does_not_keep_the_batch_alive() -> None:
    batch = Values(
        offsets=offsets_of([1, 1]),
        values=np.ones(2, np.float32),
        final_value=np.ones(2, np.float32),
    )
    assert not np.shares_memory(
        Receipt.of(batch).columns["final_value"], batch.final_value
    )


def test_mistakes_are_named() -> None:
    rows = stored([], 0, [1])
    with pytest.raises(
        DataError, match=r"Values has no row column 'score'; it has \['final_value'\]"
    ):
        rows.row("score")
    other = LogProbs(offsets=offsets_of([1]), log_probs=np.zeros(1, np.float32))
    with pytest.raises(
        DataError, match=r"rows of one stage expected, found \['LogProbs', 'Values'\]"
    ):
        Sharded.concat([rows, Sharded.stored(0, Receipt.of(other))])  # type: ignore[list-item]
    with pytest.raises(DataError, match="rows of one stage expected"):
        Sharded.concat([])


def test_stages_without_row_columns_can_be_joined() -> None:
    batch = Rows(
        offsets=offsets_of([2, 1]),
        tokens=np.arange(3, dtype=np.int32),
        response_mask=np.zeros(3, bool),
    )
    rows = Sharded.stored(0, Receipt.of(batch))
    joined = Sharded.concat([rows, rows]).select([3, 0])
    assert joined.read(
        lambda references: [batch for _ in references]
    ).tokens.tolist() == [2, 0, 1]
