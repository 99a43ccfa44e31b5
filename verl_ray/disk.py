"""Files that must outlive a loss of power: what was handed to these functions is on the disk when they return.

Invariant: a file that is replaced holds all of the old content or all of the new one at every moment. Deliberately not
here: what the files mean, and errors of this project (callers say which key to change).
"""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the disk has the contents of a file, or the names in a directory. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file anew, or leave it as it was. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)
