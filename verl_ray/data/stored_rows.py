"""Rows of data sets that stay on disk and are read by their numbers.

Invariant: what is in memory does not grow with the contents of a file, only with the
number of its rows (8 bytes each). Row n is the same record that `read_rows` yields as
its nth. Deliberately not here: what the fields of a record mean (`records.py`), and the
order of the rows (`cursor.py`).

Lines of a .jsonl file are found by an index of their places, which is made once, as the
file is opened. Parquet compresses many rows together, so the `datasets` library first
writes its rows to its cache (HF_DATASETS_CACHE), once, where they can be mapped.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.data import DataSet
from verl_ray.data.batch import Int64
from verl_ray.data.fields import Fields
from verl_ray.data.files import (
    object_of_line,
    parts_of,
    saved_table,
    without_added_nulls,
)
from verl_ray.errors import DataError

if TYPE_CHECKING:
    import datasets

Row = tuple[str, Fields]
"""The place of a record, for errors, and its fields."""

_CHUNK_BYTES = 2**24
_LONGEST_BLANK_LINE = 2  # bytes of "\r\n"


class StoredRows(ABC):
    """Rows on disk."""

    digest: str
    """Digest that changes where rows are added, left out or made longer."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Int64) -> list[Row]:
        """Read rows by their numbers, int64 [rows], in this order.

        Raises:
            DataError: A row cannot be read.
        """


def open_rows(data_set: DataSet) -> StoredRows:
    """Open a data set that stays on disk.

    Raises:
        DataError: There is no such set, or its format has no rows that can be read by
            their numbers.
    """
    refuse_unstreamable(data_set)
    parts = [_open_part(part) for part in parts_of(data_set)]
    return parts[0] if len(parts) == 1 else _Joined(parts)


def refuse_unstreamable(data_set: DataSet) -> None:
    """Raise DataError if a file of a set has no rows that can be read by numbers."""
    for part in parts_of(data_set):
        if not part.is_dir() and part.suffix not in (".jsonl", ".parquet"):
            raise DataError(
                f"a {part.suffix} file cannot be streamed",
                fix="write it as .jsonl or .parquet, or raise data.stream_above_gib"
                " above its size",
                place=part,
            )


def _open_part(part: Path) -> StoredRows:
    if part.is_dir():
        table = saved_table(part)
        # The library's own fingerprint follows what was done to the rows.
        return _Table(table, str(part), _digest(table._fingerprint.encode()))
    if part.suffix == ".jsonl":
        return _Lines(part)
    return _converted(part)


class _Joined(StoredRows):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *(len(part) for part in parts)])
        self.digest = _digest(*(part.digest.encode() for part in parts))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def read(self, rows: Int64) -> list[Row]:
        parts = np.searchsorted(self._firsts, rows, side="right") - 1
        read: dict[int, Row] = {}
        for part in np.unique(parts):
            of_part = rows[parts == part]
            records = self._parts[part].read(of_part - self._firsts[part])
            read |= zip(of_part.tolist(), records, strict=True)
        return [read[row] for row in rows.tolist()]


class _Lines(StoredRows):
    """The lines of a .jsonl file that are not blank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts = _line_starts(path)
        lengths = np.diff(starts)

        # Only lines as short as this can be blank in a file that a program wrote.
        has_content = np.ones(len(lengths), np.bool_)
        with path.open("rb") as file:
            for line in np.flatnonzero(lengths <= _LONGEST_BLANK_LINE):
                file.seek(starts[line])
                has_content[line] = bool(file.read(lengths[line]).strip())

        self._lines = np.flatnonzero(has_content)
        self._starts = starts
        self.digest = _digest(starts.tobytes())

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, rows: Int64) -> list[Row]:
        records = []
        with self._path.open("rb") as file:
            for line in self._lines[rows].tolist():
                start, end = self._starts[line : line + 2]
                file.seek(start)
                where = f"{self._path}, line {line + 1}"
                records.append((where, object_of_line(file.read(end - start), where)))
        return records


def _line_starts(path: Path) -> Int64:
    """Return the place in bytes at which each line begins, and the file's end."""
    parts = [np.zeros(1, np.int64)]
    size = 0
    with path.open("rb") as file:
        # Each round takes a chunk; ends with the file.
        while chunk := file.read(_CHUNK_BYTES):
            newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            parts.append(newlines + size + 1)
            size += len(chunk)

    starts = np.concatenate(parts)
    # The last line may have no newline at its end.
    return starts if starts[-1] == size else np.append(starts, size)


class _Table(StoredRows):
    """The rows of a table of the `datasets` library, mapped into memory."""

    def __init__(self, table: datasets.Dataset, name: str, digest: str) -> None:
        self._table = table.with_format(None)
        self._name = name
        self.digest = digest

    def __len__(self) -> int:
        return len(self._table)

    def read(self, rows: Int64) -> list[Row]:
        numbers = rows.tolist()
        columns = self._table[numbers]
        records = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        return [
            (f"{self._name}, row {number + 1}", without_added_nulls(fields))
            for number, fields in zip(numbers, records, strict=True)
        ]


def _converted(path: Path) -> StoredRows:
    """Return the rows of a Parquet file, written to the library's cache if need be."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    try:
        # The metadata has the size and the statistics of every page.
        metadata = pyarrow.parquet.read_metadata(path)
        table = datasets.Dataset.from_parquet(str(path))
    except (pa.ArrowException, OSError, datasets.exceptions.DatasetsError) as error:
        cause = " ".join(str(error).split())
        raise DataError(
            f"cannot be read as Parquet ({cause})",
            fix="write the file again",
            place=path,
        ) from None
    digest = _digest(repr(metadata.to_dict()).encode(), str(table.num_rows).encode())
    return _Table(table, str(path), digest)


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
