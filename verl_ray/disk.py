"""Files that must outlive a loss of power.

Invariant: what was given to these functions is on the disk when they return. A file
that is replaced holds all of the old content or all of the new at every moment.
"""

from __future__ import annotations

import os
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
