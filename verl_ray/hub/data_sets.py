"""Data sets of the hub: which part of one is meant, and its files.

Invariant: the files are in the cache, in the order of their rows, and no code of a
repository is run. `verl_ray/data/files.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_ray.config.data import DataSet
from verl_ray.errors import HubError, Problem
from verl_ray.hub.snapshots import fetch, find_snapshot
from verl_ray.settings.hub_ids import Snapshot, is_hub_id
from verl_ray.suggest import did_you_mean, either

FILES = (
    "README.md",
    "*.parquet",
    "*.jsonl",
    "*.json",
    "*.csv",
)
"""Files of a data set: its rows, and the page that names its subsets and splits."""

TRAINING_SPLITS = ("train",)
"""Splits that training data are taken from, the first that there is."""

HELD_OUT_SPLITS = ("validation", "test")
"""Splits that held-out data are taken from, the first that there is."""


def pinned(data_set: DataSet, splits: tuple[str, ...] = TRAINING_SPLITS) -> DataSet:
    """Return a data set of the hub with its commit, its subset and its split.

    Its files are in the cache then. The same entry gives the same rows ever after.

    Args:
        data_set: The data set, of which everything but the path may be None.
        splits: Splits that are taken where the entry names none, in this order.

    Raises:
        HubError: It is unavailable, it has no such subset or split, or the entry has to
            choose between several.
    """
    snapshot = find_snapshot(data_set.path, data_set.revision, "dataset")
    fetch(snapshot, FILES, shows_progress=True)

    subset = data_set.subset or _only_subset(snapshot)
    builder = _builder(snapshot, subset)
    present = [str(split) for split in builder.config.data_files or ()]
    split = data_set.split
    if split is None:
        split = next((name for name in splits if name in present), None)
    if split not in present:
        rule = f"it has no split {data_set.split or ' or '.join(splits)}"
        fix = f"Name one of its own: {_entry(data_set, subset, present)}."
        raise HubError(data_set.path, rule, fix)
    return replace(data_set, revision=snapshot.commit, subset=subset, split=split)


def pinned_data(
    data: Mapping[str, Any], recorded: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the section `data` with an entry in place of each id of the hub.

    An entry has commit, subset and split. Data sets that are unavailable become
    problems and stay as they are; so does everything that is no id.

    Args:
        data: The section as plain values. A path is a text, an entry, or a list of
            them.
        recorded: The same section in the checkpoint that the run continues from, which
            decides which commit is meant; it may be empty.
    """
    section = dict(data)
    problems: list[Problem] = []
    for name, splits in (
        ("train_path", TRAINING_SPLITS),
        ("validation_path", HELD_OUT_SPLITS),
    ):
        several = isinstance(data.get(name), list)
        values = data[name] if several else [data.get(name)]
        commits = _recorded_commits(recorded.get(name))
        try:
            values = [_pinned_value(value, commits, splits) for value in values]
        except HubError as error:
            key = f"data.{name}"
            problems.append(
                Problem(key, error.repository, error.rule, error.fix, error.may_pass)
            )
        section[name] = values if several else values[0]
    return section, problems


def _recorded_commits(value: Any) -> dict[str, str]:
    """Return the commit of each data set that a path of a checkpoint names."""
    entries = value if isinstance(value, list) else [value]
    return {
        entry["path"]: entry["revision"]
        for entry in entries
        if isinstance(entry, Mapping) and entry.get("revision")
    }


def _pinned_value(
    value: Any, commits: Mapping[str, str], splits: tuple[str, ...]
) -> Any:
    """Return the entry of a data set of the hub; every other value as it is."""
    entry = {"path": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not is_hub_id(entry["path"]):
        return value

    path = entry["path"]
    data_set = DataSet(
        path,
        subset=entry.get("subset"),
        split=entry.get("split"),
        revision=entry.get("revision") or commits.get(path),
    )
    data_set = pinned(data_set, splits)
    place = {
        "subset": data_set.subset,
        "split": data_set.split,
        "revision": data_set.revision,
    }
    in_words = ", ".join(f"{name} {value}" for name, value in place.items())
    print(f"{path}: {in_words}", flush=True)
    return {**entry, **place}


def files_of(entry: DataSet) -> list[Path]:
    """Return the files of an entry that is pinned, in the order of their rows."""
    snapshot = find_snapshot(entry.path, entry.revision, "dataset")
    files = _builder(snapshot, entry.subset).config.data_files[entry.split]
    return [Path(file) for file in files]


def _only_subset(snapshot: Snapshot) -> str:
    """Return the subset that is meant where none is named."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(str(snapshot.folder))
    except Exception as error:
        raise _unreadable(snapshot, error) from error
    if len(names) == 1 or "default" in names:
        return "default" if "default" in names else str(names[0])

    rule = f"it has several subsets: {', '.join(names)}"
    fix = f"Name one: {{path: {snapshot.repository}, subset: {names[0]}}}."
    raise HubError(snapshot.repository, rule, fix)


def _builder(snapshot: Snapshot, subset: str | None) -> Any:
    """Return the reader of a subset, which knows its splits and their files."""
    import datasets

    folder = str(snapshot.folder)
    try:
        names = datasets.get_dataset_config_names(folder)
        if subset in names:
            return datasets.load_dataset_builder(folder, name=subset)
    except Exception as error:
        raise _unreadable(snapshot, error) from error

    fix = did_you_mean(str(subset), names, "subset")
    raise HubError(snapshot.repository, f"it has no subset {subset}", fix)


def _unreadable(snapshot: Snapshot, error: Exception) -> HubError:
    """Return the error about files that the library cannot read as rows."""
    has_files = snapshot.folder.is_dir() and any(
        file.suffix not in (".md", ".py") for file in snapshot.folder.rglob("*.*")
    )
    if not has_files:
        rule = "it has no files of rows; code that makes them is never run"
        fix = (
            "Take a commit with Parquet files: the hub keeps one for many data sets,"
            " {path: "
            f"{snapshot.repository}, revision: refs/convert/parquet}}."
        )
        return HubError(snapshot.repository, rule, fix)

    reason = " ".join(str(error).split())
    rule = f"its files cannot be read ({type(error).__name__}: {reason})"
    return HubError(snapshot.repository, rule, "Take another revision of it.")


def _entry(data_set: DataSet, subset: str, splits: list[str]) -> str:
    """Return the entry of a data set with the splits that it may name."""
    split = either(splits)
    return f"{{path: {data_set.path}, subset: {subset}, split: {split}}}"
