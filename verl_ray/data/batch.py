"""Rows in columns: the frozen base of every stage type, and the vectorized operations on it.

Invariant: a batch never changes and never pads. Its columns are NumPy arrays of three kinds: one value per row, one
value per token (flat, all token columns over one shared `offsets`), and `Ragged` columns with offsets of their own
(texts, version spans). Pickled with protocol 5 every column travels out of band, so what Ray's object store holds is
read in place, as a read-only view. Deliberately not here: where rows live (`sharded.py`) and what they mean
(`stages.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from verl_ray.errors import DataError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Kind(enum.Enum):
    ROW = "row"
    TOKEN = "token"
    RAGGED = "ragged"


@dataclass(frozen=True)
class Column:
    """What a field of a stage holds: its kind, element type, and the shape behind the row or token dimension."""

    kind: Kind
    dtype: np.dtype[Any]
    trailing: tuple[int, ...]
    optional: bool


def _column(kind: Kind, dtype: npt.DTypeLike, trailing: tuple[int, ...], optional: bool) -> Any:
    metadata = {"column": Column(kind, np.dtype(dtype), trailing, optional)}
    return dataclasses.field(default=None, metadata=metadata) if optional else dataclasses.field(metadata=metadata)


def row(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """A column with one value per row: [rows, *trailing]."""
    return _column(Kind.ROW, dtype, trailing, optional)


def token(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """A column with one value per token, flat: [tokens, *trailing]."""
    return _column(Kind.TOKEN, dtype, trailing, optional)


def ragged(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """A column with any number of values per row, over offsets of its own."""
    return _column(Kind.RAGGED, dtype, trailing, optional)


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """Row starts and the total behind them: int64 [rows + 1] from lengths [rows]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class _Gather:
    """How to copy some rows of a ragged column: their new offsets, and flat source positions (or one slice)."""

    offsets: Int64
    source: slice | Int64 | None
    rows: Int64
    width: int | None

    @classmethod
    def plan(cls, offsets: Int64, rows: Int64) -> _Gather:
        starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
        new = offsets_of(lengths)
        if len(rows) and bool(np.all(np.diff(rows) == 1)):  # neighbours: a view, no copy
            return cls(new, slice(int(starts[0]), int(starts[0] + new[-1])), rows, None)
        width = int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0
        if width and bool(np.all(np.diff(offsets) == width)):  # equal lengths: whole rows are copied at once
            return cls(new, None, rows, width)
        source = np.arange(new[-1], dtype=np.int64)
        source += np.repeat(starts - new[:-1], lengths)
        return cls(new, source, rows, None)

    def apply(self, values: Array) -> Array:
        if isinstance(self.source, slice):
            return values[self.source]
        if self.source is not None:
            return values.take(self.source, axis=0)
        blocks = values.reshape(-1, cast(int, self.width), *values.shape[1:])
        return blocks.take(self.rows, axis=0).reshape(-1, *values.shape[1:])


@dataclass(frozen=True, eq=False)
class Ragged:
    """Any number of values per row: `values` [total, *trailing] over `offsets` int64 [rows + 1]."""

    values: Array
    offsets: Int64

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Ragged:
        """UTF-8 bytes of each text."""
        encoded = [text.encode() for text in texts]
        values = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        return cls(values, offsets_of([len(text) for text in encoded]))

    @classmethod
    def of_rows(cls, rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Ragged:
        """One array per row."""
        arrays = [np.asarray(values, dtype=dtype) for values in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, offsets_of([len(values) for values in arrays]))

    def texts(self) -> list[str]:
        data, offsets = self.values.tobytes(), self.offsets.tolist()
        return [data[start:end].decode() for start, end in itertools.pairwise(offsets)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)

    def select(self, rows: Int64) -> Ragged:
        gather = _Gather.plan(self.offsets, rows)
        return Ragged(gather.apply(self.values), gather.offsets)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths))


