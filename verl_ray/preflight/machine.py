"""The machine that holds a run: this one, or one that is described in words.

A description reads `nodes=2,gpus=8,gpu=H100-80G,memory=2T`.

Invariant: this machine is measured within the limits of its container, and without a
framework. Files that killed runs left in /dev/shm are removed first, as the run itself
does before it needs the memory. A description is read whole or refused with every
mistake in it, and what it leaves out is assumed and named. The memory of a listed GPU
is what CUDA reports as total, rounded down, so a plan that fits here fits the device.
No speed is asked for, since no time is predicted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from verl_ray.checkpoint.snapshot_files import available_bytes
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.suggest import did_you_mean

MIB = 2**20
GIB = 2**30

GPUS: Mapping[str, int] = {
    name: int(gib * GIB)
    for name, gib in {
        "A100-40G": 39,
        "A100-80G": 79,
        "H100-80G": 79,
        "H200-141G": 139,
        "B200-180G": 178,
        "L40S-48G": 44,
        "RTX-4090-24G": 23.5,
    }.items()
}
"""Memory in bytes by the names that `--machine` takes."""


# ----------------------------------------------------------------------------- machines


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
    gpu: str | None = None
    """The kind of its GPUs, of `GPUS`, if it was described and has any."""
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
    def here(run: str | None = None) -> Machine:
        """Return this machine, within the limits of its container.

        Args:
            run: Folder of the run whose own snapshots take no memory from it; None for
                no run.
        """
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            memory_bytes=host_memory_bytes(),
            shm_free_bytes=available_bytes(run),
            gpu_memory_bytes=smallest_gpu_bytes(),
            computes_bfloat16=_computes_bfloat16(),
        )


def machine_of(config: Config) -> Machine | None:
    """Return the machine that must hold the run; None if a cluster will hold it."""
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if address:
        return None
    return Machine.here(config.run.dir)


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


class _GpuMemory(ctypes.Structure):
    """Layout of nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def smallest_gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU, as the driver's library (NVML) reports it.

    NVML needs neither torch nor a context on the device. Its functions return 0 when
    they succeed.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None

    sizes: list[int] = []
    # An older driver may lack one of these functions.
    with contextlib.suppress(AttributeError):
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            memory = _GpuMemory()
            if not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                sizes.append(memory.total)

    nvml.nvmlShutdown()
    return min(sizes, default=None)


# -------------------------------------------------------------------- machines in words

OPTION = "--machine"

EXAMPLE = "nodes=2,gpus=8,gpu=H100-80G,memory=2T"

ASSUMED_CORES = 12
"""Cores per GPU of a node that says nothing of them."""

ASSUMED_GIB = 128
"""Memory of the host per GPU, in GiB."""

_COUNTS: Mapping[str, tuple[int, int]] = {
    "nodes": (1, 10_000),
    "gpus": (0, 128),
    "cores": (1, 10_000),
}
"""Parts that are whole numbers, with the least and the greatest."""

_UNITS: Mapping[str, Mapping[str, int]] = {
    "memory": {"G": GIB, "T": 1024 * GIB},
    "shm": {"G": GIB, "T": 1024 * GIB},
}
"""Parts that are amounts, with their units: bytes of a node."""

PARTS = ("nodes", "gpus", "gpu", "cores", "memory", "shm")

_AMOUNT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([A-Za-z]*)")


def parse_machine(text: str) -> Machine:
    """Return the machine that a text describes.

    Args:
        text: Parts `key=value` with commas between them, in any order. nodes (1 unless
            it is given); of each node: gpus, gpu (their kind, a name of `GPUS`), cores,
            memory and shm (/dev/shm) in GiB (G) or TiB (T).

    Raises:
        ConfigError: Every part that is wrong or missing.
    """
    problems: list[Problem] = []
    words = _parts(text, problems)

    counts: dict[str, int] = {}
    for key, (least, most) in _COUNTS.items():
        if key in words:
            counts[key] = _count(key, words[key], least, most, problems)

    amounts: dict[str, int] = {}
    for key, units in _UNITS.items():
        if key in words:
            amounts[key] = _amount(key, words[key], units, problems)

    gpu = _named_gpu(words, counts.get("gpus"), problems)
    if problems:
        raise ConfigError(problems)

    machine = _with_assumptions(counts, amounts, gpu)
    if machine.shm_free_bytes > machine.memory_bytes:
        memory_gib = machine.memory_bytes / GIB
        rule = f"it is a part of the node's memory, which is {memory_gib:g}G"
        fix = "Give less, or more memory."
        raise ConfigError([_problem(f"shm={words['shm']}", rule, fix)])
    return machine


