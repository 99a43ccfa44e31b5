"""Place in the data: which rows come next, in an order that a resumed run repeats.

Invariant: row number k of all that are drawn or passed over depends on (seed, mixture
of the sets, k) alone, however the draws were cut into batches and however often the run
was resumed. Every epoch of a single set is a permutation of its rows. Deliberately not
here: the rows, the order of an epoch (`mixture.py`), and which are passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from verl_ray.data.batch import Array, Batch, Int64, Ragged
from verl_ray.data.mixture import Mixture
from verl_ray.errors import CheckpointError, DataError

CursorState = dict[str, int | str]

_ROWS_AT_ONCE = 4096
"""Rows that are looked at together to find some that are accepted."""

_OPTIONAL_IDENTITY = ("weights",)
"""What only some states say of the rows and their order."""


def fingerprint(batch: Batch) -> str:
    """Digest of every value of a batch, stable over processes.

    Two batches have the same digest where, and only where, their rows are equal.
    """
    digest = hashlib.blake2b(batch.offsets.tobytes(), digest_size=16)

    for name in batch.columns():
        column = getattr(batch, name)
        if column is None:
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
        self, mixture: Mixture, digest: str, *, seed: int, shuffle: bool
    ) -> None:
        """Stand at the first row of the first epoch.

        Args:
            mixture: The data sets.
            digest: A digest of their rows, such as their `fingerprint`.
        """
        self._mixture = mixture
        self._rows_per_epoch = mixture.rows_per_epoch
        self._identity: CursorState = {
            "rows": self._rows_per_epoch,
            "fingerprint": digest,
            "seed": seed,
            "shuffle": int(shuffle),
        }
        if any(weight != 1 for weight in mixture.weights):
            self._identity["weights"] = ", ".join(f"{w:g}" for w in mixture.weights)
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
        names = dict.fromkeys((*self._identity, *_OPTIONAL_IDENTITY))
        changed = [
            f"{name} was {state.get(name)!r}, is {self._identity.get(name)!r}"
            for name in names
            if state.get(name) != self._identity.get(name)
        ]
        if changed:
            raise DataError(
                "the data differ from those that the checkpoint was written with"
                f" ({'; '.join(changed)})",
                fix="restore the files of data.train_path, the tokenizer and data.*,"
                " or start anew in another run.dir",
            )
        self.drawn = drawn_rows(state)
        passed = state.get("passed", 0)
        assert isinstance(passed, int), "drawn_rows has looked at it"
        self.passed = passed

    def _order_of(self, epoch: int) -> Int64:
        """Order of the rows in an epoch, int64 [rows]."""
        if epoch != self._ordered_epoch:
            self._order = self._mixture.order(
                epoch, seed=self._seed, shuffle=self._shuffle
            )
            self._ordered_epoch = epoch
        return self._order
