"""Rows in columns: the frozen base of every stage type, and its vectorized operations.

Invariant: a batch never changes and never pads. Its columns are NumPy arrays of three
kinds: one value per row, one value per token (flat, all token columns over one shared
`offsets`), and `Ragged` columns with their own offsets (texts, version spans). Pickled
with protocol 5 every column travels out of band. A reader of Ray's object store
therefore gets a read-only view of what is stored, and no copy. Where rows live is in
`sharded.py`, what they mean in `stages.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from verl_ray.errors import DataError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


# --------------------------------------------------------------------- kinds of columns


class Kind(enum.Enum):
    """Unit that a column has values for."""

    ROW = "row"
    TOKEN = "token"
    RAGGED = "ragged"


ANY = -1
"""A dimension of a column whose size its values decide."""


@dataclass(frozen=True)
class Column:
    """Declaration of one field of a stage.

    Attributes:
        kind: The unit that the column has values for.
        dtype: The element type.
        trailing: The shape behind the row or token dimension; ANY is any size.
        optional: Whether the field may be None.
    """

    kind: Kind
    dtype: np.dtype[Any]
    trailing: tuple[int, ...]
    optional: bool


def _column(
    kind: Kind, dtype: npt.DTypeLike, trailing: tuple[int, ...], optional: bool
) -> Any:
    column = Column(kind, np.dtype(dtype), trailing, optional)
    metadata = {"column": column}
    if optional:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


def row(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """Declare a column with one value per row: [rows, *trailing]."""
    return _column(Kind.ROW, dtype, trailing, optional)


def token(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """Declare a column with one value per token, flat: [tokens, *trailing]."""
    return _column(Kind.TOKEN, dtype, trailing, optional)


def ragged(dtype: npt.DTypeLike, *trailing: int, optional: bool = False) -> Any:
    """Declare a column with any number of values per row, over its own offsets."""
    return _column(Kind.RAGGED, dtype, trailing, optional)


# -------------------------------------------------------------------------- ragged rows


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """Row starts and the total behind them: int64 [rows + 1] from lengths [rows]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class _Gather:
    """Plan for copying some rows of a ragged column.

    Attributes:
        offsets: Offsets of the copied rows, int64 [copied rows + 1].
        source: The flat positions to copy, or one slice of them; None where `width` is
            set.
        rows: The rows to copy, int64 [copied rows].
        width: The length of every row, where whole rows of equal length are copied.
    """

    offsets: Int64
    source: slice | Int64 | None
    rows: Int64
    width: int | None

    @classmethod
    def plan(cls, offsets: Int64, rows: Int64) -> _Gather:
        """Choose the cheapest way to copy `rows` of a column over `offsets`."""
        starts = offsets[rows]
        lengths = offsets[rows + 1] - starts
        new_offsets = offsets_of(lengths)

        # Neighbouring rows are one slice: a view, and no copy.
        if len(rows) and bool(np.all(np.diff(rows) == 1)):
            first = int(starts[0])
            end = int(starts[0] + new_offsets[-1])
            return cls(new_offsets, slice(first, end), rows, None)

        # Rows of equal length are copied whole, which needs no position per token.
        width = 0
        if len(offsets) > 1:
            width = int(offsets[1] - offsets[0])
        if width and bool(np.all(np.diff(offsets) == width)):
            return cls(new_offsets, None, rows, width)

        source = np.arange(new_offsets[-1], dtype=np.int64)
        source += np.repeat(starts - new_offsets[:-1], lengths)
        return cls(new_offsets, source, rows, None)

    def apply(self, values: Array) -> Array:
        """Return the flat values of the planned rows."""
        if isinstance(self.source, slice):
            return values[self.source]
        if self.source is not None:
            return values.take(self.source, axis=0)
        trailing = values.shape[1:]
        blocks = values.reshape(-1, cast(int, self.width), *trailing)
        return blocks.take(self.rows, axis=0).reshape(-1, *trailing)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Any number of values per row.

    Attributes:
        values: The values of all rows, flat: [total, *trailing].
        offsets: Row starts and the total behind them, int64 [rows + 1].
    """

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
        """Rows from one array each."""
        arrays = [np.asarray(values, dtype=dtype) for values in rows]
        # np.concatenate refuses an empty list
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, offsets_of([len(values) for values in arrays]))

    def texts(self) -> list[str]:
        """Each row, decoded as UTF-8."""
        # One copy of all bytes, of which slices are cheap.
        data = self.values.tobytes()
        bounds = itertools.pairwise(self.offsets.tolist())
        return [data[start:end].decode() for start, end in bounds]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int64:
        """Values of each row, int64 [rows]."""
        return np.diff(self.offsets)

    def select(self, rows: Int64) -> Ragged:
        """Return the rows `rows`, in this order."""
        gather = _Gather.plan(self.offsets, rows)
        return Ragged(gather.apply(self.values), gather.offsets)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join all rows of all parts, in order."""
        values = np.concatenate([part.values for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(values, offsets_of(lengths))


def _read_only(array: Array) -> Array:
    """Return a read-only view of `array`; the caller's own array stays writeable."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


# -------------------------------------------------------------------------------- batch


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Base of the stage types: columns over the same rows.

    `offsets`, int64 [rows + 1], is shared by all token columns.

    Raises:
        DataError: a column does not have the declared dtype or shape.
    """

    offsets: Int64

    @classmethod
    @functools.cache
    def columns(cls) -> dict[str, Column]:
        """Every column of this stage by name."""
        fields = dataclasses.fields(cls)
        return {f.name: f.metadata["column"] for f in fields if "column" in f.metadata}

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets, dtype=np.int64)
        # The class is frozen: attributes are set past its own __setattr__
        object.__setattr__(self, "offsets", _read_only(offsets))

        for name, column in self.columns().items():
            value = getattr(self, name)
            if value is None and column.optional:
                continue
            self._verify(name, column, value)
            # Columns from Ray's object store are read-only; all others are made so.
            read_only: Array | Ragged
            if isinstance(value, Ragged):
                read_only = Ragged(_read_only(value.values), _read_only(value.offsets))
            else:
                read_only = _read_only(value)
            object.__setattr__(self, name, read_only)

    def _verify(self, name: str, column: Column, value: Array | Ragged) -> None:
        """Raise DataError if `value` is not what `column` declares."""
        values = value.values if isinstance(value, Ragged) else value
        expected = (self._count(column, value), *column.trailing)
        is_array = isinstance(values, np.ndarray)
        if is_array and values.ndim == len(expected):
            sizes = zip(expected, values.shape, strict=True)
            expected = tuple(own if size == ANY else size for size, own in sizes)
        if not is_array or values.dtype != column.dtype or values.shape != expected:
            actual = type(values).__name__
            if is_array:
                actual = f"{values.dtype} {values.shape}"
            raise DataError(
                f"{type(self).__name__}.{name}: expected {column.dtype} {expected}"
                f" ({column.kind.value} column of {self.num_rows} rows), found"
                f" {actual}"
            )

        if isinstance(value, Ragged) and len(value) != self.num_rows:
            raise DataError(
                f"{type(self).__name__}.{name}: {len(value)} rows, expected"
                f" {self.num_rows}"
            )

    def _count(self, column: Column, value: Array | Ragged) -> int:
        """Return the expected first dimension of a column's flat values."""
        if column.kind is Kind.ROW:
            return self.num_rows
        if column.kind is Kind.TOKEN:
            return self.num_tokens
        if isinstance(value, Ragged):
            return int(value.offsets[-1])
        # No array has this many values: a ragged column must be a Ragged.
        return -1

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all rows."""
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
        """Return the rows `rows`, in this order.

        Neighbouring rows are views; any other choice is one vectorized copy.

        Raises:
            DataError: a row number is out of range.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise DataError(
                f"{type(self).__name__}: rows up to {rows.max()} were requested, there"
                f" are {self.num_rows}"
            )

        # Planned once, since all token columns share their offsets.
        gather = _Gather.plan(self.offsets, rows)
        are_neighbours = isinstance(gather.source, slice)
        selected: dict[str, Any] = {"offsets": gather.offsets}

        for name, column in self.columns().items():
            value = getattr(self, name)
            if value is None:
                continue
            if column.kind is Kind.TOKEN:
                selected[name] = gather.apply(value)
            elif column.kind is Kind.RAGGED:
                selected[name] = value.select(rows)
            elif are_neighbours:
                selected[name] = value[rows[0] : rows[-1] + 1]
            else:
                selected[name] = value.take(rows, axis=0)

        return type(self)(**selected)

    def split(self, counts: Sequence[int]) -> list[Self]:
        """Split into consecutive parts of `counts` rows, as views.

        Raises:
            DataError: the counts do not add up to the number of rows.
        """
        if sum(counts) != self.num_rows:
            raise DataError(
                f"{type(self).__name__}: parts of {list(counts)} rows do not add up to"
                f" {self.num_rows}"
            )
        bounds = np.cumsum([0, *counts])
        return [
            self.select(np.arange(start, end))
            for start, end in itertools.pairwise(bounds)
        ]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join all rows of all parts, in order.

        Raises:
            DataError: some parts have an optional column that others lack.
        """
        if len(parts) == 1:
            return parts[0]

        lengths = np.concatenate([part.lengths for part in parts])
        joined: dict[str, Any] = {"offsets": offsets_of(lengths)}

        for name, column in cls.columns().items():
            values = [getattr(part, name) for part in parts]
            # An optional column may be absent, but then from all parts.
            missing = sum(value is None for value in values)
            if missing == len(values):
                continue
            if missing:
                raise DataError(
                    f"{cls.__name__}.{name}: {missing} of {len(values)} parts lack this"
                    " column"
                )
            if column.kind is Kind.RAGGED:
                joined[name] = Ragged.concat(values)
            else:
                joined[name] = np.concatenate(values)

        return cls(**joined)

    def replace(self, **columns: Array | Ragged | None) -> Self:
        """Return the same rows with some columns exchanged."""
        # It builds a new batch, which verifies the new columns too.
        return dataclasses.replace(self, **cast(Any, columns))

    def row_columns(self) -> dict[str, Array]:
        """Columns with one value per row: what a driver plans on."""
        present = {}
        for name, column in self.columns().items():
            value = getattr(self, name)
            if column.kind is Kind.ROW and value is not None:
                present[name] = value
        return present


# -------------------------------------------------------------------------------- files


B = TypeVar("B", bound=Batch)

_OFFSETS = ".offsets"


def write_batch(path: Path, batch: Batch) -> None:
    """Write a batch to a new file; its columns without values are left out.

    The batch that `read_batch` returns is equal to it, bit by bit.
    """
    arrays: dict[str, Array] = {}
    for column in dataclasses.fields(batch):
        values = getattr(batch, column.name)
        if isinstance(values, Ragged):
            arrays[column.name] = values.values
            arrays[column.name + _OFFSETS] = values.offsets
        elif values is not None:
            arrays[column.name] = values
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its flag is no array


def read_batch(
    path: Path,
    stage: type[B],
    renewed: Callable[[dict[str, Any]], dict[str, Any]] = lambda columns: columns,
) -> B:
    """Read a batch of a stage that `write_batch` wrote; nothing in it is executed.

    Args:
        renewed: Returns the columns that an earlier version wrote as they are today.
    """
    columns: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            if name.endswith(_OFFSETS):
                continue
            values = arrays[name]
            if name + _OFFSETS in arrays.files:
                columns[name] = Ragged(values, arrays[name + _OFFSETS])
            else:
                columns[name] = values
    return stage(**renewed(columns))
