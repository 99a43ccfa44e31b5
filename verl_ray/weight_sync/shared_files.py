"""Files and folders in /dev/shm that say which process owns them, so that what a killed one leaves behind is found.

Invariant: what a live process owns is never removed here. Deliberately not here: what the files hold.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from verl_ray.ownership import Owner

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"verl_ray-\w+-(?P<owner>\d+-\d+-\d+-\d+)-.+")


def prefix(kind: str) -> str:
    """What the names of this process's files begin with; `kind` is a word that says what they are."""
    return f"verl_ray-{kind}-{Owner.here()}-"


def room() -> int:
    """Bytes that are free in /dev/shm, once what owners have left that no longer live is taken away."""
    remove_stale()
    return shutil.disk_usage(FOLDER).free


def remove_stale() -> None:
    """Take away what owners that no longer live have left."""
    for path in FOLDER.glob("verl_ray-*"):
        match = _NAME.fullmatch(path.name)
        owner = Owner.parse(match["owner"]) if match else None
        if owner is None or not owner.is_gone:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # of another user, or gone by now
                path.unlink()
