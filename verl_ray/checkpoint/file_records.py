"""Size and hash of a file, as the manifest of a checkpoint lists them.

Deliberately not here: files that are hashed while they are written (`sharded.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FileRecord = tuple[int, str]
"""Size of a file in bytes, and the BLAKE2b-128 of its contents."""


def file_record(path: Path) -> FileRecord:
    """Read a file, and return its record.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, new_hash)
        return file.tell(), digest.hexdigest()


def new_hash() -> hashlib.blake2b:
    """Return the hash of a checkpoint's files, without data."""
    return hashlib.blake2b(digest_size=16)
