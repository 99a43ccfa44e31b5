"""Use of CPUs and GPUs by a process, and of its node.

Invariant: figures are means since the last reading, and a reading costs the process
milliseconds. What cannot be measured is absent. NVIDIA's library is read from a thread
of its own, and neither torch nor a CUDA context is needed for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from verl_ray.profiling.memory import host_used_gib

_EVERY_S = 1.0
"""Seconds between two looks at the devices, whose figures cover up to a second."""


@dataclass(frozen=True)
class MachineUse:
    """Use of a machine by a process, since its last reading.

    Attributes:
        processes: Name of the process set.
        node: Host name of the node.
        cpu_cores: Cores that the process, with its children, used on average.
        node_cpu_percent: Share of all cores of the node that were busy.
        node_used_gib: Memory of the node that is in use now.
        gpu_percent: Share of the time in which the devices of the process were busy;
            None without devices, or where they do not say.
    """

    processes: str
    node: str
    cpu_cores: float
    node_cpu_percent: float
    node_used_gib: float
    gpu_percent: float | None = None


class UseMeter:
    """Measures the use of the machine by this process from one reading to the next."""

    def __init__(
        self, processes: str, *, on_device: bool = False, counts_children: bool = True
    ) -> None:
        """Begin to measure.

        Args:
            processes: Name of the process set.
            on_device: Whether the process computes on devices.
            counts_children: Whether the processes that it has started count with it. A
                driver may have started Ray, and so all others.
        """
        self._processes = processes
        self._counts_children = counts_children
        self._process = psutil.Process()
        self._read_s = time.monotonic()
        self._times = self._cpu_times()
        self._node_s = _node_cpu_s()
        self._devices = _DeviceUse() if on_device else None

    def take(self) -> MachineUse:
        """Return the use since the last call of this method."""
        now_s, times = time.monotonic(), self._cpu_times()
        cores = _used_s(self._times, times) / max(now_s - self._read_s, 1e-3)
        self._read_s, self._times = now_s, times
        # psutil.cpu_percent remembers a time per thread, and calls come in several.
        busy_s, all_s = _node_cpu_s()
        before_s, all_before_s = self._node_s
        self._node_s = busy_s, all_s
        share = (busy_s - before_s) / max(all_s - all_before_s, 1e-3)
        return MachineUse(
            processes=self._processes,
            node=os.uname().nodename,
            cpu_cores=cores,
            node_cpu_percent=100 * min(1.0, max(0.0, share)),
            node_used_gib=host_used_gib(),
            gpu_percent=None if self._devices is None else self._devices.take(),
        )

    def _cpu_times(self) -> dict[psutil.Process, _CpuTimes]:
        """Return the CPU times of this process and its children."""
        if not self._counts_children:
            own = self._process.cpu_times()
            return {self._process: _CpuTimes(own.user + own.system, 0.0)}
        all_times = {}
        for process in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                all_times[process] = _CpuTimes(
                    times.user + times.system,
                    times.children_user + times.children_system,
                )
        return all_times


class _CpuTimes(NamedTuple):
    """CPU time of a process, and of its children that it has waited for, in seconds."""

    own_s: float
    ended_s: float


def _used_s(
    before: Mapping[psutil.Process, _CpuTimes],
    after: Mapping[psutil.Process, _CpuTimes],
) -> float:
    """Return the CPU time between two readings, in seconds."""
    unused = _CpuTimes(0.0, 0.0)
    pairs = [(before.get(process, unused), times) for process, times in after.items()]
    own_s = sum(late.own_s - early.own_s for early, late in pairs)
    # A process hands its time to its parent when it ends, with that of the first
    # reading. Nobody has the time of one whose parent did not wait for it.
    ended_s = sum(late.ended_s - early.ended_s for early, late in pairs)
    ended_s -= sum(
        sum(times) for process, times in before.items() if process not in after
    )
    return own_s + max(0.0, ended_s)


def _node_cpu_s() -> tuple[float, float]:
    """Return the time in which the cores of the node were busy, and all of it, in s."""
    times = psutil.cpu_times()
    # Guests are counted among the users already.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    all_s = sum(times) - guests_s
    return all_s - times.idle - getattr(times, "iowait", 0.0), all_s


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the time."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _DeviceUse:
    """How busy the devices that this process sees are, by a thread that looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._percents: list[float] = []
        thread = threading.Thread(target=self._watch, name="device use", daemon=True)
        thread.start()

    def take(self) -> float | None:
        """Return the mean since the last call; None if there is none."""
        with self._lock:
            percents, self._percents = self._percents, []
        return sum(percents) / len(percents) if percents else None

    def _watch(self) -> None:
        # Ends with the process, or where the library does not reply.
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() != 0:
            return
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        handles = [_handle(library, name.strip()) for name in names if name.strip()]
        known = [handle for handle in handles if handle is not None]
        while known:
            percents = []
            for handle in known:
                use = _Utilization()
                if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)):
                    return
                percents.append(float(use.gpu))
            with self._lock:
                self._percents.append(sum(percents) / len(percents))
            time.sleep(_EVERY_S)


def _handle(library: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    """Return the device of a number or a UUID; None where there is none."""
    handle = ctypes.c_void_p()
    if name.isdigit():
        number = ctypes.c_uint(int(name))
        code = library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    else:
        code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return handle if code == 0 else None
