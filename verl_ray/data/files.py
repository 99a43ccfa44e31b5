"""Files of records: .jsonl, .parquet, or a folder saved by Hugging Face datasets.

Invariant: every format is read into the same objects, and each comes with its place
(the file and the line or row), so that an error can name it. Deliberately not here:
which fields a record has (`records.py`), and downloads of any kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Fields = dict[str, object]
"""Fields of one record, as the file has them."""

_FOLDER = "a folder saved by Hugging Face datasets (save_to_disk)"
_SUFFIXES = (".jsonl", ".parquet")
_MOST_FILES = 4  # files of a folder that a message lists
_FORMATS = f"a .jsonl file, a .parquet file, or {_FOLDER}"


# ------------------------------------------------------------------------------ reading


def read_rows(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read (place, fields) of every record of a file or folder, in its order.

    Raises:
        DataError: the path does not exist, or cannot be read in its format.
    """
    if not path.exists():
        raise DataError(
            f"{path} does not exist; set data.train_path and data.validation_path to"
            f" {_FORMATS}"
        )
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(
        f"{path}: found a file with suffix {path.suffix!r}, expected {_FORMATS}"
    )


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
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where}: not JSON ({_mistake(error, line)}); expected one JSON"
                    " object per line"
                ) from None
            if not isinstance(fields, dict):
                raise DataError(
                    f"{where}: found {type(fields).__name__}, expected a JSON object"
                )
            yield where, fields


def _mistake(error: ValueError | RecursionError, line: bytes) -> str:
    """Return what is wrong with a line that `json` refuses, and at which column."""
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(line.decode(errors="replace").rstrip())
        place = "the end of the line" if at_end else f"column {error.pos + 1}"
        return f"{error.msg} at {place}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # All that remains is Python's limit for the digits of an integer.
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def _read_parquet(path: Path) -> Iterator[tuple[str, Fields]]:
    # Imported here, because most processes read no data files.
    import pyarrow as pa
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                _refuse_undecodable(batch, path, number)
                raise
            for fields in rows:
                number += 1
                yield f"{path}, row {number}", fields
    # Damaged pages are an OSError.
    except (pa.ArrowException, OSError) as error:
        # Such an error may have several lines.
        cause = " ".join(str(error).split())
        raise DataError(
            f"{path}: cannot be read as Parquet ({cause}); write the file again"
        ) from None


def _refuse_undecodable(batch: pa.RecordBatch, path: Path, rows_before: int) -> None:
    """Raise DataError for the first value that is no UTF-8, with its row and field."""
    for row in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[row].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, row {rows_before + row + 1}, {name}: not UTF-8 ({error});"
                    " write the file with texts that are"
                ) from None


def _read_folder(path: Path) -> Iterator[tuple[str, Fields]]:
    import datasets

    try:
        # A folder of several splits has this file; each split is a folder in it.
        index = path / "dataset_dict.json"
        splits = json.loads(index.read_text())["splits"] if index.exists() else []
        if not splits:
            rows = datasets.load_from_disk(str(path)).with_format(None)
            for number, fields in enumerate(rows, start=1):
                yield f"{path}, row {number}", fields
    # A damaged folder fails wherever the library looks first.
    except Exception as error:
        files = _files_in(path)
        way_on = f"take one of its files: {', '.join(files)}" if files else ""
        raise DataError(
            f"{path}: not {_FOLDER} ({type(error).__name__}: {error});"
            f" {way_on or 'write it again with save_to_disk'}"
        ) from None

    if splits:
        listed = ", ".join(str(path / split) for split in splits)
        raise DataError(
            f"{path} holds several splits; point data.train_path at one of them:"
            f" {listed}"
        )


def _files_in(folder: Path) -> list[str]:
    """Return the first files in a folder that could be read by themselves."""
    files = (file for file in sorted(folder.rglob("*")) if file.suffix in _SUFFIXES)
    return [str(file) for file in islice(files, _MOST_FILES)]


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

    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    files.jsonl.write_text("".join(lines), encoding="utf-8")

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
