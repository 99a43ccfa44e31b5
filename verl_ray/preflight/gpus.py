"""The GPUs that a machine can be described by, with the figures of their makers.

Invariant: memory is what CUDA reports as total, rounded down, so a plan that fits here
fits the device. Speeds are peaks; what a run reaches of them is an estimate of whoever
reads them. Deliberately not here: the GPUs of this machine (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_ray.profiling.flops import BFLOAT16_PEAK_FLOPS_PER_S as PEAK
from verl_ray.profiling.flops import bfloat16_peak_of

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the peaks of its maker's data sheet."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense matrix products in bfloat16."""
    memory_bytes_per_s: float
    """Reads of the device's own memory."""
    peer_bytes_per_s: float
    """To another GPU of the node and at the same time from it, each: NVLink, or PCIe
    where there is none."""
    host_bytes_per_s: float
    """To or from the memory of the host, over PCIe."""


def _gpu(
    name: str,
    gib: float,
    flops_per_s: float,
    memory_gb_per_s: float,
    peer_gb_per_s: float,
    host_gb_per_s: float,
) -> Gpu:
    return Gpu(
        name,
        memory_bytes=int(gib * GIB),
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_gb_per_s * GB,
        peer_bytes_per_s=peer_gb_per_s * GB,
        host_bytes_per_s=host_gb_per_s * GB,
    )


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40G", 39, PEAK["A100"], 1555, 300, 32),
        _gpu("A100-80G", 79, PEAK["A100"], 2039, 300, 32),
        _gpu("H100-80G", 79, PEAK["H100"], 3350, 450, 64),
        _gpu("H200-141G", 139, PEAK["H200"], 4800, 450, 64),
        _gpu("B200-180G", 178, PEAK["B200"], 8000, 900, 64),
        _gpu("L40S-48G", 44, PEAK["L40S"], 864, 32, 32),
        _gpu("RTX-4090-24G", 23.5, PEAK["RTX 4090"], 1008, 32, 32),
    )
}
"""By the names that `--machine` takes, in GB/s per direction."""


def listed_gpu(name: str, memory_bytes: int) -> Gpu | None:
    """Return the listed GPU that has the FLOPs of a GPU, and the nearest memory.

    Args:
        name: The maker's name, such as NVIDIA A100-SXM4-80GB.
        memory_bytes: Memory of the GPU.

    Returns:
        The listed GPU; None if none has these FLOPs.
    """
    peak = bfloat16_peak_of(name)
    alike = [gpu for gpu in GPUS.values() if gpu.flops_per_s == peak]
    return min(
        alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None
    )