def _with_assumptions(
    counts: Mapping[str, int], amounts: Mapping[str, int], gpu: str | None
) -> Machine:
    """Return the machine, with values for the parts that were left out."""
    nodes = counts.get("nodes", 1)
    # A node without GPUs is taken for one with the share of a single GPU.
    gpus = max(1, counts["gpus"])
    cores = counts.get("cores", ASSUMED_CORES * gpus)
    memory = amounts.get("memory", ASSUMED_GIB * GIB * gpus)
    shm = amounts.get("shm", memory // 2)

    typed = counts.keys() | amounts.keys()
    values = {
        "cores": f"cores={cores}",
        "memory": f"memory={memory / GIB:g}G",
        "shm": f"shm={shm / GIB:g}G",
    }
    return Machine(
        cores=cores,
        gpus=counts["gpus"],
        memory_bytes=memory,
        shm_free_bytes=shm,
        gpu_memory_bytes=None if gpu is None else GPUS[gpu],
        nodes=nodes,
        gpu=gpu,
        assumed=tuple(value for key, value in values.items() if key not in typed),
    )


def machine_in_words(machine: Machine) -> str:
    """Return a described machine in a line, and in another what was assumed of it."""
    if machine.gpu is None:
        kind = "without GPUs"
    else:
        kind = f"of {machine.gpus} {machine.gpu}"
    nodes = "1 node" if machine.nodes == 1 else f"{machine.nodes} nodes"
    line = (
        f"machine: {nodes} {kind} (described), each with {machine.cores} cores,"
        f" {machine.memory_bytes / GIB:g} GiB memory,"
        f" {machine.shm_free_bytes / GIB:g} GiB in /dev/shm"
    )

    if machine.assumed:
        line += f"\n{OPTION} does not say, and assumed is: {', '.join(machine.assumed)}"
    return line


# ---------------------------------------------------------------------------- its parts


def _parts(text: str, problems: list[Problem]) -> dict[str, str]:
    """Return the value of each part.

    What is no part, and a part that is missing, are added to the problems.
    """
    words: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or not value:
            rule = "a machine is described by parts such as gpus=8"
            problems.append(_problem(part, rule, f"Write {EXAMPLE}."))
        elif key not in PARTS:
            rule = f"a machine has no part {key!r}"
            problems.append(_problem(part, rule, did_you_mean(key, PARTS, "part")))
        elif key in words:
            rule = f"{key} is there twice"
            problems.append(_problem(part, rule, "Give it once."))
        else:
            words[key] = value

    # What is misspelt may be what is missing.
    if problems:
        return words
    if "gpus" not in words:
        rule = "it does not say how many GPUs a node has"
        fix = "Add gpus=8, or gpus=0 for nodes without GPUs."
        problems.append(_problem(text, rule, fix))
    elif "gpu" not in words and words["gpus"].strip("0"):
        rule = "it does not say which GPUs these are"
        fix = f"Add gpu=NAME. There is {', '.join(GPUS)}."
        problems.append(_problem(f"gpus={words['gpus']}", rule, fix))
    return words


def _count(key: str, word: str, least: int, most: int, problems: list[Problem]) -> int:
    """Return a whole number; the greatest one if it is none, which is a problem."""
    if re.fullmatch(r"[0-9]{1,9}", word) and least <= int(word) <= most:
        return int(word)
    rule = f"this is a whole number from {least} to {most}"
    problems.append(_problem(f"{key}={word}", rule, f"Write {key}={max(least, 8)}."))
    return most


def _amount(
    key: str, word: str, units: Mapping[str, int], problems: list[Problem]
) -> int:
    """Return an amount in bytes; 1 if it is none."""
    match = _AMOUNT.fullmatch(word)
    if match is not None and match[2] in units:
        amount = int(Fraction(match[1]) * units[match[2]])
        if amount:
            return amount

    rule = "this is a number of GiB (G) or TiB (T) per node, above 0"
    fix = f"Write {key}=512G or {key}=2T."
    problems.append(_problem(f"{key}={word}", rule, fix))
    return 1


def _named_gpu(
    words: Mapping[str, str], gpus: int | None, problems: list[Problem]
) -> str | None:
    """Return the kind of the GPUs; None for a node without any."""
    name = words.get("gpu")
    if name is not None and name not in GPUS:
        rule = "no GPU of this name is known"
        fix = did_you_mean(name, list(GPUS), "GPU")
        problems.append(_problem(f"gpu={name}", rule, fix))
    elif name is not None and gpus == 0:
        rule = "the nodes have no GPUs (gpus=0)"
        problems.append(_problem(f"gpu={name}", rule, "Leave it out."))
    return name if name in GPUS else None


def _problem(part: str, rule: str, fix: str) -> Problem:
    return Problem(OPTION, part, rule, fix)
