"""Python arguments as a command: a root config, a folder and overrides.

Invariant: what has no text (rows, functions) is written to the run's folder first, so
the configuration names files and the run can be resumed. Equal rows make equal files.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from controllers.compose.composition import examine
from controllers.compose.grammar import keys_of, overrides_of
from controllers.compose.listing import named_root
from controllers.python_api.contract import Data, RunRequest
from controllers.python_api.reward_functions import has_functions, reward_specs
from controllers.run.finished import claim
from verl_ray.config.data import DataSet
from verl_ray.data.files import as_jsonl
from verl_ray.disk import replace_file
from verl_ray.errors import ConfigError, DataError, Problem

ARGUMENTS = "arguments"
"""Folder in run.dir with the rows and functions that a call was given."""

_TRAIN = "data.train_path"
_VALIDATION = "data.validation_path"


@dataclass(frozen=True)
class Command:
    """The words of a command line that would do the same.

    Attributes:
        config_name: The root config.
        overrides: The settings, in Hydra's grammar.
        config_dir: A folder of the user's own, or None.
    """

    config_name: str
    overrides: list[str]
    config_dir: str | None


@contextlib.contextmanager
def command_of(
    request: RunRequest, *, evaluates: bool = False, starts: bool = True
) -> Iterator[Command]:
    """Yield the command that a call stands for; the block checks it.

    A folder that was made for the call is removed where the block refuses it, and the
    rows and functions of an earlier call are there again.

    Args:
        request: The arguments of the call.
        evaluates: Whether the command is `evaluate`.
        starts: False where nothing is started, so that such a folder is always removed.

    Raises:
        ConfigError: An argument is none that a command can have.
    """
    config_dir = None if request.config_dir is None else str(request.config_dir)
    root, config_dir = named_root(request.config_name, config_dir)
    overrides = [*overrides_of(_texts(request)), *_overrides(request)]
    command = Command(root, overrides, config_dir)

    rows = {
        key: data
        for key, data in _data(request).items()
        if data is not None and _are_rows(data)
    }
    if not rows and not has_functions(request.reward):
        if request.reward is not None:
            command.overrides.extend(reward_specs(request.reward, Path()))
        yield command
        return

    folder = _pin_folder(command, rows, evaluates=evaluates)
    with contextlib.ExitStack() as made:
        # The folder of all runs may be new as well, and is then empty.
        if not folder.parent.exists():
            made.callback(_remove_empty, folder.parent)
        if not folder.exists():
            made.callback(shutil.rmtree, folder, ignore_errors=True)

        made.callback(_restore, folder / ARGUMENTS, _contents(folder / ARGUMENTS))
        _write(command, folder, rows, request)
        yield command
        if starts:
            made.pop_all()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a folder, which need not exist."""
    return {path: path.read_bytes() for path in folder.glob("*")}


def _restore(folder: Path, contents: Mapping[Path, bytes]) -> None:
    """Make a folder hold these files and no others."""
    for path, content in _contents(folder).items():
        if path not in contents:
            path.unlink()
        elif content != contents[path]:
            replace_file(path, contents[path])
    if not contents:
        _remove_empty(folder)


def _write(
    command: Command,
    folder: Path,
    rows: Mapping[str, Data],
    request: RunRequest,
) -> None:
    """Write rows and functions to the folder of a run, and name the files."""
    # Another process may be training on them.
    with claim(str(folder)):
        written = folder / ARGUMENTS
        written.mkdir(exist_ok=True)

        for key, data in rows.items():
            name = "train" if key == _TRAIN else "validation"
            path = written / f"{name}.jsonl"
            assert not isinstance(data, str | Path)
            _write_rows(key, data, path)
            command.overrides.extend(overrides_of({key: path}))
        if request.reward is not None:
            command.overrides.extend(reward_specs(request.reward, written))


def _pin_folder(command: Command, rows: Iterable[str], *, evaluates: bool) -> Path:
    """Return the folder of the run, and fix its name, which may hold the time.

    Args:
        command: The command, whose name and folder become overrides.
        rows: Keys of data that have no path yet.
        evaluates: Whether the command is `evaluate`.
    """
    unwritten = overrides_of(dict.fromkeys(rows, ARGUMENTS))
    composition = examine(
        command.config_name,
        [*command.overrides, *unwritten],
        command.config_dir,
        evaluates=evaluates,
    )
    config = composition.config
    # All other problems are found once more, together with those of the data.
    bad_keys = {problem.key for problem in composition.problems}
    if config is None or bad_keys & {"run.name", "run.dir"}:
        raise ConfigError(composition.problems)

    pinned = {"run.name": config.run.name, "run.dir": config.run.dir}
    command.overrides.extend(overrides_of(pinned))
    return Path(config.run.dir)


