"""The machine that a run without a cluster uses.

Invariant: the machine is measured within the limits of its container, and without a
framework. Files that killed runs left in /dev/shm are removed first, as the run itself
does before it needs the memory.

Deliberately not here: what a run needs of a machine (`resources.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from verl_ray.config.schema import Config
from verl_ray.ownership import available_bytes
from verl_ray.preflight.gpus import GIB as GIB
from verl_ray.preflight.gpus import Gpu, listed_gpu

MIB = 2**20


@dataclass(frozen=True)
class Machine:
    """The nodes that a run can use, all alike; `cores` to `shm_free_bytes` are of one.

    It is this machine, or one that was described (`--machine`).
    """

    cores: int
    gpus: int
    memory_bytes: int
    shm_free_bytes: int

    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU; None without a GPU, or if the driver does not report
    it."""
    computes_bfloat16: bool = True
    """Whether the CPU has instructions for bfloat16, which are emulated otherwise."""
    nodes: int = 1
    gpu: Gpu | None = None
    """The kind of the smallest GPU; None without a GPU, or if it is none of `GPUS`."""
    link_bytes_per_s: float | None = None
    """From each GPU to other nodes and at the same time from them, each; from the node
    where it has no GPU. None if it is not known."""
    assumed: tuple[str, ...] | None = None
    """What a description leaves out, with the value that stands for it; None for this
    machine."""

    @property
    def is_described(self) -> bool:
        """Whether this is another machine than the one that the command runs on."""
        return self.assumed is not None

    @property
    def in_words(self) -> str:
        """The machine as the subject of a sentence."""
        return "the machine" if self.is_described else "this machine"

    @property
    def total_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus

    @staticmethod
    def here() -> Machine:
        """Return this machine, within the limits of its container."""
        smallest = smallest_gpu()
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            memory_bytes=host_memory_bytes(),
            shm_free_bytes=available_bytes(),
            gpu_memory_bytes=None if smallest is None else smallest.memory_bytes,
            gpu=None if smallest is None else smallest.kind,
            computes_bfloat16=_computes_bfloat16(),
        )


def machine_of(config: Config) -> Machine | None:
    """Return the machine that must hold the run; None if a cluster will hold it."""
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if address:
        return None
    return Machine.here()


def _computes_bfloat16() -> bool:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    # Names of AMD and Intel, then of Arm.
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def host_memory_bytes() -> int:
    """Return the memory of the machine, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        # The file is missing, or it reads "max" because there is no limit.
        return total
    return min(total, limit)


_NAME_BYTES = 96
"""Length of the names of NVML, NVML_DEVICE_NAME_V2_BUFFER_SIZE."""


class _GpuMemory(ctypes.Structure):
    """Layout of nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class GpuReport:
    """A GPU as its driver reports it."""

    memory_bytes: int
    name: str
    """Its maker's name of it, such as NVIDIA H100 80GB HBM3; empty if there is none."""

    @property
    def kind(self) -> Gpu | None:
        """The listed GPU that it is; None if it is none of them."""
        return listed_gpu(self.name, self.memory_bytes)


def smallest_gpu() -> GpuReport | None:
    """Return the smallest GPU, as the driver's library (NVML) reports it.

    NVML needs neither torch nor a context on the device. Its functions return 0 when
    they succeed.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None

    gpus: list[GpuReport] = []
    # An older driver may lack one of these functions.
    with contextlib.suppress(AttributeError):
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            memory = _GpuMemory()
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                continue
            # Where this fails, it leaves the name empty.
            name = ctypes.create_string_buffer(_NAME_BYTES)
            nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
            gpus.append(GpuReport(memory.total, name.value.decode(errors="replace")))

    nvml.nvmlShutdown()
    return min(gpus, key=lambda gpu: gpu.memory_bytes, default=None)
