"""Formats of single files: .jsonl, .json, .csv and .parquet.

Invariant: every format is read into the same objects, and each comes with its place
(the file, and the line, record or row), so that an error can name it. Values of a .csv
file are texts, and an empty value is null. Messages from Parquet have the fields that
were written, without those that Arrow adds. Deliberately not here: folders and globs
(`files.py`), and which fields a record has (`records.py`).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_ray.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Fields = dict[str, object]
"""Fields of one record, as the file has them."""

_PARQUET_ROWS = 1_000  # rows of a Parquet file that are in memory as objects

_MOST_CSV_CHARACTERS = 2**31 - 1  # of a value; the library allows 131,072


# --------------------------------------------------------------------------------- JSON


def read_jsonl(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read (place, object) of every line that is not blank.

    Raises:
        DataError: a line is not a JSON object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue

            where = f"{path}, line {number}"
            yield where, object_of_line(line, where)


def object_of_line(line: bytes, where: str) -> Fields:
    """Return the object of one line.

    Args:
        where: The place of the line, for errors.

    Raises:
        DataError: the line is not a JSON object.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        mistake = _mistake(error, line, "line")
        raise DataError(
            f"not JSON ({mistake})",
            fix="expected one JSON object per line",
            place=where,
        ) from None
    return _object(fields, where, "a JSON object (a .json file may be a list)")


def read_json(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read (place, object) of every record of a .json file.

    The file is a list of objects, an object with such a list as its `data`, or an
    object per line.

    Raises:
        DataError: the file is none of these.
    """
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Behind an object per line there is another one.
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            yield from read_jsonl(path)
            return
        mistake = _mistake(error, content, "file")
        raise DataError(
            f"not JSON ({mistake})",
            fix="expected a list of objects, or one JSON object per line",
            place=path,
        ) from None

    records = value
    if isinstance(value, dict):
        data = value.get("data")
        # A file of a single line is a single record.
        records = data if isinstance(data, list) else [value]
    if not isinstance(records, list):
        raise DataError(
            f"found {type(value).__name__}",
            expected="a list of JSON objects",
            place=path,
        )
    for number, fields in enumerate(records, start=1):
        where = f"{path}, record {number}"
        yield where, _object(fields, where, "a JSON object")


def _object(value: object, where: str, expected: str) -> Fields:
    if not isinstance(value, dict):
        raise DataError(f"found {type(value).__name__}", expected=expected, place=where)
    return value


def _mistake(
    error: ValueError | RecursionError, text: bytes, unit: Literal["line", "file"]
) -> str:
    """Return what is wrong with a text that `json` refuses, and where.

    Args:
        unit: What the text is.
    """
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(text.decode(errors="replace").rstrip())
        place = f"column {error.colno}"
        if unit == "file":
            place = f"line {error.lineno}, {place}"
        # Some of the library's messages end with the word.
        mistake = error.msg.removesuffix(" at")
        return f"{mistake} at {f'the end of the {unit}' if at_end else place}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # All that remains is Python's limit for the digits of an integer.
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


# ---------------------------------------------------------------------------------- CSV


def read_csv(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read (place, fields) of every record; the first line names the columns.

    Raises:
        DataError: the file is no UTF-8 or no CSV, its first line does not name the
            columns, or a line has another number of values.
    """
    csv.field_size_limit(_MOST_CSV_CHARACTERS)
    first_line = 1
    try:
        # The mark that spreadsheets put in front is no part of the first name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            names = _column_names(next(lines, []), path)
            first_line = lines.line_num + 1
            for values in lines:
                where = f"{path}, line {first_line}"
                # A value may have line breaks.
                first_line = lines.line_num + 1
                if values:
                    yield where, _named(names, values, where)
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} is not UTF-8",
            fix="write the file as UTF-8",
            place=path,
        ) from None
    except csv.Error as error:
        raise DataError(
            f"not CSV ({error})",
            fix="write the file again with quotes around values that hold commas,"
            " quotes or line breaks",
            place=f"{path}, line {first_line}",
        ) from None


def _column_names(names: Sequence[str], path: Path) -> Sequence[str]:
    """Return the names in the first line; an empty one in front is of an index."""
    expected = "expected the names of the columns in the first line"
    place = f"{path}, line 1"
    if not any(name.strip() for name in names):
        raise DataError("no values", fix=expected, place=place)

    for number, name in enumerate(names, start=1):
        is_index = number == 1 and not name
        if not is_index and (not name.strip() or _is_number(name)):
            rule = f"value {number} is {name!r}"
            raise DataError(rule, fix=expected, place=place)
        if name in names[number:]:
            raise DataError(f"{name!r} stands twice", fix=expected, place=place)
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(names: Sequence[str], values: Sequence[str], where: str) -> Fields:
    """Return the values of a line under the names of their columns."""
    if len(values) != len(names):
        raise DataError(
            f"found {len(values)} values",
            expected=f"{len(names)}, as many as the first line has names",
            fix="put quotes around values that hold commas",
            place=where,
        )
    pairs = zip(names, values, strict=True)
    return {name: value or None for name, value in pairs if name}


# ------------------------------------------------------------------------------ Parquet


def read_parquet(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read (place, fields) of every row.

    Raises:
        DataError: the file is damaged, or holds texts that are no UTF-8.
    """
    # Imported here, because most processes read no data files.
    import pyarrow as pa
    import pyarrow.parquet

    try:
        number = 0
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(_PARQUET_ROWS):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                _refuse_undecodable(batch, path, number)
                raise
            for fields in rows:
                number += 1
                yield f"{path}, row {number}", without_added_nulls(fields)
    # Damaged pages are an OSError.
    except (pa.ArrowException, OSError) as error:
        # Such an error may have several lines.
        cause = " ".join(str(error).split())
        raise DataError(
            f"cannot be read as Parquet ({cause})",
            fix="write the file again",
            place=path,
        ) from None


def _refuse_undecodable(batch: pa.RecordBatch, path: Path, rows_before: int) -> None:
    """Raise DataError for the first value that is no UTF-8, with its row and field."""
    for row in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[row].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"not UTF-8 ({error})",
                    fix="write the file with texts that are",
                    place=f"{path}, row {rows_before + row + 1}, {name}",
                ) from None


def without_added_nulls(fields: Fields) -> Fields:
    """Return a record of Arrow without the nulls in its messages.

    Arrow gives an object the fields of all others in its column, with nulls: the
    arguments of a call of one tool get those of every other tool. A chat template would
    write them. A null that somebody wrote there cannot be told apart, and goes too.
    Other columns keep their nulls, since a reward may ask for a field by its name.
    """
    return {name: _messages_without_nulls(value) for name, value in fields.items()}


def _messages_without_nulls(value: object) -> object:
    """Return a value in which chat messages, wherever they are, have no nulls."""
    if is_messages(value):
        return without_nulls(value)
    if isinstance(value, dict):
        return {name: _messages_without_nulls(part) for name, part in value.items()}
    return value


def without_nulls(value: object) -> object:
    """Return a value whose objects, at every depth, lack the fields that are null."""
    if isinstance(value, dict):
        items = value.items()
        return {name: without_nulls(part) for name, part in items if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def is_messages(value: object) -> bool:
    """Return whether a value is a list that begins with a chat message."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, dict) and ("role" in first or "from" in first)


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Fields]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""Suffix of a file -> what reads it."""
