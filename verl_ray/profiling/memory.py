"""How much memory processes hold, on the host and on a device.

Invariant: bytes everywhere, except in names that end in `_gib`; the memory of several processes is the sum of their
proportional set sizes (PSS), in which a page shared by n of them counts 1/n in each. Not a predictor of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """Of this process on its current device, as torch's allocator counts it; peaks since they were last reset."""

    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def host_used_gib() -> float:
    """Memory of the whole machine that is in use, for `perf/cpu_memory_used_gb`."""
    return float(psutil.virtual_memory().used / GIB)


def device_memory(reset_peak: bool = False) -> DeviceMemory | None:
    """Memory on the current CUDA device; None where there is none.

    Args:
        reset_peak: let the peaks start anew after this reading.
    """
    # Imported here because a driver asks for host memory without ever loading torch.
    import torch

    if not torch.cuda.is_available():
        return None
    memory = DeviceMemory(
        allocated_bytes=torch.cuda.memory_allocated(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
    )
    if reset_peak:
        torch.cuda.reset_peak_memory_stats()
    return memory


def own_peak_bytes() -> int:
    """The most physical memory that this process has held so far, shared pages included; no sample misses a peak.

    Not `ru_maxrss`, which begins with the memory of the process that started this one.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB")) * 1024


def malloc_trim() -> bool:
    """Give freed heap memory back to the operating system. True = some was given; always False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; pages of mapped files, which the kernel takes back when it
    needs them, do not count. Linux alone."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].removesuffix("kB")) * 1024


class AnonymousGrowth:
    """By how much this process's anonymous memory grew at most inside the block: `with AnonymousGrowth() as one:`."""

    peak_bytes = 0

    def __enter__(self) -> AnonymousGrowth:
        gc.collect()
        malloc_trim()
        self._before = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()  # on a busy machine the thread may not have come to it
        self._ended.set()
        self._thread.join()
        self.peak_bytes = self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, anonymous_bytes())


@dataclass(frozen=True)
class CallPeaks:
    """The memory of a process as `PeakWatch` saw it, in bytes."""

    now: int
    by_call: dict[tuple[str, str], int]
    """(role, method) -> the most that the process held while it ran, since this was last taken."""


class PeakWatch:
    """What this process holds at most while each of its calls runs (they may overlap): `with watch(role, method):`.

    On a CPU that is the resident set, whose highest value the kernel keeps and forgets when told to; where it may not
    be told, one that did not rise above an earlier one is taken to be what there is at the end. On a device it is what
    torch's allocator gave out there. Measured: 29 microseconds per call on a CPU. Linux alone.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._forget: int | None = None
        with contextlib.suppress(OSError):
            self._forget = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._highest = 0
        self._lock = threading.Lock()
        self._running: dict[object, int] = {}
        self._peaks: dict[tuple[str, str], int] = {}

    @contextlib.contextmanager
    def __call__(self, role: str, method: str) -> Iterator[None]:
        call = object()
        with self._lock:
            self._see()
            self._running[call] = 0
        try:
            yield
        finally:
            with self._lock:
                self._see()
                peak = self._running.pop(call)
                self._peaks[role, method] = max(peak, self._peaks.get((role, method), 0))

    def take(self) -> CallPeaks:
        """The peaks of the calls that ended since this was called last."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
            return CallPeaks(self._see(), peaks)

    def _see(self) -> int:
        """Tell the calls that run of the peak since the last time; what is held now, in bytes."""
        peak, now = self._device() if self._on_device else self._resident()
        for call, seen in self._running.items():
            self._running[call] = max(seen, peak)
        return now

    def _resident(self) -> tuple[int, int]:
        status = os.pread(self._status, 8192, 0)
        highest, now = (1024 * int(found) for found in _RESIDENT.findall(status))
        if self._forget is not None:
            try:
                os.pwrite(self._forget, b"5", 0)
                return highest, now
            except OSError:
                self._forget = None
        peak = highest if highest > self._highest else now
        self._highest = highest
        return peak, now

    def _device(self) -> tuple[int, int]:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0, 0
        memory = device_memory(reset_peak=True)
        return (0, 0) if memory is None else (memory.peak_allocated_bytes, memory.allocated_bytes)


_RESIDENT = re.compile(rb"Vm(?:HWM|RSS):\s+(\d+) kB")  # in this order


def tree_pss_bytes(root_pid: int) -> int:
    """Summed PSS of a process and all its descendants; those that end meanwhile count 0.

    A cluster that was started by somebody else is not among the descendants.
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


class TreeMemorySampler:
    """Watches the memory of a process tree from a thread while its block runs: `with TreeMemorySampler() as memory:`.

    A sample takes milliseconds per process (5 measured with torch loaded), so a short interval disturbs the processes.

    Args:
        root_pid: root of the tree; None = this process.
        interval_s: pause between samples. One sample is taken at the start and one at the end in any case.
    """

    def __init__(self, root_pid: int | None = None, interval_s: float = 0.5) -> None:
        self.peak_bytes = 0
        self._root_pid = os.getpid() if root_pid is None else root_pid
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory sampler", daemon=True)

    def __enter__(self) -> TreeMemorySampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(self._root_pid))
