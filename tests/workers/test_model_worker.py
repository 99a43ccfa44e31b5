"""What an actor makes of rows before its engine sees them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.learning.test_normalised_weights import credit_of
from tests.rows import rollouts_of
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.columns.stages import Credit
from verl_ray.config.algorithm import AggregationName
from workers.model_worker import MiniBatch, loss_weights

ROWS = rollouts_of([2, 4, 1])


def credit(in_loss: list[bool]) -> Credit:
    zeros = np.zeros(ROWS.num_rows, np.float32)
    return Credit(
        offsets=ROWS.offsets, advantages=np.zeros(ROWS.num_tokens, np.float32), in_loss=np.array(in_loss),
        reward=zeros, kl=zeros, kl_bounded=np.zeros(ROWS.num_rows, np.int64),
        is_positive=zeros > 0, advantage_statistics=np.zeros((ROWS.num_rows, 4)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0]),
        ("token_sum", [1, 1, 0]),
        ("seq_mean_token_sum", [1 / 2, 1 / 2, 0]),
        ("seq_mean_token_mean", [1 / 4, 1 / 8, 0]),
        ("seq_mean_token_sum_norm", [1 / 20, 1 / 20, 0]),
    ],
)
def test_rows_out_of_the_loss_weigh_nothing_in_every_mode(
    mode: AggregationName, expected: list[float]
) -> None:
    mini_batch = MiniBatch(
        total_tokens=6, total_trajectories=2, aggregation=mode, horizon=10
    )
    assert loss_weights(
        ROWS, credit([True, True, False]), mini_batch
    ).tolist() == pytest.approx(expected)


def test_denominators_are_those_of_all_ranks() -> None:
    mini_batch = MiniBatch(
        total_tokens=70, total_trajectories=9, aggregation="token_mean", horizon=None
    )
    assert loss_weights(ROWS, credit([True] * 3), mini_batch).tolist() == pytest.approx(
        [1 / 70] * 3
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 7, 1 / 7, 1 / 7]),
        ("token_sum", [1, 1, 1]),
        # Trajectories of 2 + 1 and 4 tokens.
        ("seq_mean_token_sum", [1 / 2, 1 / 2, 1 / 2]),
        ("seq_mean_token_sum_norm", [1 / 20, 1 / 20, 1 / 20]),
        ("seq_mean_token_mean", [1 / 6, 1 / 8, 1 / 6]),
    ],
)
def test_a_trajectory_weighs_the_same_however_it_is_cut(
    mode: AggregationName, expected: list[float]
) -> None:
    mini_batch = MiniBatch(
        total_tokens=7, total_trajectories=2, aggregation=mode, horizon=10
    )
    rows = ROWS.replace(trajectory_id=np.array([8, 3, 8]))
    weights = loss_weights(rows, credit([True] * 3), mini_batch)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_weights_of_an_episode_add_up_to_the_same_however_it_is_cut(
    mode: AggregationName,
) -> None:
    """Episodes of 6 and 2 tokens; the first in one row, one a turn, or branches."""
    mini_batch = MiniBatch(
        total_tokens=8, total_trajectories=2, aggregation=mode, horizon=10
    )
    sums = []
    for cut in ([6], [2, 2, 2], [1, 0, 5], [1] * 6):
        rows = rollouts_of([*cut, 2])
        rows = rows.replace(trajectory_id=np.array([7] * len(cut) + [3]))
        weights = loss_weights(
            rows, credit_of(rows, [True] * rows.num_rows), mini_batch
        )
        token_sums = weights * rows.response_length
        sums.append([token_sums[:-1].sum(), token_sums[-1]])
    assert all(total == pytest.approx(sums[0]) for total in sums)
