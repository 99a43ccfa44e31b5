"""How often, and in which order, the rows of several data sets are used.

Invariant: the order of an epoch depends on the numbers of rows, the weights, the seed
and the epoch alone, so any epoch can be computed without the earlier ones. Over the
epochs, the rows of a set are used equally often. Deliberately not here: the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_ray.data.batch import Int64


@dataclass(frozen=True)
class Mixture:
    """Numbers of rows of some data sets, and how often each row is used in an epoch.

    The rows of all sets are numbered through, set by set. A weight of 2 uses each row
    twice in an epoch. A weight of 0.25 uses a quarter of the rows, and another quarter
    in the next epoch, so that four epochs use each row once.

    Attributes:
        counts: Number of rows of each set.
        weights: Weight of each set.
    """

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows of all sets."""
        return sum(self.counts)

    @property
    def uses(self) -> tuple[int, ...]:
        """Number of rows that an epoch takes from each set; the same in each epoch."""
        return tuple(
            # Every set that is named is used.
            max(1, round(count * weight)) if count else 0
            for count, weight in zip(self.counts, self.weights, strict=True)
        )

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows that are drawn in an epoch."""
        return sum(self.uses)

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> Int64:
        """Return the numbers of the rows of an epoch, int64 [rows_per_epoch].

        Args:
            shuffle: Whether the order is random, or that of the sets and their rows.
        """
        firsts = np.cumsum((0, *self.counts))
        parts = [
            firsts[index] + _share(count, used, index, epoch, seed, shuffle=shuffle)
            for index, (count, used) in enumerate(
                zip(self.counts, self.uses, strict=True)
            )
            if used
        ]
        rows: Int64 = np.concatenate(parts)
        if shuffle:
            rows = rows[np.random.default_rng([seed, epoch]).permutation(len(rows))]
        return rows


def _share(
    count: int, used: int, index: int, epoch: int, seed: int, *, shuffle: bool
) -> Int64:
    """Return the rows of one set that an epoch uses, int64 [used].

    The set is passed over again and again. Epoch e takes the next `used` rows behind
    those of the epochs before it.

    Args:
        count: Number of rows of the set.
        used: Number of rows that every epoch takes.
        index: Number of the set.
    """
    # Whole passes need no order of their own: the epoch is shuffled as a whole.
    whole_passes, remainder = divmod(used, count)
    if not remainder:
        return np.tile(np.arange(count, dtype=np.int64), whole_passes)

    first = epoch * used
    passes = range(first // count, (first + used - 1) // count + 1)
    rows = np.concatenate(
        [_pass(count, index, number, seed, shuffle=shuffle) for number in passes]
    )
    begin = first - passes.start * count
    return rows[begin : begin + used]


def _pass(count: int, index: int, number: int, seed: int, *, shuffle: bool) -> Int64:
    """Return the order of one pass over one set, int64 [count]."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    # Three numbers, of which the last is not 0, never seed the order of an epoch.
    order: Int64 = np.random.default_rng([seed, number, index + 1]).permutation(count)
    return order


def shares_in_words(mixture: Mixture, names: Sequence[str]) -> list[str]:
    """Return what each set contributes to an epoch, one sentence part per set."""
    total = mixture.rows_per_epoch
    return [
        f"{name}: {used} of {total} rows of an epoch ({used / total:.0%})"
        for name, used in zip(names, mixture.uses, strict=True)
    ]
