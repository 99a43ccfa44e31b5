"""Seeds are a pure function of run, purpose and row, and no two rows share one."""

from __future__ import annotations

import hashlib

import numpy as np

from verl_ray.columns.seeds import row_seeds


def test_a_seed_depends_on_its_own_row_alone() -> None:
    together = row_seeds(3, "train", np.arange(1000))
    assert (
        row_seeds(3, "train", np.array([998, 4])).tolist()
        == together[[998, 4]].tolist()
    )


def test_seeds_by_whole_numbers() -> None:
    """Compute the seeds in Python's unbounded integers.

    A change of the seeds would change every run.
    """
    start = int.from_bytes(
        hashlib.blake2b(b"7:train", digest_size=8).digest(), "little"
    )
    expected = []
    for row in (0, 1, 123_456_789):
        x = (start + row) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append((x ^ (x >> 31)) >> 1)
    assert row_seeds(7, "train", np.array([0, 1, 123_456_789])).tolist() == expected
    assert row_seeds(0, "train", np.array([0, 1])).tolist() == [
        389954882813848311,
        8212006885280862127,
    ]


def test_streams_of_rows_purposes_and_runs_are_apart() -> None:
    rows = np.arange(20_000)
    seeds = np.concatenate(
        [
            row_seeds(run, purpose, rows)
            for run in (0, 1)
            for purpose in ("train", "evaluate")
        ]
    )
    assert len(np.unique(seeds)) == len(seeds)
    assert seeds.dtype == np.int64 and seeds.min() >= 0


def test_every_bit_of_a_seed_is_a_fair_coin() -> None:
    seeds = row_seeds(0, "train", np.arange(20_000))
    ones = [float(((seeds >> bit) & 1).mean()) for bit in range(63)]
    assert min(ones) > 0.48 and max(ones) < 0.52  # 5.6 standard deviations
