"""Files and directories in /dev/shm that name the process that owns them.

The owner is in the name, so what a killed process leaves behind can be removed.

Invariant: what a live process owns is never removed here. Deliberately not here: the
content of the files.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from verl_ray.ownership import Owner

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"verl_ray-\w+-(?P<owner>\d+-\d+-\d+-\d+)-.+")


def prefix(kind: str, owner: Owner | None = None) -> str:
    """Return the beginning of the names of a process's files.

    Args:
        kind: A word that says what the files are.
        owner: The process; None for this one.
    """
    return f"verl_ray-{kind}-{owner or Owner.here()}-"


def available_bytes() -> int:
    """Return the free bytes in /dev/shm, after the removal of stale files."""
    remove_stale()
    return shutil.disk_usage(FOLDER).free


def remove_stale() -> None:
    """Remove the files and directories of owners that have exited."""
    for path in FOLDER.glob("verl_ray-*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        owner = Owner.parse(match["owner"])
        if owner is None or not owner.has_ended:
            continue

        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            # The file may belong to another user, or be removed by now.
            with contextlib.suppress(OSError):
                path.unlink()
