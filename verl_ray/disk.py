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


def replace_file(path: Path, content: bytes) -> None:
    """Write a file anew, or leave it as it was.

    Raises:
        OSError: The file cannot be written.
    """
    # The content is on the disk before the name points to it.
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    # The directory holds the new name.
    sync(path.parent)
