"""Who owns what may outlive a process: files in /dev/shm, folders of Ray.

Invariant: an owner is gone only if this process would see it if it still ran. Process ids are used again, so an owner
is a process id and the time at which that process started. They mean another process on another machine that shares a
folder, and in another namespace of process ids, as in a container that shares /dev/shm: owners from there are never
gone. Deliberately not here: what is owned, and who takes it away.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PATTERN = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class Owner:
    """One process. Its text, which `parse` reads, may be part of a file's name."""

    boot: int
    """Of the machine, since it was last started: the namespace of all processes has one number on every machine."""
    namespace: int
    pid: int
    started: int
    """Clock ticks from boot; 0 for one that had ended when it was looked at."""

    @classmethod
    def of(cls, pid: int) -> Owner:
        """A process of this namespace."""
        return cls(_boot(), _namespace(), pid, _start_time(pid))

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """None where the text is not of an owner."""
        match = _PATTERN.fullmatch(text)
        return cls(*map(int, match.groups())) if match else None

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.started}"

    @property
    def is_gone(self) -> bool:
        """Whether it no longer runs."""
        if (self.boot, self.namespace) != (_boot(), _namespace()):
            return False
        return not self.started or _start_time(self.pid) != self.started


@functools.cache
def _boot() -> int:
    """The first 48 bits of the random number that Linux draws when it starts."""
    return int(_BOOT.read_text().replace("-", "")[:12], 16)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    ended = fields[0] in ("Z", "X")  # a zombie holds nothing, and waits for a parent that may never ask
    return 0 if ended else int(fields[19])
