"""Rows by reference: what a driver holds instead of tokens.

Invariant: a `Sharded` knows where each of its rows lies (which stored object, which row of it), the row's length and
the columns that have one value per row; it holds no token. All planning (select, order, split, concat) is index
arithmetic on those, so a driver's memory does not grow with tokens. Deliberately not here: how an object is stored or
fetched; `read` takes the fetching function, so this module knows no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.data.batch import Array, Batch, Int64
from verl_ray.errors import DataError

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Receipt(Generic[B]):
    """The small half of a stored batch: its type, row lengths and per-row columns."""

    stage: type[B]
    lengths: Int64
    columns: dict[str, Array]

    @classmethod
    def of(cls, batch: B) -> Receipt[B]:
        return cls(type(batch), batch.lengths, {name: np.array(v) for name, v in batch.row_columns().items()})


@dataclass(frozen=True, eq=False)
class Sharded(Generic[B]):
    """Rows of stage B that lie in `parts`, in an order of their own."""

    stage: type[B]
    parts: tuple[Any, ...]  # references to stored batches, opaque here
    part: Int64  # [rows] which of them each row lies in
    position: Int64  # [rows] and where
    lengths: Int64  # [rows] tokens
    columns: dict[str, Array]  # the stage's one-value-per-row columns, [rows, ...] each

    @classmethod
    def stored(cls, reference: Any, receipt: Receipt[B]) -> Sharded[B]:
        """All rows of one stored batch."""
        rows = len(receipt.lengths)
        position = np.arange(rows, dtype=np.int64)
        return cls(
            receipt.stage, (reference,), np.zeros(rows, np.int64), position, receipt.lengths, dict(receipt.columns)
        )

    @classmethod
    def concat(cls, pieces: Sequence[Sharded[B]]) -> Sharded[B]:
        """All rows of all pieces, in order."""
        if len(pieces) == 1:
            return pieces[0]
        if not pieces or len({piece.stage for piece in pieces}) != 1:
            raise DataError(f"rows of one stage expected, found {sorted({p.stage.__name__ for p in pieces})}")
        starts = np.cumsum([0] + [len(piece.parts) for piece in pieces])
        return cls(
            pieces[0].stage,
            tuple(reference for piece in pieces for reference in piece.parts),
            np.concatenate([piece.part + start for piece, start in zip(pieces, starts, strict=False)]),
            np.concatenate([piece.position for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            {name: np.concatenate([piece.columns[name] for piece in pieces]) for name in pieces[0].columns},
        )

    def __len__(self) -> int:
        return len(self.part)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def row(self, name: str) -> Array:
        """A column with one value per row, by name."""
        if name not in self.columns:
            raise DataError(f"{self.stage.__name__} has no row column {name!r}; it has {sorted(self.columns)}")
        return self.columns[name]

    def select(self, rows: npt.ArrayLike) -> Sharded[B]:
        """The given rows, in the given order. Parts that no row refers to any more are let go, but for one: no rows
        at all still have columns, and only a stored batch knows which.
        """
        rows = np.asarray(rows, dtype=np.int64)
        used, part = np.unique(self.part[rows], return_inverse=True)
        if not len(used):
            used = np.arange(min(1, len(self.parts)))
        return Sharded(
            self.stage,
            tuple(self.parts[i] for i in used.tolist()),
            part.astype(np.int64).reshape(-1),
            self.position[rows],
            self.lengths[rows],
            {name: values[rows] for name, values in self.columns.items()},
        )

    def split(self, rows: Sequence[Int64]) -> list[Sharded[B]]:
        """One piece per index array."""
        return [self.select(index) for index in rows]

    def read(self, fetch: Callable[[Sequence[Any]], Sequence[B]]) -> B:
        """The rows themselves, in this order. Views where the rows of a part are neighbours; one copy elsewhere."""
        stored = fetch(self.parts)
        if len(stored) == 1:
            return stored[0] if self._is_whole(stored[0]) else stored[0].select(self.position)
        order = np.argsort(self.part, kind="stable")
        bounds = np.searchsorted(self.part[order], np.arange(len(stored) + 1))
        pieces = [
            batch.select(self.position[order[start:end]])
            for batch, start, end in zip(stored, bounds, bounds[1:], strict=False)
        ]
        joined = self.stage.concat(pieces)
        if bool(np.all(np.diff(order) == 1)):
            return joined
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return joined.select(inverse)

    def _is_whole(self, stored: B) -> bool:
        return len(self) == stored.num_rows and bool(np.array_equal(self.position, np.arange(len(self))))


def join(pieces: Sequence[Sharded[B]], order: Int64) -> Sharded[B]:
    """Pieces that were computed on rows `order` (their concatenation), back in the order the rows came in."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return Sharded.concat(pieces).select(inverse)
