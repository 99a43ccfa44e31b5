"""Files of records: .jsonl, .json, .csv and .parquet, folders of them, and globs.

Invariant: the records of a path come in an order that only depends on its files. Every
format is read into the same objects, and each comes with its place (the file, and the
line, record or row), so that an error can name it. Values of a .csv file are texts, and
an empty value is null. Messages from Parquet have the fields that were written, without
those that Arrow adds.
"""

from __future__ import annotations

import csv
import glob
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_ray.config.data import DataSet
from verl_ray.data.fields import Fields, is_messages, without_nulls
from verl_ray.errors import DataError
from verl_ray.hub.data_sets import files_of, pinned
from verl_ray.settings.hub_ids import is_hub_id

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_SAVED = "a folder saved by Hugging Face datasets (save_to_disk)"
_MOST_FILES = 4  # files of a folder that a message lists

FORMATS = (
    "a .jsonl, .json, .csv or .parquet file, a folder of such files, a glob such as"
    f" 'data/*.parquet', or {_SAVED}"
)
"""What can be read, for messages."""

# The library writes the first into a folder of splits, and the second into others.
_MARKS_OF_SAVED = ("dataset_dict.json", "state.json")

_SPLITS = re.compile(
    r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?:$|[-_.])", re.IGNORECASE
)


_PARQUET_ROWS = 1_000  # rows of a Parquet file that are in memory as objects

_MOST_CSV_CHARACTERS = 2**31 - 1  # of a value; the library allows 131,072


# ---------------------------------------------------------------- files, folders, globs


def read_rows(source: Path | DataSet) -> Iterator[tuple[str, Fields]]:
    """Read (place, fields) of every record of a file, folder or glob, in its order.

    Raises:
        DataError: the path does not exist, or cannot be read in its format, or holds
            several splits of which none is named.
    """
    data_set = source if isinstance(source, DataSet) else DataSet(str(source))
    if is_hub_id(data_set.path):
        return _read_hub(data_set)
    return itertools.chain.from_iterable(map(_read_part, parts_of(data_set)))


def parts_of(data_set: DataSet) -> list[Path]:
    """Return the files that a data set is read from, in the order of their names.

    A folder that the `datasets` library saved is one part.

    Raises:
        DataError: the path does not exist, or holds several splits of which none is
            named, or files of several formats.
    """
    path = Path(data_set.path)
    split = data_set.split
    if is_hub_id(data_set.path):
        return files_of(pinned(data_set))
    if path.is_dir():
        if is_saved(path):
            return [_part_of_saved(path, split)]
        return _files_of(path, split)
    if split is not None:
        raise DataError(
            "is no folder of several splits",
            fix=f"leave out split={split}",
            subject=path,
        )
    if not path.exists() and is_glob(path):
        return _matches(path)
    if not path.exists():
        raise DataError(
            "does not exist",
            fix=f"set data.train_path and data.validation_path to {FORMATS}",
            subject=path,
        )
    return [path]


def is_saved(folder: Path) -> bool:
    """Return whether the `datasets` library saved a folder."""
    return any((folder / name).exists() for name in _MARKS_OF_SAVED)


def size_bytes(data_set: DataSet) -> int:
    """Return the size of all files of a data set; 0 for a path that leads to none."""
    if is_hub_id(data_set.path):
        files = files_of(pinned(data_set))
    else:
        files = files_at(Path(data_set.path))
    return sum(file.stat().st_size for file in files)


def _read_part(part: Path) -> Iterator[tuple[str, Fields]]:
    return _read_saved(part) if part.is_dir() else _read_file(part)


def _read_hub(data_set: DataSet) -> Iterator[tuple[str, Fields]]:
    """Read the rows of a data set of the hub.

    The place names data set, subset, split and row.
    """
    entry = pinned(data_set)
    place = f"{entry.path}, {entry.subset}, {entry.split}"
    rows = (fields for file in files_of(entry) for _, fields in _read_file(file))
    for number, fields in enumerate(rows, start=1):
        yield f"{place}, row {number}", fields


def is_glob(path: Path) -> bool:
    """Return whether a path has a character that stands for others: *, ? or [."""
    return any(character in str(path) for character in "*?[")


