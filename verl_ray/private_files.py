"""Files and folders that no other user of the machine can read, replace or plant.

A folder such as /dev/shm or /tmp belongs to all users, and any of them may write there
what a process of this one would read. So files lie in a folder of this user alone, and
who opens one looks at the open file itself, whatever the path leads to.

Invariant: what is opened here was made by this user, no other has access to it, and no
link led to it. Where others may rename what lies in the folder above, as in a container
without its sticky bit, they can take a file away, but cannot put another in its place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from verl_ray.errors import UnsafeFile

SHARED_MEMORY = Path("/dev/shm")
"""File system of the files that processes of a machine share in memory."""

_USERS = Path("/proc/self/uid_map")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def shared_folder() -> Path:
    """Return this user's folder in /dev/shm; make it if it is missing.

    Raises:
        UnsafeFile: Something else has its name.
    """
    return users_folder(SHARED_MEMORY)


def users_folder(parent: Path) -> Path:
    """Return this user's folder in one that all users share; make it if it is missing.

    Raises:
        UnsafeFile: Something else has its name.
    """
    return private_folder(users_path(parent))


def users_path(parent: Path) -> Path:
    """Return where this user's folder lies in one that all users share."""
    user = _outer_user(os.geteuid(), _USERS.read_text())
    return parent / f"verl_ray-{user}"


def private_folder(path: Path) -> Path:
    """Return a path, at which there is a folder of this user's alone from now on.

    Raises:
        UnsafeFile: There is something else, or the folder above does not exist.
    """
    try:
        path.mkdir(0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise UnsafeFile(
            f"cannot be made: {error.strerror}",
            fix=f"Let this user write to {path.parent}",
            subject=path,
        ) from error
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _unsafe(path, status, "a folder")
    _refuse_others(path, status)
    return path


def create_private(path: Path) -> int:
    """Make a file that is not there yet. Return it, open to read and write.

    Raises:
        OSError: It is there, or cannot be made.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def open_private(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, or a named pipe, that a process of this user has made.

    Args:
        path: Its path.
        flags: Those of `os.open`. No call on it waits for the other end of a pipe.

    Raises:
        UnsafeFile: It is not this user's alone.
        OSError: It cannot be opened.
    """
    try:
        safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags | safely)
    except OSError as error:
        if path.is_symlink():
            raise _unsafe(path, path.lstat(), "a file") from error
        raise
    status = os.fstat(descriptor)
    try:
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise _unsafe(path, status, "a file")
        _refuse_others(path, status)
    except UnsafeFile:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_others(path: Path, status: os.stat_result) -> None:
    """Refuse what another user made, or has access to."""
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise _unsafe(path, status, "that of this user alone")


def _unsafe(path: Path, status: os.stat_result, expected: str) -> UnsafeFile:
    return UnsafeFile(
        f"has the mode {stat.filemode(status.st_mode)} and belongs to user"
        f" {status.st_uid}, so another user may have put it there",
        expected=f"{expected}, user {os.geteuid()}, without access for others",
        fix="Have its owner or root remove it",
        subject=path,
    )


def _outer_user(user: int, users: str) -> int:
    """Return the number that a user has outside of its namespace of users.

    Containers that share /dev/shm may call different users by one number.

    Args:
        user: The number in the namespace.
        users: Table of the namespace, whose lines hold the first number of a range in
            it, the same outside, and the length.
    """
    for line in users.splitlines():
        first, outer, count = map(int, line.split())
        if first <= user < first + count:
            return outer + user - first
    return user
