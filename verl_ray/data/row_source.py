"""Rows of a run's data sets, drawn batch by batch.

Invariant: the rows that are drawn, and their order, depend on the files, the settings,
the seed and what a curriculum chooses: neither on the sizes of the batches nor on
resumes.

Sets that fit are read and tokenized as a whole when the source is made, so that every
mistake in them is reported then. Larger ones (`data.stream_above_gib`) stay on disk:
records are read and tokenized as they are drawn. A record that the run cannot use is
left out of the former, and passed over in the latter.

Deliberately not here: what a record is (`records.py`) and how it becomes tokens (the
subclasses).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from verl_ray.config.data import DataFilesConfig, DataSet
from verl_ray.data.batch import Batch, Int64
from verl_ray.data.curriculum import Curriculum
from verl_ray.data.cursor import Cursor, CursorState, Mixture, fingerprint
from verl_ray.data.fields import Fields
from verl_ray.data.files import read_rows, size_bytes
from verl_ray.data.records import Reading
from verl_ray.data.stored_rows import StoredRows, open_rows
from verl_ray.errors import DataError

RecordT = TypeVar("RecordT")
RowsT = TypeVar("RowsT", bound=Batch)

DataSets = str | Path | DataSet | Sequence[DataSet]
"""One data set or several."""

_GIB = 2**30


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
            self.mixture, self._store.digest, seed=seed, shuffle=config.shuffle
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
        """State of the cursor and a fingerprint of the data, as plain JSON values."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the last batch drawn before `state()`.

        Raises:
            DataError: the data have changed.
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
                records.append(reading.record(where, fields))
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
        return _InMemory(encoded.rows, tuple(counts.tolist()))

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

    def __init__(self, rows: RowsT, counts: tuple[int, ...]) -> None:
        self.rows = rows
        self.counts = counts
        self.digest = fingerprint(rows)


class _OnDisk(Generic[RecordT]):
    """Records of all sets, which stay on disk."""

    def __init__(
        self, parts: Sequence[StoredRows], readings: Sequence[Reading[RecordT]]
    ) -> None:
        self.counts = tuple(len(part) for part in parts)
        self.digest = "streamed: " + ", ".join(part.digest for part in parts)
        self._parts = parts
        self._readings = readings
        self._firsts = np.cumsum((0, *self.counts))

    def read(self, rows: Int64) -> list[RecordT]:
        """Read records by their numbers over all sets, int64 [rows]."""
        parts = np.searchsorted(self._firsts, rows, side="right") - 1
        records: dict[int, RecordT] = {}
        for part in np.unique(parts).tolist():
            of_part = rows[parts == part]
            stored = self._parts[part].read(of_part - self._firsts[part])
            read = self._readings[part].record
            records |= {
                row: read(where, fields)
                for row, (where, fields) in zip(of_part.tolist(), stored, strict=True)
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
