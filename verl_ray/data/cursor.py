"""Place in a data set: which rows come next, in an order that a resumed run repeats.

Invariant: row number k of all draws depends on (seed, number of rows, k) alone, however
the draws were cut into batches and however often the run was resumed. Every epoch is a
permutation of all rows. Deliberately not here: the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from verl_ray.data.batch import Batch, Int64, Ragged
from verl_ray.errors import CheckpointError, DataError

CursorState = dict[str, int | str]


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
        CheckpointError: `drawn`, `epoch` and `position` do not lead to the same row of
            a data set of `rows` rows.
    """
    place = {name: state.get(name) for name in ("rows", "drawn", "epoch", "position")}
    rows = place["rows"]
    drawn = place["drawn"]

    if isinstance(rows, int) and isinstance(drawn, int) and rows > 0 and drawn >= 0:
        expected = divmod(drawn, rows)
        if (place["epoch"], place["position"]) == expected:
            return drawn

    listed = ", ".join(f"{name} = {value!r}" for name, value in place.items())
    raise CheckpointError(
        f"the data cursor of the checkpoint contradicts itself ({listed}); expected"
        " drawn = epoch * rows + position. Rows would be used twice or left out, so"
        " continue from another checkpoint: run.resume=PATH"
    )


class Cursor:
    """Sequence of row numbers without replacement, epoch after epoch.

    The tail of an epoch is not dropped: a batch may end one epoch and begin the next.
    """

    def __init__(self, rows: Batch, *, seed: int, shuffle: bool) -> None:
        self._count = rows.num_rows
        self._identity: CursorState = {
            "rows": rows.num_rows,
            "fingerprint": fingerprint(rows),
            "seed": seed,
            "shuffle": int(shuffle),
        }
        self._seed = seed
        self._shuffle = shuffle
        # The order of one epoch is cached, since many batches are drawn from it.
        self._ordered_epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self.drawn = 0
        """Rows drawn since the start of the run: the running number of the next row."""

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""
        return self.drawn // self._count

    @property
    def position(self) -> int:
        """Rows drawn in the current epoch."""
        return self.drawn % self._count

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

    def state(self) -> CursorState:
        """State for `load_state`, as plain JSON values."""
        return {
            **self._identity,
            "drawn": self.drawn,
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
        changed = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise DataError(
                "the data differ from those that the checkpoint was written with"
                f" ({'; '.join(changed)}); restore the files of data.train_path, the"
                " tokenizer and data.*, or start anew in another run.dir"
            )
        self.drawn = drawn_rows(state)

    def _order_of(self, epoch: int) -> Int64:
        """Order of the rows in an epoch, int64 [rows]."""
        if epoch != self._ordered_epoch:
            if self._shuffle:
                # Any epoch's order can be computed without the earlier ones.
                random = np.random.default_rng([self._seed, epoch])
                self._order = random.permutation(self._count)
            else:
                self._order = np.arange(self._count)
            self._ordered_epoch = epoch
        return self._order