def files_at(path: Path) -> list[Path]:
    """Return the files that a path leads to, sorted; a missing path has none."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.exists():
        return [path]
    # Path.glob raises an error for patterns such as `**.jsonl`.
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207
    return sorted(Path(name) for name in names)


def _read_file(path: Path) -> Iterator[tuple[str, Fields]]:
    if path.suffix not in READERS:
        raise DataError(
            f"found a file with suffix {path.suffix!r}", expected=FORMATS, place=path
        )
    return READERS[path.suffix](path)


def _matches(pattern: Path) -> list[Path]:
    """Return the files that a glob matches, sorted."""
    files = [path for path in files_at(pattern) if path.is_file()]
    if not files:
        folder = pattern.parent
        raise DataError(
            "matches no file",
            fix=f"expected a glob such as {folder / '*.parquet'}, or the path of"
            f" {FORMATS}",
            subject=pattern,
        )
    return _of_one_suffix(files, pattern, "matches")


def _files_of(folder: Path, split: str | None) -> list[Path]:
    """Return the data files that lie in a folder, sorted; those of the split alone."""
    files = sorted(file for file in folder.iterdir() if file.suffix in READERS)
    if not files:
        deeper = (file for file in sorted(folder.rglob("*")) if file.suffix in READERS)
        names = ", ".join(str(file) for file in islice(deeper, _MOST_FILES))
        way_on = f"take one of its files: {names}" if names else f"expected {FORMATS}"
        rule = f"holds no data files, nor is it {_SAVED}"
        raise DataError(rule, fix=way_on, subject=folder)

    # Who learns from the folder of a data set does not mean its held-out part.
    splits = {file: _split_of(file) for file in files}
    names_of_splits = sorted({name for name in splits.values() if name is not None})
    if split is not None:
        files = [file for file in files if splits[file] == split]
    if not files or (split is None and len(names_of_splits) > 1):
        raise _choose_a_split(folder, splits, split)
    return _of_one_suffix(files, folder, "holds")


def _split_of(file: Path) -> str | None:
    """Return the split that a file is named after, as train-00000-of-00002 is."""
    match = _SPLITS.search(file.stem)
    return match[1].lower() if match is not None else None


def _choose_a_split(
    folder: Path, splits: dict[Path, str | None], split: str | None
) -> DataError:
    named = [file for file, name in splits.items() if name is not None] or splits
    files = ", ".join(str(file) for file in islice(named, _MOST_FILES))
    if split is not None:
        rule = f"holds no file of the split {split!r}; its files are {files}"
        return DataError(rule, subject=folder)
    return DataError(
        "holds several splits",
        fix=f"point data.train_path at the files of one of them: {files}",
        subject=folder,
    )


def _of_one_suffix(files: list[Path], path: Path, verb: str) -> list[Path]:
    """Return files that all have the same format.

    Args:
        files: The files that a path leads to.
        path: The path, a folder or a glob.
        verb: What it does to the files, for the error.
    """
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        first = files[0]
        listed = ", ".join(str(file) for file in files[:_MOST_FILES])
        raise DataError(
            f"{verb} files of several formats ({', '.join(suffixes)})",
            fix="take one of its files, or all of one format with a glob such as"
            f" '{first.parent / f'*{first.suffix}'}': {listed}",
            subject=path,
        )
    return files


def _part_of_saved(path: Path, split: str | None) -> Path:
    """Return the folder of a split, or the folder itself if it has no splits."""
    splits = _splits_of_saved(path)
    if split is None and not splits:
        return path
    if split in splits:
        return path / str(split)

    if not splits:
        raise DataError(
            "holds a single split", fix=f"leave out split={split}", subject=path
        )
    listed = ", ".join(str(path / name) for name in splits)
    problem = "several splits" if split is None else f"no split {split!r}"
    raise DataError(
        f"holds {problem}",
        fix=f"point data.train_path at one of them: {listed}",
        subject=path,
    )


def saved_table(folder: Path) -> datasets.Dataset:
    """Return the table of a folder that the `datasets` library saved, mapped.

    Raises:
        DataError: the folder is damaged.
    """
    import datasets

    try:
        return datasets.load_from_disk(str(folder)).with_format(None)
    # A damaged folder fails wherever the library looks first.
    except Exception as error:
        raise _damaged(folder, error) from None


def _read_saved(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Read the rows of a folder that the `datasets` library saved."""
    table = saved_table(folder)
    try:
        for number, fields in enumerate(table, start=1):
            yield f"{folder}, row {number}", without_added_nulls(fields)
    except Exception as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"not {_SAVED} ({type(error).__name__}: {error})",
        fix="write it again with save_to_disk",
        place=folder,
    )


def _splits_of_saved(path: Path) -> list[str]:
    """Return the splits of a saved folder, each of which is a folder in it."""
    index = path / "dataset_dict.json"
    if not index.exists():
        return []
    try:
        return list(json.loads(index.read_text())["splits"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from None


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


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Fields]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""Suffix of a file -> what reads it."""


# ------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The same records in every format that can be read."""

    jsonl: Path
    parquet: Path
    folder: Path


def write_records(records: Sequence[Fields], directory: Path, name: str) -> DataFiles:
    """Write records in every format, replacing earlier files.

    The files are `<name>.jsonl`, `<name>.parquet` and a datasets folder `<name>/`.
    """
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    directory.mkdir(parents=True, exist_ok=True)
    files = DataFiles(
        jsonl=directory / f"{name}.jsonl",
        parquet=directory / f"{name}.parquet",
        folder=directory / name,
    )

    files.jsonl.write_bytes(as_jsonl(records))

    table = pa.Table.from_pylist(list(records))
    pyarrow.parquet.write_table(table, files.parquet)

    # A progress bar per file would fill the log.
    shows_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset(table).save_to_disk(str(files.folder))
    finally:
        if shows_bars:
            datasets.enable_progress_bars()
    return files


def as_jsonl(records: Iterable[Mapping[str, object]]) -> bytes:
    """Return the contents of a .jsonl file: equal records make equal bytes.

    Raises:
        DataError: A value is none that JSON has.
    """
    lines = []
    for number, record in enumerate(records, start=1):
        try:
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"row {number} cannot be written as JSON ({error})",
                fix="expected texts, numbers, true, false, null, and lists and objects"
                " of these",
            ) from None
    return "".join(lines).encode()
