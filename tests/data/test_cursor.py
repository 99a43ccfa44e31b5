"""The cursor draws the same rows however the draws are cut and resumed, and every epoch
is a permutation.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.data.batch import Ragged
from verl_ray.data.cursor import Cursor, drawn_rows, fingerprint
from verl_ray.data.stages import Prompts
from verl_ray.errors import CheckpointError, DataError


def prompts(count: int, answer: str = "1") -> Prompts:
    texts = Ragged.of_texts([answer] * count)
    return Prompts(
        offsets=np.arange(count + 1),
        group_id=np.arange(count),
        tokens=np.arange(count, dtype=np.int32),
        messages=texts,
        data_source=texts,
        answer=texts,
        extra=texts,
    )


@given(
    rows=st.integers(1, 17),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    draws=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
)
def test_any_cut_and_any_resume_draws_the_same_sequence(
    rows: int, seed: int, shuffle: bool, draws: list[tuple[int, bool]]
) -> None:
    data = prompts(rows)
    total = sum(count for count, _ in draws)
    expected = Cursor(data, seed=seed, shuffle=shuffle).draw(total)
    cursor = Cursor(data, seed=seed, shuffle=shuffle)
    drawn = []
    for count, resume in draws:
        if resume:
            state = json.loads(json.dumps(cursor.state()))
            cursor = Cursor(data, seed=seed, shuffle=shuffle)
            cursor.load_state(state)
        drawn += cursor.draw(count).tolist()
    assert drawn == expected.tolist()
    assert (cursor.epoch, cursor.position) == divmod(total, rows)


@given(
    rows=st.integers(1, 50),
    seed=st.integers(0, 2**32),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_every_epoch_is_a_permutation(
    rows: int, seed: int, epochs: int, shuffle: bool
) -> None:
    drawn = (
        Cursor(prompts(rows), seed=seed, shuffle=shuffle)
        .draw(rows * epochs)
        .reshape(epochs, rows)
    )
    assert (np.sort(drawn, axis=1) == np.arange(rows)).all()
    if not shuffle:
        assert (drawn == np.arange(rows)).all()


def test_epochs_and_seeds_differ_in_their_order() -> None:
    first = Cursor(prompts(100), seed=0, shuffle=True).draw(200)
    other = Cursor(prompts(100), seed=1, shuffle=True).draw(100)
    assert (first[:100] != first[100:]).any()
    assert (first[:100] != other).any()


def test_a_draw_may_span_several_epochs() -> None:
    cursor = Cursor(prompts(3), seed=0, shuffle=False)
    assert cursor.draw(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (cursor.epoch, cursor.position, cursor.drawn) == (2, 2, 8)
    assert cursor.draw(2).tolist() == [2, 0]


def test_resuming_on_changed_data_names_what_changed() -> None:
    state = Cursor(prompts(4), seed=0, shuffle=True).state()
    with pytest.raises(DataError, match=r"rows was 4, is 5.*data\.train_path"):
        Cursor(prompts(5), seed=0, shuffle=True).load_state(state)
    with pytest.raises(DataError, match="fingerprint was"):
        Cursor(prompts(4, answer="2"), seed=0, shuffle=True).load_state(state)
    with pytest.raises(DataError, match=r"\(seed was 0, is 1\)"):
        Cursor(prompts(4), seed=1, shuffle=True).load_state(state)
    with pytest.raises(DataError, match=r"\(shuffle was 1, is 0\)"):
        Cursor(prompts(4), seed=0, shuffle=False).load_state(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"drawn": 5},  # what was drawn twice
        {"drawn": 21},  # what was left out, by whole epochs
        {"epoch": 2},
        {"position": 0},
        {"drawn": -3, "epoch": -1, "position": 7},
        {"drawn": "11"},
        {"epoch": None},
    ],
)
def test_a_place_that_contradicts_itself_is_refused(changes: dict[str, int]) -> None:
    cursor = Cursor(prompts(10), seed=0, shuffle=True)
    cursor.draw(11)
    state = cursor.state()
    assert (state["drawn"], state["epoch"], state["position"]) == (
        11,
        1,
        1,
    ) and drawn_rows(state) == 11
    again = Cursor(prompts(10), seed=0, shuffle=True)
    with pytest.raises(
        CheckpointError,
        match=r"contradicts itself \(rows = 10, .*drawn = epoch \* rows \+ position",
    ):
        again.load_state({**state, **changes})
    assert again.drawn == 0


def test_fingerprint_sees_values_and_where_rows_begin() -> None:
    data = prompts(3)
    assert fingerprint(data) == fingerprint(prompts(3))
    assert fingerprint(data) != fingerprint(
        data.replace(tokens=np.array([0, 1, 3], dtype=np.int32))
    )
    assert fingerprint(data) != fingerprint(
        data.replace(answer=Ragged.of_texts(["", "11", "1"]))
    )
    assert fingerprint(data) != fingerprint(
        data.replace(extra=Ragged.of_texts(["1", "1", "2"]))
    )
