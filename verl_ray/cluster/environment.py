"""Environment variables that a worker process sets for itself.

Invariant: the variables are set before torch is imported, which reads them once.
Deliberately not here: variables that Ray gives to its processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_ray.cluster.messages import RankSpec
from verl_ray.profiling.allocator import trainer_environment

# Torch's flight recorder remembers this many collectives, which `host.py` reads.
# More than a rank has under way are of no use there.
_REMEMBERED_COLLECTIVES = "256"
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}


def process_environment(
    rank_spec: RankSpec, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the process of a rank sets for itself.

    Args:
        rank_spec: Identity and settings of the process.
        inherited: Variables that the process was started with.
    """
    variables = thread_environment(rank_spec.threads)
    if rank_spec.process_group and not _SIZES.intersection(inherited):
        variables["TORCH_FR_BUFFER_SIZE"] = _REMEMBERED_COLLECTIVES
    trains_on_gpu = rank_spec.process_group and rank_spec.device != "cpu"
    if trains_on_gpu:
        variables |= trainer_environment(inherited)
    return variables


def thread_environment(threads: int) -> dict[str, str]:
    """Variables of a process that computes with `threads` CPU threads.

    Idle OpenMP threads sleep instead of spinning. The processes of a node take turns on
    its cores, and a spinning thread keeps its core from the process that the others
    wait for. Measured on two busy cores, the update of a small model with two threads
    took 0.10 s and 0.12 s of CPU time; with spinning threads it took 1.1 s and 0.97 s.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
