"""Files and folders in /dev/shm that say which process owns them, so that what a killed one leaves behind is found.

Invariant: what a live process owns is never removed here. Deliberately not here: what the files hold.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"verl_ray-\w+-(?P<pid>\d+)-(?P<started>\d+)-.+")


def prefix(kind: str) -> str:
    """What the names of this process's files begin with; `kind` is a word that says what they are."""
    return f"verl_ray-{kind}-{os.getpid()}-{_start_time(os.getpid())}-"


def remove_stale() -> None:
    """Take away what owners that no longer live have left. An owner is the same process only if it also started at the
    same time: process ids are used again."""
    for path in FOLDER.glob("verl_ray-*"):
        match = _NAME.fullmatch(path.name)
        if match and _start_time(int(match["pid"])) != int(match["started"]):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # of another user, or gone by now
                    path.unlink()


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; -1 when there is none of that id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
