"""Experts of turns as those of rows. Position p of turn t has the expert 10 t + p."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ray.agents.contract import EpisodeRow
from verl_ray.errors import EngineFailed
from verl_ray.rollout.turn_routing import TurnRouting


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def row_of(tokens: list[int], sampled: list[int]) -> EpisodeRow:
    mask = [place in sampled for place in range(len(tokens))]
    return EpisodeRow(tokens, mask, [0.0] * len(tokens), [], [])


def test_a_position_has_the_experts_of_the_first_turn_behind_it() -> None:
    routing = TurnRouting()

    def add(turn: int, prompt: np.ndarray, sampled: np.ndarray) -> None:
        count = len(prompt) + len(sampled) - 1
        experts = np.arange(count, dtype=np.int16) + 10 * turn
        routing.add(prompt, sampled, experts.reshape(-1, 1, 1))

    add(1, ids(1, 2), ids(3, 4))
    # A second turn that continues the first one, and a path of its own.
    add(2, ids(1, 2, 3, 4, 5), ids(6))
    add(3, ids(9), ids(8, 7))
    # A third turn of the first path, of which an answer stands behind it.
    add(4, ids(1, 2, 3, 4, 5, 6, 7), ids(8))
    rows = [
        row_of([1, 2, 3, 4, 5, 6, 7, 8, 0], [2, 3, 5, 7]),
        row_of([9, 8, 7], [1, 2]),
        # It ends with the second turn, which the row above holds as well.
        row_of([1, 2, 3, 4, 5, 6], [5]),
    ]
    routing.add_to(rows)
    experts = [
        None if row.routed_experts is None else row.routed_experts.ravel().tolist()
        for row in rows
    ]
    assert experts == [
        [10, 11, 12, 23, 24, 45, 46, 0, 0],
        [30, 31, 0],
        [10, 11, 12, 23, 24, 0],
    ]


def test_a_turn_that_is_missing_is_named() -> None:
    routing = TurnRouting()
    routing.add(ids(1, 2), ids(3), np.zeros((2, 1, 1), np.int16))
    with pytest.raises(EngineFailed, match="a row has 3 tokens before the last one"):
        routing.add_to([row_of([1, 2, 3, 4], [2, 3])])
    with pytest.raises(EngineFailed, match=r"experts of 2 positions.*expected 3"):
        routing.add(ids(1, 2), ids(3, 4), np.zeros((2, 1, 1), np.int16))
