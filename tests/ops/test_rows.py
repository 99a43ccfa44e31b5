"""Sums over rows, at each of their tokens."""

from __future__ import annotations

import torch

from verl_ray.ops.rows import row_lengths, row_sums


def test_by_hand() -> None:
    row = torch.tensor([0, 0, 2, 5, 5, 5])  # rows without tokens stand between them
    assert row_sums(torch.tensor([1.0, 2, 4, 1, 1, -3]), row).tolist() == [
        3,
        3,
        4,
        -1,
        -1,
        -1,
    ]
    assert row_lengths(row).tolist() == [2, 2, 1, 3, 3, 3]


def test_no_tokens_and_one() -> None:
    assert row_sums(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert row_sums(torch.tensor([7.0]), torch.tensor([3])).tolist() == [7]


def test_the_order_of_tokens_does_not_turn_the_last_digits() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10
    row = torch.zeros(10_000, dtype=torch.int64)
    found = row_sums(values, row)
    assert found.dtype == torch.float32 and torch.equal(
        found, row_sums(values.flip(0), row)
    )


def test_nothing_makes_the_host_wait_for_the_device() -> None:
    row_lengths(torch.zeros(4, dtype=torch.int64, device="meta"))
