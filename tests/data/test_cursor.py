"""The cursor draws the same rows however the draws are cut and resumed, and every epoch
is a permutation.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Prompts
from verl_ray.data.cursor import Cursor, Mixture, drawn_rows, fingerprint
from verl_ray.errors import CheckpointError, DataError


def prompts(count: int, answer: str = "1") -> Prompts:
    texts = Ragged.of_texts([answer] * count)
    return Prompts(
        offsets=np.arange(count + 1),
        group_id=np.arange(count),
        has_answer=np.ones(count, np.bool_),
        tokens=np.arange(count, dtype=np.int32),
        messages=texts,
        data_source=texts,
        answer=texts,
        extra=texts,
    )


def rows_of(count: int, answer: str = "1") -> tuple[Mixture, str]:
    return Mixture((count,), (1.0,)), fingerprint(prompts(count, answer))


@given(
    rows=st.integers(1, 17),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    draws=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
)
def test_any_cut_and_any_resume_draws_the_same_sequence(
    rows: int, seed: int, shuffle: bool, draws: list[tuple[int, bool]]
) -> None:
    data = rows_of(rows)
    total = sum(count for count, _ in draws)
    expected = Cursor(*data, seed=seed, shuffle=shuffle).draw(total)
    cursor = Cursor(*data, seed=seed, shuffle=shuffle)
    drawn = []
    for count, resume in draws:
        if resume:
            state = json.loads(json.dumps(cursor.state()))
            cursor = Cursor(*data, seed=seed, shuffle=shuffle)
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
        Cursor(*rows_of(rows), seed=seed, shuffle=shuffle)
        .draw(rows * epochs)
        .reshape(epochs, rows)
    )
    assert (np.sort(drawn, axis=1) == np.arange(rows)).all()
    if not shuffle:
        assert (drawn == np.arange(rows)).all()


def test_epochs_and_seeds_differ_in_their_order() -> None:
    first = Cursor(*rows_of(100), seed=0, shuffle=True).draw(200)
    other = Cursor(*rows_of(100), seed=1, shuffle=True).draw(100)
    assert (first[:100] != first[100:]).any()
    assert (first[:100] != other).any()


def test_a_draw_may_span_several_epochs() -> None:
    cursor = Cursor(*rows_of(3), seed=0, shuffle=False)
    assert cursor.draw(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (cursor.epoch, cursor.position, cursor.drawn) == (2, 2, 8)
    assert cursor.draw(2).tolist() == [2, 0]


def test_resuming_on_changed_data_names_what_changed() -> None:
    state = Cursor(*rows_of(4), seed=0, shuffle=True).state()
    with pytest.raises(DataError, match=r"rows was 4, is 5.*data\.train_path"):
        Cursor(*rows_of(5), seed=0, shuffle=True).load_state(state)
    with pytest.raises(DataError, match="records was"):
        Cursor(*rows_of(4, answer="2"), seed=0, shuffle=True).load_state(state)
    with pytest.raises(DataError, match=r"\(seed was 0, is 1\)"):
        Cursor(*rows_of(4), seed=1, shuffle=True).load_state(state)
    with pytest.raises(DataError, match=r"\(shuffle was 1, is 0\)"):
        Cursor(*rows_of(4), seed=0, shuffle=False).load_state(state)


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
    cursor = Cursor(*rows_of(10), seed=0, shuffle=True)
    cursor.draw(11)
    state = cursor.state()
    assert (state["drawn"], state["epoch"], state["position"]) == (
        11,
        1,
        1,
    ) and drawn_rows(state) == 11
    again = Cursor(*rows_of(10), seed=0, shuffle=True)
    with pytest.raises(
        CheckpointError,
        match=r"contradicts itself \(rows = 10, .*drawn \+ passed = epoch \* rows",
    ):
        again.load_state({**state, **changes})
    assert again.drawn == 0


def test_rows_that_are_passed_over_count_apart() -> None:
    cursor = Cursor(*rows_of(5), seed=0, shuffle=False)
    assert cursor.draw(4).tolist() == [0, 1, 2, 3]
    cursor.pass_over(3)
    assert (cursor.drawn, cursor.passed, cursor.position) == (1, 3, 4)
    assert cursor.draw(2).tolist() == [4, 0]

    state = json.loads(json.dumps(cursor.state()))
    assert (state["drawn"], state["passed"]) == (3, 3) and drawn_rows(state) == 3
    again = Cursor(*rows_of(5), seed=0, shuffle=False)
    again.load_state(state)
    assert again.draw(3).tolist() == [1, 2, 3] == cursor.draw(3).tolist()
    with pytest.raises(CheckpointError, match="passed = 2"):
        again.load_state({**state, "passed": 2})


def test_other_weights_are_another_order() -> None:
    twice = Cursor(Mixture((4,), (2.0,)), "digest", seed=0, shuffle=True)
    once = Cursor(Mixture((4, 4), (1.0, 1.0)), "digest", seed=0, shuffle=True)
    with pytest.raises(DataError, match=r"\(weights was '2', is None; sizes was '4'"):
        once.load_state(twice.state())
    with pytest.raises(DataError, match=r"\(weights was None, is '2'; sizes was None"):
        twice.load_state(once.state())


def test_sets_that_are_cut_elsewhere_are_another_order() -> None:
    def cursor(*counts: int, weight: float) -> Cursor:
        weights = (weight,) * len(counts)
        return Cursor(Mixture(counts, weights), "digest", seed=0, shuffle=True)

    with pytest.raises(DataError, match=r"\(sizes was '2, 6', is '4, 4'\)"):
        cursor(4, 4, weight=0.5).load_state(cursor(2, 6, weight=0.5).state())
    # Without weights, sets are one set.
    cursor(8, weight=1).load_state(cursor(2, 6, weight=1).state())


def test_states_of_earlier_versions_have_another_digest() -> None:
    mixture = Mixture((2, 6), (0.5, 0.5))

    def cursor() -> Cursor:
        return Cursor(
            mixture, "new", seed=0, shuffle=True, earlier_digest=lambda: "old"
        )

    state = cursor().state()
    assert state.pop("records") == "new" and state.pop("sizes") == "2, 6"
    cursor().load_state({**state, "fingerprint": "old"})
    with pytest.raises(DataError, match=r"\(fingerprint was 'new', is 'old'\)"):
        cursor().load_state({**state, "fingerprint": "new"})
    with pytest.raises(DataError, match=r"\(fingerprint was None, is 'old'\)"):
        cursor().load_state(state)


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
