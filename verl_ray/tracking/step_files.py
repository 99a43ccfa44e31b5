"""Files of a run's folder which belong to a step each, such as step_000010.jsonl."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def step_path(folder: Path, step: int, suffix: str) -> Path:
    """Return the file of a step.

    Args:
        folder: Folder of all such files.
        step: Number of the step.
        suffix: End of their names, without the dot.
    """
    return folder / f"step_{step:06d}.{suffix}"


def step_files(folder: Path, suffix: str) -> dict[int, Path]:
    """Return the files of a folder by their steps, in increasing order."""
    pattern = re.compile(rf"step_(\d+)\.{suffix}")
    paths = {}
    for path in folder.glob(f"step_*.{suffix}"):
        name = pattern.fullmatch(path.name)
        if name is not None:
            paths[int(name[1])] = path
    return dict(sorted(paths.items()))


def drop_after(paths: Mapping[int, Path], step: int) -> None:
    """Remove the files of later steps than `step`, which run again.

    Raises:
        OSError: A file cannot be removed.
    """
    for number, path in paths.items():
        if number > step:
            path.unlink()
