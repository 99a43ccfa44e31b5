"""The machine that a run without a cluster has.

Invariant: it is looked at within the limits of its container, and without a framework. Deliberately not here: what a
run needs of it (`resources.py`).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from verl_ray.config.schema import Config

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """What a run without a cluster can use."""

    cores: int
    gpus: int
    memory_bytes: int
    shm_free_bytes: int

    @staticmethod
    def here() -> Machine:
        """This machine, within the limits of its container."""
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            memory_bytes=_memory_bytes(),
            shm_free_bytes=shutil.disk_usage("/dev/shm").free,
        )


def machine_of(config: Config) -> Machine | None:
    """The machine that must hold the run; None when a cluster, given by address, will."""
    given = config.ray.address or os.environ.get("RAY_ADDRESS")
    return None if given else Machine.here()


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit reads "max"
        return total
