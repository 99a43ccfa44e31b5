"""Ray's folders of clusters that sessions have started.

Invariant: a folder is out of reach of other users, and is removed only when the driver
and all of Ray's processes that its list of owners names have ended. Folders without
such a list stay.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir

from verl_ray.ownership import Owner
from verl_ray.private_files import users_folder

# File in Ray's folder of a cluster that a session started. Its first line names the
# driver, the others Ray's processes.
_OWNERS = "verl_ray_owners"

# Time for processes that are about to stop and still write to the folder.
_REMOVAL_S = 5.0


def own_sessions() -> Path:
    """Return this user's folder for Ray's folders of clusters that sessions start.

    Every process of Ray lets everybody write to its folders, and so replace the sockets
    in them. Nobody else gets through the folder above.

    Raises:
        UnsafeFile: Another user has taken its name.
    """
    temporary = Path(get_default_ray_temp_dir())
    return users_folder(temporary.parent) / temporary.name


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