def _data(request: RunRequest) -> dict[str, Data | None]:
    return {_TRAIN: request.data, _VALIDATION: request.validation_data}


def _texts(request: RunRequest) -> dict[str, object]:
    """Return the arguments that are settings, by key."""
    values: dict[str, object] = {
        "model.path": request.model,
        "run.name": request.name,
        "run.dir": request.run_dir,
    }
    for key, data in _data(request).items():
        if data is not None and not _are_rows(data):
            values[key] = data
    return {key: value for key, value in values.items() if value is not None}


def _overrides(request: RunRequest) -> list[str]:
    """Return the overrides of a call, none of which is an argument as well."""
    given_overrides = request.overrides
    if given_overrides is None:
        return []
    if isinstance(given_overrides, str):
        rule = "this is a single text"
        fix = 'Give a dict ({"run.total_steps": 20}) or a list of texts.'
        raise ConfigError([Problem("overrides", given_overrides, rule, fix)])

    if isinstance(given_overrides, Mapping):
        keys = keys_of(given_overrides)
        texts = overrides_of(given_overrides)
    else:
        keys = [text.partition("=")[0].lstrip("+") for text in given_overrides]
        texts = list(given_overrides)

    arguments = {*_texts(request)}
    arguments |= {key for key, data in _data(request).items() if data is not None}
    for key in keys:
        if key in arguments:
            rule = "this setting is an argument of the call and an override as well"
            raise ConfigError([Problem(key, key, rule, "Leave one of them out.")])
    return texts


# -------------------------------------------------------------------------------- rows


def _are_rows(data: Data) -> bool:
    """Return whether data are rows, and not the names of files."""
    if isinstance(data, str | Path):
        return False
    if not isinstance(data, Sequence):
        return True
    return not all(isinstance(entry, str | Path) or _is_set(entry) for entry in data)


def _is_set(entry: object) -> bool:
    """Return whether a dict names a set of records: its path, its weight and so on."""
    names = {field.name for field in fields(DataSet)}
    return isinstance(entry, Mapping) and "path" in entry and entry.keys() <= names


def _write_rows(
    key: str, data: Iterable[Mapping[str, object] | str | Path], path: Path
) -> None:
    """Write rows, unless the file holds the same ones already.

    Raises:
        ConfigError: They are no rows, or hold what JSON has not.
    """
    rows: list[Mapping[str, object]] = []
    for row in _iterated(key, data):
        if not isinstance(row, Mapping):
            rule = f"row {len(rows) + 1} is a {type(row).__name__}"
            fix = "Give dicts, a datasets.Dataset, or the path of a file."
            raise ConfigError([Problem(key, repr(row)[:80], rule, fix)])
        rows.append(row)

    try:
        content = as_jsonl(rows)
    except DataError as error:
        fix = "Give other values, or write the rows to a Parquet file and name it."
        raise ConfigError([Problem(key, "rows", str(error), fix)]) from None
    if not path.exists() or path.read_bytes() != content:
        replace_file(path, content)


def _iterated(
    key: str, data: Iterable[Mapping[str, object] | str | Path]
) -> Iterable[Mapping[str, object] | str | Path]:
    """Return the rows of what was given, a table by its rows."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        rule = "this is a table of pandas"
        fix = 'Give its rows: table.to_dict("records").'
        raise ConfigError([Problem(key, type(data).__name__, rule, fix)])

    if not isinstance(data, Iterable):
        rule = f"this is a {type(data).__name__}"
        fix = "Give the path of a file, or dicts."
        raise ConfigError([Problem(key, repr(data)[:80], rule, fix)])
    # A data set may show its rows as tensors.
    datasets = sys.modules.get("datasets")
    if datasets is None:
        return data
    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        rule = "these are several splits"
        fix = f"Give one of them: data[{next(iter(data), 'train')!r}]."
        raise ConfigError([Problem(key, type(data).__name__, rule, fix)])
    if isinstance(data, datasets.Dataset):
        rows: Iterable[Mapping[str, object]] = data.with_format(None)
        return rows
    return data
