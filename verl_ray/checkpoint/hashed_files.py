"""Files of a checkpoint that are hashed as they are written, where they are written.

Nobody has to read them again for their checksums, which would take the driver
minutes where a checkpoint has a terabyte.

Invariant: a record is of the bytes that were handed to the file system. A disk that
stores others is noticed when the checkpoint is read.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.filesystem import (
    FileSystem,
)

from verl_ray.checkpoint.manifest import FileRecord, new_hash


class HashingFileSystem(FileSystem):
    """The file system of one save of torch's distributed checkpoint.

    Attributes:
        records: The files that were written through it, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Iterator[io.IOBase]:
        """Open a file; one that is written is hashed meanwhile."""
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            yield hashing
        self.records[Path(path).name] = hashing.record

    def rename(
        self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]
    ) -> None:
        """Rename a file that may have been written before."""
        super().rename(path, new_path)
        record = self.records.pop(Path(path).name, None)
        if record is not None:
            self.records[Path(new_path).name] = record


class _HashingStream(io.IOBase):
    """A file that is written from its beginning to its end, and its hash so far."""

    def __init__(self, file: io.IOBase) -> None:
        self._file = file
        self._hash = new_hash()
        self._size = 0

    @property
    def record(self) -> FileRecord:
        return self._size, self._hash.hexdigest()

    def write(self, content: bytes | memoryview) -> int:
        self._hash.update(content)
        written: int = self._file.write(content)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Python's own buffer comes before the disk's.
        self._file.flush()
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
