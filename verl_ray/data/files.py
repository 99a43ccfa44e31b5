"""Files of records: single ones, folders of them, and globs.

Invariant: the records of a path come in an order that only depends on its files.
Deliberately not here: the formats (`file_formats.py`), which fields a record has
(`records.py`), and downloads of any kind.
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.config.data import DataSet
from verl_ray.data.file_formats import READERS, Fields, without_added_nulls
from verl_ray.errors import DataError
from verl_ray.hub.data_sets import hub_files, hub_rows
from verl_ray.hub.names import is_hub_id

if TYPE_CHECKING:
    import datasets

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


# ------------------------------------------------------------------------------ reading


def read_rows(source: Path | DataSet) -> Iterator[tuple[str, Fields]]:
    """Read (place, fields) of every record of a file, folder or glob, in its order.

    Raises:
        DataError: the path does not exist, or cannot be read in its format, or holds
            several splits of which none is named.
    """
    data_set = source if isinstance(source, DataSet) else DataSet(str(source))
    if is_hub_id(data_set.path):
        return hub_rows(data_set)
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
        return hub_files(data_set)
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
        files = hub_files(data_set)
    else:
        files = files_at(Path(data_set.path))
    return sum(file.stat().st_size for file in files)


def _read_part(part: Path) -> Iterator[tuple[str, Fields]]:
    return _read_saved(part) if part.is_dir() else _read_file(part)


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
