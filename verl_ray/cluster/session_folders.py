"""Ray's folders of clusters that sessions have started.

Invariant: a folder is out of reach of other users, and is removed only when the driver
and all of Ray's processes that its list of owners names have ended. Folders without
such a list stay.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir

from verl_ray.errors import InputError
from verl_ray.ownership import Owner
from verl_ray.private_files import users_folder, users_path

# File in Ray's folder of a cluster that a session started. Its first line names the
# driver, the others Ray's processes.
_OWNERS = "verl_ray_owners"

# Time for processes that are about to stop and still write to the folder.
_REMOVAL_S = 5.0

_VARIABLE = "RAY_TMPDIR"

_SHORT = Path("/tmp")

_LONGEST_SOCKET_BYTES = 107
"""Longest path of a socket (`man 7 unix`)."""


def own_sessions() -> Path:
    """Return this user's folder for Ray's folders of clusters that sessions start.

    Every process of Ray lets everybody write to its folders, and so replace the sockets
    in them. Nobody else gets through the folder above. It lies in RAY_TMPDIR, which is
    made if it is missing, else in TMPDIR or /tmp; a TMPDIR that is too long for Ray's
    sockets was not chosen for Ray, and is passed over.

    Raises:
        InputError: RAY_TMPDIR is too long, or the folder cannot be made.
        UnsafeFile: Another user has taken its name.
    """
    temporary = Path(get_default_ray_temp_dir())
    parent = temporary.parent
    inner_bytes = _bytes_of(users_path(parent) / temporary.name) - _bytes_of(parent)
    longest_bytes = _LONGEST_SOCKET_BYTES - inner_bytes - _bytes_of_socket()
    if _bytes_of(parent) > longest_bytes:
        if _VARIABLE in os.environ:
            raise InputError(
                f"{parent} has {_bytes_of(parent)} bytes, too many for the paths of"
                " Ray's sockets in it",
                f"at most {longest_bytes}",
                "Name a shorter folder, or unset it to use TMPDIR or /tmp",
                place=_VARIABLE,
            )
        parent = _SHORT

    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be made for Ray: {error.strerror}",
            fix=f"Set {_VARIABLE} to a folder that this user may write to",
            subject=parent,
        ) from error
    return users_folder(parent) / temporary.name


def _bytes_of(path: Path) -> int:
    return len(os.fsencode(path))


def _bytes_of_socket() -> int:
    """Return the length of the longest path of a socket below Ray's folder."""
    # The process with the longest number, so that no driver is refused by chance.
    pid = Path("/proc/sys/kernel/pid_max").read_text().strip()
    return len(f"/session_YYYY-MM-DD_HH-MM-SS_ffffff_{pid}/sockets/plasma_store")


def name_owners(folder: Path, pids: Iterable[int]) -> None:
    """Write to Ray's folder which processes must have ended before its removal."""
    lines = [f"{Owner.of(pid)}\n" for pid in pids]
    (folder / _OWNERS).write_text("".join(lines))


def remove_ended_sessions(folder: Path) -> None:
    """Remove the folders of clusters whose driver was killed, with all of Ray.

    Args:
        folder: This user's folder of all clusters that sessions have started.
    """
    for owners_file in folder.glob(f"session_*/{_OWNERS}"):
        # "session_latest" is a link to one of the others.
        if owners_file.parent.is_symlink():
            continue
        try:
            lines = owners_file.read_text().splitlines()
        except OSError:
            # Another run has removed the folder meanwhile.
            continue

        owners = [Owner.parse(line) for line in lines]
        have_ended = all(owner is not None and owner.has_ended for owner in owners)
        if owners and have_ended:
            remove_folder(owners_file.parent)


def remove_folder(folder: Path) -> None:
    """Remove Ray's folder of one cluster, with all logs of Ray's own processes."""
    # Ray does not replace a "session_latest" that points to nothing.
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and latest.readlink() == folder:
        latest.unlink(missing_ok=True)

    # A process that is about to end may write there once more, so the removal is
    # repeated until the folder stays away, for a few seconds.
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.1)
