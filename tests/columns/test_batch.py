"""Batches against plain Python lists: whatever is split, selected or joined, every row
keeps its own values.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.columns.batch import Batch, Ragged, offsets_of, ragged, row, token
from verl_ray.columns.stages import Prompts, Rows, Scores
from verl_ray.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sample(Batch):
    """One column of every kind."""

    number: np.ndarray = row(np.int64)
    pair: np.ndarray = row(np.float64, 2)
    tokens: np.ndarray = token(np.int32)
    extra: np.ndarray | None = token(np.float32, 3, optional=True)
    text: Ragged = ragged(np.uint8)


PlainRow = tuple[int, list[int], str]  # number, tokens, text


def batch_of(rows: list[PlainRow]) -> Sample:
    tokens = np.array([t for _, values, _ in rows for t in values], np.int32)
    return Sample(
        offsets=offsets_of([len(values) for _, values, _ in rows]),
        number=np.array([number for number, _, _ in rows], np.int64),
        pair=np.array([[number, -number] for number, _, _ in rows], np.float64).reshape(
            -1, 2
        ),
        tokens=tokens,
        extra=np.repeat(tokens.astype(np.float32), 3).reshape(-1, 3),
        text=Ragged.of_texts([text for _, _, text in rows]),
    )


def plain(batch: Sample) -> list[PlainRow]:
    """The rows, after a look at the columns that repeat others."""
    assert batch.pair.tolist() == [
        [number, -number] for number in batch.number.tolist()
    ]
    assert batch.extra is not None and batch.extra.tolist() == [
        [t, t, t] for t in batch.tokens.tolist()
    ]
    pieces = np.split(batch.tokens, batch.offsets[1:-1]) if batch.num_rows else []
    return [
        (number, piece.tolist(), text)
        for number, piece, text in zip(
            batch.number.tolist(), pieces, batch.text.texts(), strict=True
        )
    ]


rows_strategy = st.lists(
    st.tuples(
        st.integers(-9, 9),
        st.lists(st.integers(0, 99), max_size=5),
        st.text(max_size=4),
    ),
    max_size=8,
)
equal_rows = st.integers(0, 3).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.integers(-9, 9),
            st.lists(st.integers(0, 99), min_size=width, max_size=width),
            st.just("ab"),
        ),
        max_size=8,
    )
)


@given(rows=st.one_of(rows_strategy, equal_rows), data=st.data())
def test_select_takes_rows_in_any_order_and_more_than_once(
    rows: list[PlainRow], data: st.DataObject
) -> None:
    chosen = data.draw(
        st.lists(st.integers(0, len(rows) - 1), max_size=10) if rows else st.just([])
    )
    assert plain(batch_of(rows).select(chosen)) == [rows[i] for i in chosen]


@given(rows=rows_strategy, data=st.data())
def test_split_and_concat_are_each_others_inverse(
    rows: list[PlainRow], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    parts = batch_of(rows).split([b - a for a, b in itertools.pairwise(bounds)])
    assert [plain(part) for part in parts] == [
        rows[a:b] for a, b in itertools.pairwise(bounds)
    ]
    assert plain(Sample.concat(parts)) == rows


@given(rows=rows_strategy)
def test_pickling_keeps_every_row_and_sends_every_column_out_of_band(
    rows: list[PlainRow],
) -> None:
    batch = batch_of(rows)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(stream, buffers=buffers)
    assert plain(loaded) == rows
    assert (
        len(buffers) == 7
    )  # offsets, number, pair, tokens, extra, and the two arrays of a ragged column
    if batch.num_tokens:
        assert np.shares_memory(loaded.tokens, batch.tokens)


def test_the_pickled_stream_does_not_grow_with_tokens() -> None:
    def stream(tokens: int) -> int:
        batch = batch_of([(1, [7] * tokens, "x")])
        return len(pickle.dumps(batch, protocol=5, buffer_callback=lambda buffer: None))

    assert stream(100_000) - stream(10) < 16


def test_neighbours_are_views_and_others_are_copies() -> None:
    batch = batch_of([(i, [i] * (i + 1), str(i)) for i in range(5)])
    near, far = batch.select([1, 2, 3]), batch.select([3, 1])
    for name in ("tokens", "number", "pair", "extra"):
        assert np.shares_memory(getattr(near, name), getattr(batch, name))
        assert not np.shares_memory(getattr(far, name), getattr(batch, name))
    assert np.shares_memory(near.text.values, batch.text.values)


def test_nothing_of_a_batch_can_be_written() -> None:
    source = np.array([1, 2, 3], np.int32)
    batch = Rows(
        offsets=offsets_of([1, 2]), tokens=source, response_mask=np.zeros(3, bool)
    )
    for array in (
        batch.offsets,
        batch.tokens,
        batch.response_mask,
        batch.select([1, 0]).tokens,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = source  # type: ignore[misc]
    source[0] = 5  # the caller's own array stays writable


def test_rows_without_tokens_and_no_rows_at_all() -> None:
    batch = batch_of([(1, [], ""), (2, [4], "é"), (3, [], "")])
    assert batch.lengths.tolist() == [0, 1, 0]
    assert batch.row_of_token.tolist() == [1]
    nothing = batch.select([])
    assert (nothing.num_rows, nothing.num_tokens, nothing.text.texts()) == (0, 0, [])
    assert plain(Sample.concat([nothing, batch, nothing])) == plain(batch)


def test_ragged_rows_by_index() -> None:
    spans = Ragged.of_rows([[[0, 1], [4, 2]], [[3, 3]]], np.int64)
    assert spans[0].tolist() == [[0, 1], [4, 2]]
    assert spans.select(np.array([1, 0])).values.tolist() == [[3, 3], [0, 1], [4, 2]]
    assert Ragged.of_rows([], np.int64).offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros(2, np.int64)}, r"tokens: expected int32 \(3,\) \(token column of 2 rows\), found int64"),
        ({"tokens": np.zeros(4, np.int32)}, r"expected int32 \(3,\).*found int32 \(4,\)"),
        ({"tokens": [1, 2, 3]}, r"found list"),
        ({"response_mask": None}, r"Rows.response_mask: expected bool \(3,\).*found NoneType"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_fit_is_refused(
    changes: dict[str, object], message: str
) -> None:
    columns = {"tokens": np.zeros(3, np.int32), "response_mask": np.zeros(3, bool)}
    with pytest.raises(DataError, match=message):
        Rows(offsets=offsets_of([1, 2]), **(columns | changes))  # type: ignore[arg-type]


def test_a_ragged_column_of_another_number_of_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"Scores.detail: 1 rows, expected 2"):
        Scores(offsets=np.zeros(3, np.int64), score=np.zeros(2, np.float32), health=np.zeros(2, np.int8),
               detail=Ragged.of_texts(["x"]), rescored=np.zeros(2, bool), has_entries=np.zeros(2, bool),
               entries=Ragged.of_texts(["", ""]))  # fmt: skip


def test_rows_that_are_not_there_are_refused() -> None:
    batch = batch_of([(1, [1], "a"), (2, [2], "b")])
    with pytest.raises(DataError, match=r"rows up to 2 were requested, there are 2"):
        batch.select([0, 2])
    with pytest.raises(DataError, match=r"Sample: "):
        batch.select([-1])
    with pytest.raises(DataError, match=r"parts of \[1, 2\] rows do not add up to 2"):
        batch.split([1, 2])


def test_parts_must_agree_on_optional_columns() -> None:
    batch = batch_of([(1, [1], "a")])
    bare = batch.replace(extra=None)
    assert Sample.concat([bare, bare]).extra is None
    with pytest.raises(DataError, match=r"Sample.extra: 1 of 2 parts lack this column"):
        Sample.concat([batch, bare])


def test_row_columns_are_what_a_driver_plans_on() -> None:
    texts = Ragged.of_texts(["a", "b"])
    prompts = Prompts(
        offsets=offsets_of([1, 1]), group_id=np.array([4, 5]), has_answer=np.array([True, False]),
        tokens=np.zeros(2, np.int32), messages=texts, data_source=texts, answer=texts, extra=texts,
    )  # fmt: skip
    assert {
        name: values.tolist() for name, values in prompts.row_columns().items()
    } == {"group_id": [4, 5], "has_answer": [True, False]}
