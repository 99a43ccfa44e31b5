"""Owners of what may outlive a process: files in memory, temporary folders, Ray's.

Invariant: an owner has ended only if this process would see it if it still ran. Process
ids are reused, so an owner is a process id and the start time of its process, which is
counted from the start of the machine, since somebody may set the clock. Both mean
another process on another machine that shares a folder, and in another namespace of
process ids, as in a container that shares /dev/shm: owners from there never count as
ended.

The owner of a file is in its name, so what a killed process leaves behind can be
removed. What a live process or another user owns is never removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PATTERN = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class Owner:
    """One process. Its text, which `parse` reads, may be part of a file's name.

    Attributes:
        boot: Number of the machine's last start. It is needed since the first
            namespace of process ids has the same number on every machine.
        namespace: Number of the namespace of process ids.
        pid: Process id.
        started: Start of the process in clock ticks since the boot; 0 for a process
            that had ended when it was looked up.
    """

    boot: int
    namespace: int
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Owner for a process of this namespace."""
        return cls(_boot(), _namespace(), pid, _start_time(pid))

    @classmethod
    def here(cls) -> Owner:
        """Owner for this process."""
        return cls.of(os.getpid())

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Owner with this text; None if it is not the text of an owner."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            return None
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.started}"

    @property
    def is_visible(self) -> bool:
        """Whether this process sees it: it sees those of its own namespace alone."""
        return (self.boot, self.namespace) == (_boot(), _namespace())

    @property
    def is_running(self) -> bool:
        """Whether this process sees that the process runs."""
        return self.is_visible and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether the process no longer runs."""
        if not self.is_visible:
            return False
        return not self.started or _start_time(self.pid) != self.started


@functools.cache
def _boot() -> int:
    """First 48 bits of the random number that Linux chooses when it starts."""
    digits = _BOOT.read_text().replace("-", "")
    return int(digits[:12], 16)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int:
    """Start of a process in clock ticks since the boot; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0

    # The name of the program comes before ")" and may itself hold spaces.
    fields = stat.rpartition(")")[2].split()
    state = fields[0]
    # A zombie holds nothing. It waits for a parent that may never look at it.
    if state in ("Z", "X"):
        return 0
    return int(fields[19])


# -------------------------------------------------------------------- names of files


_NAME = re.compile(r"verl_ray-\w+-(?P<owner>\d+-\d+-\d+-\d+)-.+")


def prefix(kind: str, owner: Owner | None = None) -> str:
    """Return the beginning of the names of a process's files.

    Args:
        kind: A word that says what the files are.
        owner: The process; None for this one.
    """
    return f"verl_ray-{kind}-{owner or Owner.here()}-"


def owner_of(path: Path) -> Owner | None:
    """Return the owner of a file whose name begins with its `prefix`, else None."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else Owner.parse(match["owner"])


def stale_in(folder: Path) -> Iterator[Path]:
    """Yield this user's files and directories in a folder whose owners have exited."""
    for path in folder.glob("verl_ray-*"):
        owner = owner_of(path)
        if owner is None or not owner.has_ended:
            continue
        # Another process may have removed it by now.
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                yield path


def remove_stale(folder: Path) -> None:
    """Remove this user's files and directories in a folder whose owners have exited."""
    for path in stale_in(folder):
        # Another process may have removed it by now.
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
