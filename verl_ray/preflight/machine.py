"""The machine that a run without a cluster has.

Invariant: it is looked at within the limits of its container, and without a framework. What killed runs of ours have
left in /dev/shm is taken away first, as the run itself does before it needs the room. Deliberately not here: what a run
needs of it (`resources.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from verl_ray.config.schema import Config
from verl_ray.weight_sync.shared_files import room

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """What a run without a cluster can use."""

    cores: int
    gpus: int
    memory_bytes: int
    shm_free_bytes: int
    gpu_memory_bytes: int | None = None
    """Of the smallest GPU; None where there is none, or its driver does not say."""

    @staticmethod
    def here() -> Machine:
        """This machine, within the limits of its container."""
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            memory_bytes=_memory_bytes(),
            shm_free_bytes=room(),
            gpu_memory_bytes=_gpu_memory_bytes(),
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


class _GpuMemory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu_memory_bytes() -> int | None:
    """As the driver's own library (NVML) says, which needs neither torch nor a context on the device."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    found: list[int] = []
    with contextlib.suppress(AttributeError):
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _GpuMemory()
            if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) and not nvml.nvmlDeviceGetMemoryInfo(
                device, ctypes.byref(memory)
            ):
                found.append(memory.total)
    nvml.nvmlShutdown()
    return min(found, default=None)
