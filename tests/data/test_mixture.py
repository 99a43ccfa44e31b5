"""An epoch takes each set as often as its weight says, whatever the order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.data.cursor import Mixture, shares_in_words


def test_whole_weights_repeat_rows_and_fractions_take_turns() -> None:
    mixture = Mixture((2, 4), (2.0, 0.5))
    assert (mixture.uses, mixture.rows_per_epoch) == ((4, 2), 6)
    epochs = [mixture.order(epoch, seed=0, shuffle=False) for epoch in range(3)]
    assert [epoch.tolist() for epoch in epochs] == [
        [0, 1, 0, 1, 2, 3],
        [0, 1, 0, 1, 4, 5],
        [0, 1, 0, 1, 2, 3],
    ]
    assert shares_in_words(mixture, ["a", "b"]) == [
        "a: 4 of 6 rows of an epoch (67%)",
        "b: 2 of 6 rows of an epoch (33%)",
    ]


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    weights=st.lists(
        st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0]), min_size=3, max_size=3
    ),
    seed=st.integers(0, 3),
)
def test_no_row_is_used_twice_more_than_another(
    counts: list[int], weights: list[float], seed: int
) -> None:
    mixture = Mixture(tuple(counts), tuple(weights[: len(counts)]))
    orders = [mixture.order(epoch, seed=seed, shuffle=True) for epoch in range(5)]
    assert {len(order) for order in orders} == {mixture.rows_per_epoch}

    # Over any number of epochs, the uses of the rows of a set differ by 1 at most.
    drawn = np.concatenate(orders)
    used = np.bincount(drawn, minlength=mixture.num_rows)
    ends = np.cumsum(counts)
    for first, end, uses in zip(ends - counts, ends, mixture.uses, strict=True):
        set_uses = used[first:end]
        assert set_uses.max() - set_uses.min() <= 1
        assert set_uses.sum() == 5 * uses


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_single_set_of_weight_1_is_ordered_as_ever(shuffle: bool) -> None:
    order = Mixture((50,), (1.0,)).order(3, seed=7, shuffle=shuffle)
    expected = np.arange(50)
    if shuffle:
        expected = np.random.default_rng([7, 3]).permutation(50)
    assert order.tolist() == expected.tolist()
    # Sets without weights are one set, cut anywhere.
    parts = Mixture((20, 30), (1.0, 1.0)).order(3, seed=7, shuffle=shuffle)
    assert parts.tolist() == expected.tolist()
