"""Rows by reference: what a driver holds instead of tokens.

Invariant: a `Sharded` knows where each of its rows lies (which stored object, which row
of it), the row's length and the columns that have one value per row; it holds no token.
All planning (select, order, split, concat) is index arithmetic on those, so a driver's
memory does not grow with tokens. `read` takes the function that fetches an object, so
this module knows no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import Array, Batch, Int64
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
        """Receipt of a batch, with copies of its per-row columns."""
        columns = {
            name: np.array(values) for name, values in batch.row_columns().items()
        }
        return cls(type(batch), batch.lengths, columns)


@dataclass(frozen=True, eq=False)
class Sharded(Generic[B]):
    """Rows of stage B that lie in stored batches, in any order.

    Attributes:
        stage: The type of the rows.
        parts: References to the stored batches, opaque here.
        part: Index in `parts` of the batch that each row lies in, int64 [rows].
        position: Number of each row in that batch, int64 [rows].
        lengths: Tokens of each row, int64 [rows].
        columns: The stage's columns with one value per row, [rows, ...] each.
    """

    stage: type[B]
    parts: tuple[Any, ...]
    part: Int64
    position: Int64
    lengths: Int64
    columns: dict[str, Array]

    @classmethod
    def stored(cls, reference: Any, receipt: Receipt[B]) -> Sharded[B]:
        """All rows of one stored batch."""
        num_rows = len(receipt.lengths)
        return cls(
            stage=receipt.stage,
            parts=(reference,),
            part=np.zeros(num_rows, np.int64),
            position=np.arange(num_rows, dtype=np.int64),
            lengths=receipt.lengths,
            columns=dict(receipt.columns),
        )

    @classmethod
    def concat(cls, pieces: Sequence[Sharded[B]]) -> Sharded[B]:
        """Join all rows of all pieces, in order.

        Raises:
            DataError: the pieces are of several stages, or there are none.
        """
        if len(pieces) == 1:
            return pieces[0]
        stages = {piece.stage for piece in pieces}
        if len(stages) != 1:
            names = sorted(stage.__name__ for stage in stages)
            raise DataError(f"rows of one stage expected, found {names}")

        parts: list[Any] = []
        part_indices = []
        for piece in pieces:
            # Each piece numbers its parts from 0.
            part_indices.append(piece.part + len(parts))
            parts += piece.parts
        columns = {
            name: np.concatenate([piece.columns[name] for piece in pieces])
            for name in pieces[0].columns
        }
        return cls(
            stage=pieces[0].stage,
            parts=tuple(parts),
            part=np.concatenate(part_indices),
            position=np.concatenate([piece.position for piece in pieces]),
            lengths=np.concatenate([piece.lengths for piece in pieces]),
            columns=columns,
        )

    def __len__(self) -> int:
        return len(self.part)

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all rows."""
        return int(self.lengths.sum())

    def row(self, name: str) -> Array:
        """Return a column with one value per row, by name.

        Raises:
            DataError: the stage has no such column.
        """
        if name not in self.columns:
            raise DataError(
                f"{self.stage.__name__} has no row column {name!r}; it has"
                f" {sorted(self.columns)}"
            )
        return self.columns[name]

    def select(self, rows: npt.ArrayLike) -> Sharded[B]:
        """Return the rows `rows`, in this order.

        References to parts without a selected row are dropped, so that their memory can
        be freed. One part always remains: even no rows at all have columns, and only a
        stored batch knows which.
        """
        rows = np.asarray(rows, dtype=np.int64)
        # `part` is renumbered, since unused parts are dropped
        used, part = np.unique(self.part[rows], return_inverse=True)
        if not len(used):
            used = np.arange(min(1, len(self.parts)))
        return Sharded(
            stage=self.stage,
            parts=tuple(self.parts[index] for index in used.tolist()),
            part=part.astype(np.int64).reshape(-1),
            position=self.position[rows],
            lengths=self.lengths[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )

    def split(self, rows: Sequence[Int64]) -> list[Sharded[B]]:
        """Return one piece per index array."""
        return [self.select(index) for index in rows]

    def read(self, fetch: Callable[[Sequence[Any]], Sequence[B]]) -> B:
        """Return the rows themselves, in this order.

        They are views where the rows of a part are neighbours, and one copy elsewhere.

        Args:
            fetch: Returns the stored batches of these references, in their order.
        """
        stored = fetch(self.parts)
        if len(stored) == 1:
            if self._is_whole(stored[0]):
                return stored[0]
            return stored[0].select(self.position)

        # Take the rows of each part together, then put them into this order.
        order = np.argsort(self.part, kind="stable")
        bounds = np.searchsorted(self.part[order], np.arange(len(stored) + 1))
        pieces = []
        for index, batch in enumerate(stored):
            rows = order[bounds[index] : bounds[index + 1]]
            pieces.append(batch.select(self.position[rows]))
        joined = self.stage.concat(pieces)
        # Spares a copy where the parts were in this order already.
        if bool(np.all(np.diff(order) == 1)):
            return joined
        return joined.select(_inverse(order))

    def _is_whole(self, stored: B) -> bool:
        """Return whether these are all rows of `stored`, in its order."""
        if len(self) != stored.num_rows:
            return False
        return bool(np.array_equal(self.position, np.arange(len(self))))


def join(pieces: Sequence[Sharded[B]], order: Int64) -> Sharded[B]:
    """Join pieces that were computed on reordered rows, in the original order.

    Args:
        order: The original numbers of the pieces' rows, int64 [rows].
    """
    return Sharded.concat(pieces).select(_inverse(order))


def _inverse(order: Int64) -> Int64:
    """Permutation that undoes `order`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
