"""Place in the data: which rows come next, in an order that a resumed run repeats.

Invariant: row number k of all that are drawn or passed over depends on (seed, mixture
of the sets, k) alone, however the draws were cut into batches and however often the run
was resumed.

The order of an epoch depends on the numbers of rows, the weights, the seed and the
epoch alone, so any epoch can be computed without the earlier ones. Every epoch of a
single set is a permutation of its rows; over the epochs, the rows of a set are used
equally often. Rows may be passed over, such as those that a curriculum does not choose
(`curriculum.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_ray.columns.batch import Array, Batch, Int64, Ragged
from verl_ray.errors import CheckpointError, DataError

# -------------------------------------------------------------------- the order of rows


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


# ------------------------------------------------------------------------------- cursor


CursorState = dict[str, int | str]

_ROWS_AT_ONCE = 4096
"""Rows that are looked at together to find some that are accepted."""

_OPTIONAL_IDENTITY = ("weights", "sizes")
"""What only some states say of the rows and their order."""


def fingerprint(batch: Batch, without: Collection[str] = ()) -> str:
    """Digest of every value of a batch, stable over processes.

    Two batches have the same digest where, and only where, their rows are equal.

    Args:
        without: Columns that do not count.
    """
    digest = hashlib.blake2b(batch.offsets.tobytes(), digest_size=16)

    for name in batch.columns():
        column = getattr(batch, name)
        if column is None or name in without:
            continue
        arrays = [column]
        if isinstance(column, Ragged):
            arrays = [column.values, column.offsets]
        for array in arrays:
            # The name too, so that equal columns of other names differ.
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).data)

    return digest.hexdigest()


def drawn_rows(state: Mapping[str, int | str]) -> int:
    """Return how many rows had been drawn when `state` was taken from a cursor.

    Raises:
        CheckpointError: `drawn`, `passed`, `epoch` and `position` do not lead to the
            same row of an epoch of `rows` rows.
    """
    names = ("rows", "drawn", "passed", "epoch", "position")
    # Only a run that streams its data, or has a curriculum, passes rows over.
    place = {name: state.get(name) for name in names if name in state}
    rows = place.get("rows")
    drawn = place.get("drawn")
    passed = place.get("passed", 0)

    numbers = (rows, drawn, passed)
    if all(isinstance(number, int) and number >= 0 for number in numbers):
        assert isinstance(rows, int)
        assert isinstance(drawn, int)
        assert isinstance(passed, int)
        expected = divmod(drawn + passed, rows) if rows else None
        if (place.get("epoch"), place.get("position")) == expected:
            return drawn

    listed = ", ".join(f"{name} = {value!r}" for name, value in place.items())
    raise CheckpointError(
        f"the data cursor of the checkpoint contradicts itself ({listed})",
        fix="expected drawn + passed = epoch * rows + position. Rows would be used"
        " twice or left out, so continue from another checkpoint: run.resume=PATH",
    )


class Cursor:
    """Sequence of row numbers without replacement, epoch after epoch.

    The tail of an epoch is not dropped: a batch may end one epoch and begin the next.
    """

    def __init__(
        self,
        mixture: Mixture,
        digest: str,
        *,
        seed: int,
        shuffle: bool,
        earlier_digest: Callable[[], str] | None = None,
    ) -> None:
        """Stand at the first row of the first epoch.

        Args:
            mixture: The data sets.
            digest: A digest of their records that does not depend on their paths.
            earlier_digest: Computes the digest that states of earlier versions have
                under `fingerprint`; None: no such state is accepted.
        """
        self._mixture = mixture
        self._rows_per_epoch = mixture.rows_per_epoch
        self._identity: CursorState = {
            "rows": self._rows_per_epoch,
            "records": digest,
            "seed": seed,
            "shuffle": int(shuffle),
        }
        if any(weight != 1 for weight in mixture.weights):
            self._identity["weights"] = ", ".join(f"{w:g}" for w in mixture.weights)
            # The same records have another order where the sets are cut elsewhere.
            self._identity["sizes"] = ", ".join(map(str, mixture.counts))
        self._earlier_digest = earlier_digest
        self._seed = seed
        self._shuffle = shuffle
        # The order of one epoch is cached, since many batches are drawn from it.
        self._ordered_epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self.drawn = 0
        """Rows drawn since the start of the run: the running number of the next row."""
        self.passed = 0
        """Rows passed over since then, because the run cannot use them."""

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""
        return (self.drawn + self.passed) // self._rows_per_epoch

    @property
    def position(self) -> int:
        """Rows drawn or passed over in the current epoch."""
        return (self.drawn + self.passed) % self._rows_per_epoch

    def draw(self, count: int) -> Int64:
        """Return the next row numbers, int64 [count], across the ends of epochs."""
        parts = []

        # Each round takes what is left of an epoch, or of `count`.
        while count:
            order = self._order_of(self.epoch)
            part = order[self.position : self.position + count]
            parts.append(part)
            self.drawn += len(part)
            count -= len(part)

        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def draw_accepted(
        self, count: int, accepts: Callable[[Int64, int], Array]
    ) -> Int64:
        """Return the next `count` row numbers that are accepted, int64 [count].

        The others before the last one are passed over. It does not end where nothing is
        ever accepted.

        Args:
            accepts: Takes row numbers, int64 [rows], and the place of the first one
                over all epochs; tells which are accepted, bool [rows].
        """
        parts = []

        # Each round looks at some rows of one epoch, up to the last one of `count`.
        while count:
            order = self._order_of(self.epoch)
            rows = order[self.position : self.position + _ROWS_AT_ONCE]
            accepted = np.flatnonzero(accepts(rows, self.drawn + self.passed))[:count]
            num_seen = len(rows) if len(accepted) < count else int(accepted[-1]) + 1
            parts.append(rows[accepted])
            self.drawn += len(accepted)
            self.passed += num_seen - len(accepted)
            count -= len(accepted)

        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def pass_over(self, count: int) -> None:
        """Count rows of the last draw as passed over: the run cannot use them."""
        assert count <= self.drawn, "only rows that were drawn can be passed over"
        self.drawn -= count
        self.passed += count

    def state(self) -> CursorState:
        """State for `load_state`, as plain JSON values."""
        passed: CursorState = {"passed": self.passed} if self.passed else {}
        return {
            **self._identity,
            "drawn": self.drawn,
            **passed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the rows or their order are not those the state was taken with.
            CheckpointError: the state contradicts itself.
        """
        # In other rows, or another order, the same place would lead to other records.
        identity = self._identity
        if "records" not in state:
            identity = self._earlier_identity()
        names = dict.fromkeys((*identity, *_OPTIONAL_IDENTITY))
        changed = [
            f"{name} was {state.get(name)!r}, is {identity.get(name)!r}"
            for name in names
            if state.get(name) != identity.get(name)
        ]
        if changed:
            raise DataError(
                "the data differ from those that the checkpoint was written with"
                f" ({'; '.join(changed)})",
                fix="expected the same records in the same order, wherever"
                " data.train_path finds them, and the same tokenizer and data.*;"
                " restore these, or start anew in another run.dir",
            )
        self.drawn = drawn_rows(state)
        passed = state.get("passed", 0)
        assert isinstance(passed, int), "drawn_rows has looked at it"
        self.passed = passed

    def _earlier_identity(self) -> CursorState:
        """Return what the states of earlier versions say of the rows and their order.

        Their digest depends on the names of the files and on their format.
        """
        identity = dict(self._identity)
        del identity["records"]
        identity.pop("sizes", None)
        if self._earlier_digest is not None:
            identity["fingerprint"] = self._earlier_digest()
        return identity

    def _order_of(self, epoch: int) -> Int64:
        """Order of the rows in an epoch, int64 [rows]."""
        if epoch != self._ordered_epoch:
            self._order = self._mixture.order(
                epoch, seed=self._seed, shuffle=self._shuffle
            )
            self._ordered_epoch = epoch
        return self._order
