"""Files that must outlive a loss of power, and files that belong to a step each.

Invariant: what was given to `sync` and `replace_file` is on the disk when they return.
A file that is replaced holds all of the old content or all of the new at every moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the disk has the contents of a file, or the names in a directory.

    Raises:
        OSError: The path cannot be opened or synchronised.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, *, is_shared: bool = False) -> None:
    """Write a file anew, or leave it as it was.

    Args:
        path: Path of the file.
        content: What it holds afterwards.
        is_shared: Whether another process may do the same at the same time.

    Raises:
        OSError: The file cannot be written.
    """
    # The content is on the disk before the name points to it.
    suffix = f".{os.getpid()}.part" if is_shared else ".part"
    part = path.with_name(path.name + suffix)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        # Nobody else would replace a part of this process.
        if is_shared:
            part.unlink(missing_ok=True)
        raise
    # The directory holds the new name.
    sync(path.parent)


# ---------------------------------------------------------------------- files of steps


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
