"""Memory that processes hold, on the host and on a device, and its allocator.

Invariant: all amounts are bytes, except in names that end in `_gib`. The memory of
several processes is the sum of their proportional set sizes (PSS), in which a page
shared by n of them counts 1/n in each. Not a prediction of memory. A setting of torch's
allocator that is the user's is never changed for a trainer. Nothing here imports torch
before it has to, since the settings are environment variables that torch reads once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

GIB = 1 << 30

# The kernel lists the highest value before the present one.
_RESIDENT = re.compile(rb"Vm(?:HWM|RSS):\s+(\d+) kB")
_RESET_PEAK = b"5"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of this process on its current device, as torch's allocator counts it.

    Peaks are those since the last reset.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    """Memory of the device as a whole."""


def host_used_gib() -> float:
    """Memory of the whole machine that is in use, for `perf/cpu_memory_used_gb`."""
    return float(psutil.virtual_memory().used / GIB)


def host_total_gib() -> float:
    """Memory of the whole machine, for `perf/cpu_memory_total_gb`."""
    return float(psutil.virtual_memory().total / GIB)


def device_memory(reset_peak: bool = False) -> DeviceMemory | None:
    """Memory on the current CUDA device; None where there is none.

    Args:
        reset_peak: Whether to reset the peaks after this reading.
    """
    # A driver reads host memory without ever importing torch.
    import torch

    if not torch.cuda.is_available():
        return None

    memory = DeviceMemory(
        allocated_bytes=torch.cuda.memory_allocated(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        total_bytes=torch.cuda.mem_get_info()[1],
    )
    if reset_peak:
        torch.cuda.reset_peak_memory_stats()
    return memory


def malloc_trim() -> bool:
    """Return freed heap memory to the operating system.

    Returns:
        Whether some was returned; always False without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


@dataclass(frozen=True)
class CallPeaks:
    """Memory of a process as `PeakWatch` saw it, in bytes.

    Attributes:
        current_bytes: What the process holds now.
        by_call: (role, method) -> the most that the process held during such a call.
            Only calls count that ended since the last `PeakWatch.take`.
    """

    current_bytes: int
    by_call: dict[tuple[str, str], int]


class PeakWatch:
    """Peak memory of this process during each of its calls, which may overlap.

    Use it as `with watch(role, method):`. On a device, the memory is what torch's
    allocator has given out there. On a CPU, it is the resident set. The kernel keeps
    the highest value and resets it on request. Where the process has no right to
    request that, a highest value that did not rise tells nothing, and the present value
    is taken instead. Measured: 29 microseconds per call on a CPU. On Linux alone.

    Args:
        on_device: Whether the process computes on a device.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._status_file = os.open("/proc/self/status", os.O_RDONLY)
        self._reset_file: int | None = None
        with contextlib.suppress(OSError):
            self._reset_file = os.open("/proc/self/clear_refs", os.O_WRONLY)
        # Highest value of the resident set that the kernel has reported so far.
        self._highest_bytes = 0

        self._lock = threading.Lock()
        self._peaks_of_running: dict[object, int] = {}
        self._peaks_of_ended: dict[tuple[str, str], int] = {}

    @contextlib.contextmanager
    def __call__(self, role: str, method: str) -> Iterator[None]:
        """Record the peak of the block as one of `method` of `role`."""
        call = object()
        with self._lock:
            # The memory before this call belongs to the others alone.
            self._sample()
            self._peaks_of_running[call] = 0
        try:
            yield
        finally:
            with self._lock:
                self._sample()
                peak = self._peaks_of_running.pop(call)
                earlier_peak = self._peaks_of_ended.get((role, method), 0)
                self._peaks_of_ended[role, method] = max(peak, earlier_peak)

    def take(self) -> CallPeaks:
        """Return the peaks of the calls that ended since the last `take`."""
        with self._lock:
            peaks = self._peaks_of_ended
            self._peaks_of_ended = {}
            return CallPeaks(self._sample(), peaks)

    def _sample(self) -> int:
        """Add the peak since the last sample to all running calls.

        Returns:
            What the process holds now, in bytes.
        """
        if self._on_device:
            peak, current = self._device_bytes()
        else:
            peak, current = self._resident_bytes()
        for call, call_peak in self._peaks_of_running.items():
            self._peaks_of_running[call] = max(call_peak, peak)
        return current

    def _resident_bytes(self) -> tuple[int, int]:
        """Peak of the resident set since the last sample, and its present size."""
        status = os.pread(self._status_file, 8192, 0)
        highest, current = (1024 * int(kib) for kib in _RESIDENT.findall(status))

        if self._reset_file is not None:
            try:
                os.pwrite(self._reset_file, _RESET_PEAK, 0)
                return highest, current
            except OSError:
                # The process has no right to reset the peak.
                self._reset_file = None

        peak = current
        if highest > self._highest_bytes:
            peak = highest
        self._highest_bytes = highest
        return peak, current

    def _device_bytes(self) -> tuple[int, int]:
        """Peak of the device's memory since the last sample, and its present size."""
        # A process that has not used the device must not begin with it here.
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0, 0
        memory = device_memory(reset_peak=True)
        if memory is None:
            return 0, 0
        return memory.peak_allocated_bytes, memory.allocated_bytes


def tree_pss_bytes(root_pid: int) -> int:
    """Summed PSS of a process and all its descendants.

    Processes that end meanwhile count 0. A cluster that somebody else has started is
    not among the descendants.
    """
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss_bytes(process) for process in processes)


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


# -------------------------------------------------------- settings of torch's allocator

ALLOCATOR_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables that torch 2.11 to 2.13 reads. The first that is set counts."""

EXPANDABLE = ("expandable_segments:true", "expandable_segments:1")


def trainer_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that a trainer on a GPU needs besides the inherited ones.

    A trainer uses expandable segments unless the user has set anything of the
    allocator. In segments of fixed size, rows of changing lengths leave holes that no
    later micro-batch fits into.

    Args:
        inherited: Variables that the process was started with.
    """
    if any(inherited.get(name) for name in ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Make device memory that is allocated in the block exportable to other processes.

    Memory of an expandable segment is exported as file descriptors, which the other
    process has to fetch from this one. Kernels before 5.6, and containers without the
    right to trace, cannot do that. While the setting is off, torch's allocator serves
    requests from segments of fixed size alone, also where an expandable one has
    available bytes.
    """
    settings = _current_settings()
    if not is_expandable(settings):
        yield
        return

    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        # All settings are restored: those that a call does not name may return to
        # their defaults.
        torch._C._accelerator_setAllocatorSettings(settings)


def _current_settings() -> str:
    for name in ALLOCATOR_VARIABLES:
        value = os.environ.get(name)
        if value:
            return value
    return ""


def is_expandable(settings: str) -> bool:
    """Whether the value of such a variable requests expandable segments."""
    normalized = [setting.lower().replace(" ", "") for setting in settings.split(",")]
    return any(setting in EXPANDABLE for setting in normalized)
