"""The place in a data set: which rows come next, in an order that a resumed run repeats.

Invariant: the k-th row ever drawn depends on (seed, number of rows, k) alone, however the draws were cut into batches
and however often the run was resumed; every epoch is a permutation of all rows. Deliberately not here: the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from verl_ray.data.batch import Batch, Int64, Ragged
from verl_ray.errors import CheckpointError, DataError

CursorState = dict[str, int | str]


def fingerprint(batch: Batch) -> str:
    """A digest of every value of a batch, stable over processes: equal where, and only where, the rows are equal."""
    digest = hashlib.blake2b(batch.offsets.tobytes(), digest_size=16)
    for name in batch.columns():
        column = getattr(batch, name)
        for array in (column.values, column.offsets) if isinstance(column, Ragged) else (column,):
            if array is not None:
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def drawn_rows(state: Mapping[str, int | str]) -> int:
    """How many rows had been drawn where this state of a cursor was taken.

    Raises:
        CheckpointError: `drawn`, `epoch` and `position` do not lead to the same row of a data set of `rows` rows.
    """
    place = {name: state.get(name) for name in ("rows", "drawn", "epoch", "position")}
    rows, drawn = place["rows"], place["drawn"]
    if isinstance(rows, int) and isinstance(drawn, int) and rows > 0 and drawn >= 0:
        epoch, position = divmod(drawn, rows)
        if (place["epoch"], place["position"]) == (epoch, position):
            return drawn
    told = ", ".join(f"{name} = {value!r}" for name, value in place.items())
    raise CheckpointError(
        f"the data cursor of the checkpoint contradicts itself ({told}); expected drawn = epoch * rows + position. "
        "Rows would be used twice or left out, so continue from another checkpoint: run.resume=PATH"
    )


class Cursor:
    """Draws row numbers without replacement, epoch after epoch, without dropping the tail of an epoch."""

    def __init__(self, rows: Batch, *, seed: int, shuffle: bool) -> None:
        self._count = rows.num_rows
        self._identity: CursorState = {
            "rows": rows.num_rows,
            "fingerprint": fingerprint(rows),
            "seed": seed,
            "shuffle": int(shuffle),
        }
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)
        self.drawn = 0
        """Rows drawn since the start of the run: the running number of the next row."""

    @property
    def epoch(self) -> int:
        """Full passes done."""
        return self.drawn // self._count

    @property
    def position(self) -> int:
        """Rows drawn in the current epoch."""
        return self.drawn % self._count

    def draw(self, count: int) -> Int64:
        """The next row numbers, int64 [count]; goes on in the next epoch where one ends."""
        parts = []
        while count:
            part = self._order_of(self.epoch)[self.position : self.position + count]
            parts.append(part)
            self.drawn += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def state(self) -> CursorState:
        """What `load_state` needs, as plain JSON values."""
        return {**self._identity, "drawn": self.drawn, "epoch": self.epoch, "position": self.position}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Go to where `state` was taken.

        Raises:
            DataError: the rows or their order are not those the state was taken with.
            CheckpointError: the state contradicts itself.
        """
        changed = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise DataError(
                f"the data differ from those that the checkpoint was written with ({'; '.join(changed)}); restore "
                "the files of data.train_path, the tokenizer and data.*, or start anew in another run.dir"
            )
        self.drawn = drawn_rows(state)

    def _order_of(self, epoch: int) -> Int64:
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            self._order = random.permutation(self._count) if self._shuffle else np.arange(self._count)
            self._epoch = epoch
        return self._order
