"""Rows of a run's data sets, drawn batch by batch.

Invariant: the rows that are drawn, and their order, depend on the files, the settings,
the seed and what a curriculum chooses: neither on the sizes of the batches nor on
resumes.

Sets that fit are read and tokenized as a whole when the source is made, so that every
mistake in them is reported then. Larger ones (`data.stream_above_gib`) stay on disk:
records are read and tokenized as they are drawn. A record that the run cannot use is
left out of the former, and passed over in the latter.

Of streamed sets, what is in memory does not grow with the contents of a file, only with
the number of its rows (8 bytes each). Row n is the same record that `read_rows` yields
as its nth. Lines of a .jsonl file are found by an index of their places, which is made
once, as the file is opened. Parquet compresses many rows together, so the `datasets`
library first writes its rows to its cache (HF_DATASETS_CACHE), once, where they can be
mapped.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from verl_ray.columns.batch import Batch, Int64
from verl_ray.config.data import DataFilesConfig, DataSet
from verl_ray.data.curriculum import Curriculum
from verl_ray.data.cursor import Cursor, CursorState, Mixture, fingerprint
from verl_ray.data.fields import Fields
from verl_ray.data.files import (
    object_of_line,
    parts_of,
    read_rows,
    saved_table,
    size_bytes,
    without_added_nulls,
)
from verl_ray.data.records import Reading
from verl_ray.errors import DataError

if TYPE_CHECKING:
    import datasets

RecordT = TypeVar("RecordT")
RowsT = TypeVar("RowsT", bound=Batch)

DataSets = str | Path | DataSet | Sequence[DataSet]
"""One data set or several."""

_GIB = 2**30

_LATER_COLUMNS = ("template_arguments",)
"""Columns that are younger than the versions whose digest counts whole rows."""


@dataclass(frozen=True)
class Encoded(Generic[RowsT]):
    """Records as rows of tokens.

    Attributes:
        rows: The rows of the records that the run can use.
        numbers: Numbers of these records among all that were encoded, int64 [rows].
        skipped: The others, counted by the reason.
    """

    rows: RowsT
    numbers: Int64
    skipped: Mapping[str, int]


class RowSource(ABC, Generic[RecordT, RowsT]):
    """The data sets of a run, and the place in them.

    Attributes:
        read_as: How each set was read, in words.
        skipped: Records left out so far, by the reason.
        is_streamed: Whether the records stay on disk.
        mixture: Numbers of rows of the sets, and their weights.
        curriculum: What chooses among the next rows; None: all are drawn.
    """

    unit = "record"
    """What a record is, for messages."""

    def __init__(
        self,
        data_sets: DataSets,
        config: DataFilesConfig,
        seed: int,
        *,
        most_records: int | None = None,
        may_stream: bool = False,
    ) -> None:
        """Read the data sets, or open those that stay on disk.

        Args:
            most_records: Number of records to read of each set at most; None reads all
                of them.
            may_stream: Whether large sets may stay on disk. Then only `next_batch` has
                rows.

        Raises:
            DataError: A set cannot be read, or no row remains.
        """
        self._data_sets = as_data_sets(data_sets)
        self.skipped: dict[str, int] = {}
        self.read_as: list[str] = []
        self.curriculum: Curriculum | None = None

        is_large = are_large(self._data_sets, config)
        self.is_streamed = may_stream and is_large and most_records is None
        self._store: _InMemory[RowsT] | _OnDisk[RecordT]
        if self.is_streamed:
            self._store = self._open()
        else:
            self._store = self._read(most_records)

        weights = tuple(data_set.weight for data_set in self._data_sets)
        self.mixture = Mixture(self._store.counts, weights)
        self._cursor = Cursor(
            self.mixture,
            self._store.digest,
            seed=seed,
            shuffle=config.shuffle,
            earlier_digest=self._store.earlier_digest,
        )

    def __len__(self) -> int:
        """Number of rows of an epoch; of streamed sets, those without use included."""
        return self.mixture.rows_per_epoch

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""
        return self._cursor.epoch

    @property
    def passed_over(self) -> int:
        """Records passed over: streamed ones without use, or by the curriculum."""
        return self._cursor.passed

    @property
    def drawn(self) -> int:
        """Rows drawn since the start of the run."""
        return self._cursor.drawn

    def state(self) -> CursorState:
        """State of the cursor and a digest of the records, as plain JSON values."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`.

        Raises:
            DataError: the records or their order have changed.
        """
        self._cursor.load_state(state)

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[RecordT]:
        """Return how the records of a set are read, by its first record."""

    @abstractmethod
    def _encode(self, records: Sequence[RecordT], *, is_all: bool) -> Encoded[RowsT]:
        """Turn records into rows.

        Args:
            is_all: Whether these are all records of the run, of which some have to
                remain, or some that were drawn.

        Raises:
            DataError: A record does not fit, and may not be left out.
        """

    def _contents(self, rows: RowsT, records: Sequence[RecordT]) -> RowsT:
        """Return rows without what the path, the format or the layout of files decides.

        Their digest tells whether a resumed run has the same records.

        Args:
            rows: All rows of the run.
            records: The record of each row.
        """
        # Tokens and numbers are the same wherever the record stood.
        return rows

    def _draw(self, count: int) -> tuple[RowsT, Int64]:
        """Return the next `count` rows, and their numbers over all sets, int64.

        Raises:
            DataError: An epoch has no row that the run can use.
        """
        if isinstance(self._store, _InMemory):
            numbers = self._next_numbers(count)
            return self._store.rows.select(numbers), numbers

        parts: list[RowsT] = []
        numbers_of_parts = []
        missing = count
        passed = 0
        # Each round reads as many records as rows are missing, and passes over those
        # that have no use; ends with the last row.
        while missing:
            numbers = self._next_numbers(missing)
            records = self._store.read(numbers)
            encoded = self._encode(records, is_all=False)
            num_passed = len(records) - len(encoded.numbers)
            self._cursor.pass_over(num_passed)
            if self.curriculum is not None:
                self.curriculum.note_useless(np.delete(numbers, encoded.numbers))
            self._count_skipped(encoded.skipped)
            parts.append(encoded.rows)
            numbers_of_parts.append(numbers[encoded.numbers])
            missing -= len(encoded.numbers)

            passed = passed + num_passed if not len(encoded.numbers) else 0
            if passed >= len(self):
                raise DataError(
                    f"none of the {len(self)} records of an epoch can be used"
                    f" ({_in_words(self.skipped)})"
                )
        return type(parts[0]).concat(parts), np.concatenate(numbers_of_parts)

    def _next_numbers(self, count: int) -> Int64:
        """Return the numbers of the next `count` rows that the curriculum draws."""
        if self.curriculum is None:
            return self._cursor.draw(count)
        if self.curriculum.is_exhausted:
            raise DataError(
                f"data.curriculum.solved_from: all {self.mixture.num_rows} rows of"
                " data.train_path are solved or without use, so there is nothing to"
                " draw",
                fix="Add harder problems, raise it, or set it to null",
            )
        return self._cursor.draw_accepted(count, self.curriculum.accepts)

    def _first_rows(self, limit: int | None) -> RowsT:
        """Return the first `limit` rows in the order of the files."""
        assert isinstance(self._store, _InMemory), "streamed rows are only drawn"
        rows = self._store.rows
        return rows.select(np.arange(rows.num_rows)[:limit])

    # ------------------------------------------------------------------------- private

    def _read(self, most_records: int | None) -> _InMemory[RowsT]:
        """Read and tokenize the records of all sets."""
        records: list[RecordT] = []
        ends = [0]
        for data_set in self._data_sets:
            rows = islice(read_rows(data_set), most_records)
            reading: Reading[RecordT] | None = None
            for where, fields in rows:
                if reading is None:
                    reading = self._reading(data_set, fields, where)
                    self.read_as.append(reading.description)
                numbers = range(reading.per_row)
                records += [reading.record(where, fields, number) for number in numbers]
            if reading is None:
                raise DataError(
                    "holds no records",
                    fix=f"expected at least one {self.unit}",
                    subject=data_set.path,
                )
            ends.append(len(records))

        encoded = self._encode(records, is_all=True)
        self._count_skipped(encoded.skipped)
        counts = np.diff(np.searchsorted(encoded.numbers, ends))
        used = [records[number] for number in encoded.numbers]
        digest = fingerprint(self._contents(encoded.rows, used))
        return _InMemory(encoded.rows, tuple(counts.tolist()), digest)

    def _open(self) -> _OnDisk[RecordT]:
        """Open the sets, and read the first record of each."""
        parts = []
        readings = []
        for data_set in self._data_sets:
            stored = open_rows(data_set)
            if not len(stored):
                raise DataError(
                    "holds no records",
                    fix=f"expected at least one {self.unit}",
                    subject=data_set.path,
                )
            ((where, fields),) = stored.read(np.zeros(1, np.int64))
            readings.append(self._reading(data_set, fields, where))
            parts.append(stored)

        self.read_as = [reading.description for reading in readings]
        return _OnDisk(parts, readings)

    def _count_skipped(self, skipped: Mapping[str, int]) -> None:
        for reason, count in skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class _InMemory(Generic[RowsT]):
    """Rows of all sets, one set after the other."""

    def __init__(self, rows: RowsT, counts: tuple[int, ...], digest: str) -> None:
        self.rows = rows
        self.counts = counts
        self.digest = digest

    def earlier_digest(self) -> str:
        """Return the digest that the states of earlier versions have."""
        return fingerprint(self.rows, without=_LATER_COLUMNS)


class _OnDisk(Generic[RecordT]):
    """Records of all sets, which stay on disk."""

    def __init__(
        self, parts: Sequence[StoredRows], readings: Sequence[Reading[RecordT]]
    ) -> None:
        self.counts = tuple(
            len(part) * reading.per_row
            for part, reading in zip(parts, readings, strict=True)
        )
        self.digest = "streamed: " + ", ".join(part.digest for part in parts)
        self._parts = parts
        self._readings = readings
        self._firsts = np.cumsum((0, *self.counts))

    def earlier_digest(self) -> str:
        """Return the digest that the states of earlier versions have."""
        # What is read of the files has no paths.
        return self.digest

    def read(self, rows: Int64) -> list[RecordT]:
        """Read records by their numbers over all sets, int64 [rows]."""
        parts = np.searchsorted(self._firsts, rows, side="right") - 1
        records: dict[int, RecordT] = {}
        for part in np.unique(parts).tolist():
            part_rows = rows[parts == part]
            reading = self._readings[part]
            file_rows, numbers = np.divmod(
                part_rows - self._firsts[part], reading.per_row
            )
            stored = self._parts[part].read(file_rows)
            records |= {
                row: reading.record(where, fields, number)
                for row, number, (where, fields) in zip(
                    part_rows.tolist(), numbers.tolist(), stored, strict=True
                )
            }
        return [records[row] for row in rows.tolist()]


def are_large(data_sets: Sequence[DataSet], config: DataFilesConfig) -> bool:
    """Return whether training sets stay on disk."""
    return sum(map(size_bytes, data_sets)) > config.stream_above_gib * _GIB


def as_data_sets(data_sets: DataSets) -> tuple[DataSet, ...]:
    """Return data sets as settings; a path alone is a set of weight 1."""
    if isinstance(data_sets, str | Path):
        return (DataSet(str(data_sets)),)
    if isinstance(data_sets, DataSet):
        return (data_sets,)
    return tuple(data_sets)


def _in_words(skipped: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {reason.replace('_', ' ')}" for reason, count in skipped.items()
    )


# ------------------------------------------------------------------------- rows on disk


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
            part_rows = rows[parts == part]
            records = self._parts[part].read(part_rows - self._firsts[part])
            read |= zip(part_rows.tolist(), records, strict=True)
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
