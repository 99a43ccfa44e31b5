"""Files in /dev/shm that hold the snapshots of one rank, or a copy of them.

Invariant: a snapshot that can be read is whole, and counts. Its index exists only while
the bytes that it describes do not change. Nothing here needs torch, so a process that
only copies starts at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from verl_ray.errors import CheckpointError
from verl_ray.ownership import Owner, prefix, stale_in
from verl_ray.private_files import (
    SHARED_MEMORY,
    create_private,
    open_private,
    shared_folder,
)

_NUM_SLOTS = 2
_BLOCK_BYTES = 512  # unit of stat(2)

PIECE_BYTES = 16 * 2**20
"""Largest part of a snapshot that travels to another node at a time."""

Memory = NDArray[np.uint8]
"""Bytes, uint8 [bytes]."""


class SnapshotFiles:
    """Room for two snapshots, so that the older one stays until the newer is whole."""

    def __init__(self, place: str, names: SnapshotNames) -> None:
        """Find what is there.

        Args:
            place: Beginning of the paths of the files.
            names: Says which of them count.
        """
        paths = [Path(f"{place}-{slot}") for slot in range(_NUM_SLOTS)]
        self._slots = [SnapshotFile(path, names) for path in paths]

    def follow(self, names: SnapshotNames) -> None:
        """Let others count: the run went back."""
        for slot in self._slots:
            slot.names = names

    def steps(self) -> list[int]:
        """Return the steps of which there is a whole snapshot."""
        # Another process may have copied one here since the last look.
        for slot in self._slots:
            slot.look()
        return [slot.step for slot in self._slots if slot.step is not None]

    def of(self, step: int) -> SnapshotFile:
        """Return the snapshot of one of the steps."""
        return next(slot for slot in self._slots if slot.step == step)

    def oldest(self) -> SnapshotFile:
        """Return the place of the older snapshot, or of none, for a new one."""
        return min(self._slots, key=lambda slot: slot.step or 0)

    def remove(self) -> None:
        """Remove the files, and give the memory back."""
        for slot in self._slots:
            slot.remove()


class SnapshotFile:
    """A file for the bytes of a snapshot, and one, its index, that describes them."""

    def __init__(self, path: Path, names: SnapshotNames) -> None:
        self.names = names
        self._path = path
        self._index = path.with_name(path.name + "-index")
        self._memory: Memory | None = None
        """Memory that this process writes to; None before the first snapshot."""
        self._file: int | None = None
        """Number of the file that this memory is of."""
        self.step: int | None = None
        """Step of the snapshot; None where there is no whole one."""
        self.look()

    def look(self) -> None:
        """Find out which step there is a snapshot of."""
        self.step = None
        with contextlib.suppress(OSError), self._open_index() as file:
            course, step = json.loads(file.readline())
            self.step = step if self.names.counts(course, step) else None

    # -------------------------------------------------------------------------- writing

    def reserve(
        self, nbytes: int, prepare: Callable[[Memory], None] | None = None
    ) -> Memory:
        """Return memory of this size in a file of this process; nothing counts now.

        Args:
            nbytes: The size.
            prepare: Called with memory that was not returned before.

        Raises:
            CheckpointError: There is no room.
        """
        self.discard()
        memory, number = self._memory, _file_number(self._path)
        if memory is not None and len(memory) == nbytes and self._file == number:
            return memory

        # A process that was killed may still write to its file.
        self._path.unlink(missing_ok=True)
        try:
            descriptor = create_private(self._path)
            try:
                # The memory is reserved now: without it, a write into the map would be
                # killed by SIGBUS later.
                os.posix_fallocate(descriptor, 0, max(nbytes, 1))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._too_small(nbytes, error) from error
        self._memory = self.read()[:nbytes]
        self._file = _file_number(self._path)
        if prepare is not None:
            prepare(self._memory)
        return self._memory

    def complete(self, step: int, description: bytes) -> None:
        """Let the snapshot count, all of whose bytes are written.

        Args:
            step: Its step.
            description: Says where its tensors lie.

        Raises:
            CheckpointError: There is no room.
        """
        line = json.dumps([self.names.course, step]).encode()
        self._write_index(line + b"\n" + description)

    def _write_index(self, index: bytes) -> None:
        partial = self._index.with_name(self._index.name + "-partial")
        # A process that was killed may have left one.
        partial.unlink(missing_ok=True)
        try:
            with os.fdopen(create_private(partial), "wb") as file:
                file.write(index)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._too_small(len(index), error) from error
        partial.rename(self._index)
        self.look()

    def _too_small(self, nbytes: int, error: OSError) -> CheckpointError:
        """Give the memory back; return the error that says what lacks room."""
        self.remove()
        return CheckpointError(
            f"a snapshot of {nbytes / 2**20:.0f} MiB cannot be written to"
            f" {SHARED_MEMORY}: {error.strerror}. Enlarge it (in a"
            " container: --shm-size), or set run.recovery.snapshot_every=0"
        )

    def discard(self) -> None:
        """Let the snapshot count no more."""
        self.step = None
        self._index.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove both files, and give the memory back."""
        self.step = None
        self._memory = None
        for path in (self._index, self._path):
            with contextlib.suppress(OSError):
                path.unlink()

    # -------------------------------------------------------------------------- reading

    def description(self) -> bytes:
        """Return what `complete` was given."""
        with self._open_index() as file:
            file.readline()
            return file.read()

    def read(self) -> Memory:
        """Return the bytes of the file, and perhaps some more."""
        with os.fdopen(open_private(self._path, os.O_RDWR), "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def _open_index(self) -> BinaryIO:
        """Open the index: a line with course and step, and the description."""
        return os.fdopen(open_private(self._index), "rb")

    # --------------------------------------------------------------- to another node

    def pieces(self) -> Iterator[Memory]:
        """Yield the index with the size, the bytes, and an empty piece.

        Raises:
            CheckpointError: Another snapshot has taken its place meanwhile.
        """
        identity = self._identity()
        with self._open_index() as file:
            index = file.read()
        memory = self.read()
        size = str(len(memory)).encode()
        yield np.frombuffer(size + b"\n" + index, np.uint8)
        for start in range(0, len(memory), PIECE_BYTES):
            yield memory[start : start + PIECE_BYTES]
            # The receiver has its own copy of the piece before it asks for the next
            # one. What it has is of this snapshot only if that still counts now.
            if self._identity() != identity:
                raise CheckpointError(
                    "a newer snapshot has taken its place before it was sent"
                )
        yield np.empty(0, np.uint8)

    def receive(self, pieces: Iterator[Memory]) -> None:
        """Write what `pieces` yields elsewhere; it counts once the empty piece is here.

        Raises:
            CheckpointError: There is no room, or the pieces end too early.
        """
        size, index = next(pieces).tobytes().split(b"\n", 1)
        nbytes = int(size)
        memory = self.reserve(nbytes)
        end = 0
        for piece in pieces:
            if not len(piece):
                assert end == nbytes, "the last piece is empty"
                self._write_index(index)
                return
            memory[end : end + len(piece)] = piece
            end += len(piece)
        raise CheckpointError(f"{end} of {nbytes} bytes of a snapshot have come")

    def _identity(self) -> tuple[int, int] | None:
        """Return what no other index has; None without one."""
        try:
            status = self._index.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _file_number(path: Path) -> int | None:
    """Return the number of a file in its file system; None if it does not exist."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


# -------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class SnapshotNames:
    """The names of a run's snapshots, and which of these count.

    A name has an owner that is seen on its node, so that what a killed run leaves can
    be removed there. What was stored on a course that the run has left counts up to the
    step that it went back to, wherever it is stored and whenever that ends.

    Attributes:
        run: Folder of the run.
        owner: The process that may outlive the run's driver and start another one, or
            the driver itself.
        series: A word for all drivers that went on from each other's snapshots.
        on_own_cluster: Whether the run has a cluster of one node, which each of its
            drivers starts anew.
        courses: A word for each course that the run has taken, in order, and the last
            step of it that counts; None for the present course.
    """

    run: str
    owner: Owner
    series: str
    on_own_cluster: bool
    courses: Mapping[str, int | None]

    @classmethod
    def of(cls, run: str, owner: Owner | None = None) -> Self:
        """Return the names for a run on a cluster of others, without snapshots yet.

        Args:
            run: Its folder.
            owner: The owner; None for this process.
        """
        # Another process of the run may have another working directory.
        folder = str(Path(run).resolve())
        new = {_new_word(): None}
        return cls(folder, owner or Owner.here(), _new_word(), False, new)

    def taken_over(self, owner: Owner) -> Self:
        """Return the names with another owner, which those on this machine have now."""
        names = replace(self, owner=owner)
        for path in names.paths_here():
            _, _, rest = path.name.partition(names._own)
            path.rename(
                path.with_name(f"{prefix('snapshot', owner)}{names._own}{rest}")
            )
        return names

    def back_to(self, step: int) -> Self:
        """Return the names after the run went back to a step."""
        courses = {
            word: step if last is None else min(last, step)
            for word, last in self.courses.items()
        }
        return replace(self, courses={**courses, _new_word(): None})

    def anew(self) -> Self:
        """Return the names after the run went back to no snapshot, so none counts."""
        return replace(self, courses={_new_word(): None})

    @property
    def course(self) -> str:
        """The word for the present course."""
        return list(self.courses)[-1]

    def counts(self, course: str, step: int) -> bool:
        """Return whether a snapshot of this course and step counts."""
        if course not in self.courses:
            return False
        last = self.courses[course]
        return last is None or step <= last

    def place(self, role: str, rank: int) -> str:
        """Return the beginning of the paths of a rank's files, on this node.

        They are those of the rank itself, or their second copy. What the run left on
        this node and does not go on from is removed.
        """
        self.remove_others()
        # The owner has to outlive the rank, and has to be seen on this node.
        raylet = Owner.of(os.getppid())
        owner = self.owner if self.owner.is_visible else raylet
        # Several nodes of Ray may share a machine, and do not share what is lost.
        node = _OWN_NODE if self.on_own_cluster else short_word(str(raylet))
        name = f"{prefix('snapshot', owner)}{self._own}{node}-{role}-{rank}"
        return str(shared_folder() / name)

    def of_driver(self, word: str) -> Path:
        """Return the path of the driver's folder with a word of its own."""
        name = f"{prefix('snapshot', self.owner)}{self._own}{_DRIVER}{word}"
        return shared_folder() / name

    @property
    def _own(self) -> str:
        """The part of all names that no other run has, and no other series."""
        return f"{_word_of(self.run)}-{self.series}-"

    def paths_here(self) -> list[Path]:
        """Return all files and folders of this series on this machine."""
        return list(shared_folder().glob(f"verl_ray-snapshot-*-{self._own}*"))

    def remove_others(self) -> None:
        """Remove what the run left on this machine in another series."""
        for path in left_by(self.run):
            if self._own not in path.name:
                remove(path)


_OWN_NODE = "node"
"""Stands for the node of a run's own cluster, which another driver starts anew."""

_DRIVER = "driver-"


def word_of_driver(path: Path) -> str | None:
    """Return the word of a folder of a driver's; None for another file."""
    _, is_of_driver, word = path.name.partition(f"-{_DRIVER}")
    return word if is_of_driver else None


def left_by(run: str) -> list[Path]:
    """Return all files and folders of a run's snapshots on this machine."""
    word = _word_of_folder(run)
    return list(shared_folder().glob(f"verl_ray-snapshot-*-{word}-*"))


def bytes_left(run: str) -> int:
    """Return the bytes that the snapshots of a run take on this machine."""
    return _bytes_of(left_by(run))


def available_bytes(run: str | None = None) -> int:
    """Return the bytes in /dev/shm that a run may use.

    Files of ended processes count as free, since a process that starts removes them.

    Args:
        run: Folder of the run, which goes on from its own snapshots or removes them;
            None for a process that is of no run.

    Raises:
        UnsafeFile: This user's folder there is not its own.
    """
    not_taken = set(stale_in(shared_folder()))
    if run is not None:
        not_taken.update(left_by(run))
    return shutil.disk_usage(SHARED_MEMORY).free + _bytes_of(not_taken)


def _bytes_of(paths: Iterable[Path]) -> int:
    """Return the bytes that files and folders take."""
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
    ]
    sizes = 0
    for file in files:
        # Another process may remove it meanwhile.
        with contextlib.suppress(OSError):
            sizes += file.stat().st_blocks * _BLOCK_BYTES
    return sizes


def remove(path: Path) -> None:
    """Remove a file or a folder, which another process may have removed by now."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _word_of_folder(run: str) -> str:
    """Return the word for a run by its folder, whose path may be relative."""
    return _word_of(str(Path(run).resolve()))


def _word_of(run: str) -> str:
    """Return the word for a run; process ids mean others in another namespace."""
    return short_word(f"{Owner.here().namespace} {run}")


def short_word(text: str) -> str:
    """Return a short word that stands for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _new_word() -> str:
    return secrets.token_hex(4)