def _sealed(array: Array) -> Array:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Base of the stage types. `offsets` int64 [rows + 1] is shared by all token columns."""

    offsets: Int64

    @classmethod
    @functools.cache
    def columns(cls) -> dict[str, Column]:
        """Every column of this stage by name."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["column"] for f in fields if "column" in f.metadata}

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _sealed(np.asarray(self.offsets, dtype=np.int64)))
        for name, column in self.columns().items():
            value = getattr(self, name)
            if value is None and column.optional:
                continue
            values = value.values if isinstance(value, Ragged) else value
            expected = (self._count(column, value), *column.trailing)
            if not isinstance(values, np.ndarray) or values.dtype != column.dtype or values.shape != expected:
                found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
                raise DataError(
                    f"{type(self).__name__}.{name}: expected {column.dtype} {expected} "
                    f"({column.kind.value} column of {self.num_rows} rows), found {found}"
                )
            if isinstance(value, Ragged):
                if len(value) != self.num_rows:
                    raise DataError(f"{type(self).__name__}.{name}: {len(value)} rows, expected {self.num_rows}")
                sealed: Array | Ragged = Ragged(_sealed(values), _sealed(value.offsets))
            else:
                sealed = _sealed(values)
            object.__setattr__(self, name, sealed)

    def _count(self, column: Column, value: Array | Ragged) -> int:
        if column.kind is Kind.RAGGED:
            return int(value.offsets[-1]) if isinstance(value, Ragged) else -1
        return self.num_rows if column.kind is Kind.ROW else self.num_tokens

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Int64:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def row_of_token(self) -> Int64:
        """The row that each token belongs to, int64 [tokens]."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), self.lengths)

    def select(self, rows: npt.ArrayLike) -> Self:
        """The given rows, in the given order; neighbouring rows are views, anything else one vectorized copy."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise DataError(f"{type(self).__name__}: rows up to {rows.max()} asked for, there are {self.num_rows}")
        gather = _Gather.plan(self.offsets, rows)
        neighbours = isinstance(gather.source, slice)
        chosen: dict[str, Any] = {"offsets": gather.offsets}
        for name, column in self.columns().items():
            value = getattr(self, name)
            if value is None:
                continue
            if column.kind is Kind.TOKEN:
                chosen[name] = gather.apply(value)
            elif column.kind is Kind.RAGGED:
                chosen[name] = value.select(rows)
            else:
                chosen[name] = value[rows[0] : rows[-1] + 1] if neighbours else value.take(rows, axis=0)
        return type(self)(**chosen)

    def split(self, counts: Sequence[int]) -> list[Self]:
        """Consecutive parts of the given numbers of rows, as views."""
        if sum(counts) != self.num_rows:
            raise DataError(f"{type(self).__name__}: parts of {list(counts)} rows do not add up to {self.num_rows}")
        bounds = np.cumsum([0, *counts])
        return [self.select(np.arange(a, b)) for a, b in itertools.pairwise(bounds)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {"offsets": offsets_of(np.concatenate([part.lengths for part in parts]))}
        for name, column in cls.columns().items():
            values = [getattr(part, name) for part in parts]
            missing = sum(value is None for value in values)
            if missing == len(values):
                continue
            if missing:
                raise DataError(f"{cls.__name__}.{name}: {missing} of {len(values)} parts lack this column")
            joined[name] = Ragged.concat(values) if column.kind is Kind.RAGGED else np.concatenate(values)
        return cls(**joined)

    def replace(self, **columns: Array | Ragged | None) -> Self:
        """The same rows with some columns exchanged."""
        return dataclasses.replace(self, **cast(Any, columns))

    def row_columns(self) -> dict[str, Array]:
        """The columns with one value per row: what a driver plans on."""
        return {
            name: getattr(self, name)
            for name, column in self.columns().items()
            if column.kind is Kind.ROW and getattr(self, name) is not None
        }
