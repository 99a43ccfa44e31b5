"""The environment of a process that is to hold a vLLM engine.

Invariant: it is made without vLLM and torch, which read it as they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from verl_ray.profiling import memory


def environment(
    device: str, threads: int, num_ranks: int = 1, *, dtype: str = "float32"
) -> dict[str, str]:
    """Return the environment variables of a process that is to hold a `VllmEngine`.

    They must be set before the process imports torch.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads of each rank of the engine.
        num_ranks: Number of ranks of the engine.
        dtype: Type of the computation.
    """
    variables = {
        # The engine core is stepped in this process: it starts in 3 s instead of 40 s.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Models are local directories; a look-up would hang without internet.
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }

    if device != "cpu":
        if dtype == "float32":
            # In float32 vLLM attends with Triton, whose products would round their
            # inputs to TF32, by more than the probe of a weight sync tolerates.
            variables["TRITON_F32_DEFAULT"] = "ieee"
        return variables | _without_expandable_segments(os.environ)

    # Otherwise the first request waits 8 to 15 s for a compiler.
    variables["TORCHDYNAMO_DISABLE"] = "1"
    # Otherwise threads share out a long context by what else is computed, and the last
    # bits of a response depend on that.
    variables["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    if num_ranks == 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        cores = _cores_of_ranks(threads, num_ranks)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return variables


def _without_expandable_segments(present: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator settings that differ from the present environment.

    What vLLM puts to sleep lies in a memory pool of its own, and torch's expandable
    segments are not for such pools (pytorch#147851). vLLM 0.32 turns them off while it
    fills a pool; earlier versions refuse to start. Trainers have another environment,
    and keep their segments (`profiling/memory.py`).
    """
    changed: dict[str, str] = {}
    for name in memory.ALLOCATOR_VARIABLES:
        settings = [setting.strip() for setting in present.get(name, "").split(",")]
        settings = [setting for setting in settings if setting]
        remaining = [
            setting for setting in settings if not memory.is_expandable(setting)
        ]
        if remaining != settings:
            changed[name] = ",".join(remaining)
            print(
                "warning: the rollout engine runs without expandable_segments of"
                f" {name}: it cannot sleep with them"
            )
    return changed


def _cores_of_ranks(threads: int, num_ranks: int) -> str:
    """Return consecutive cores of this machine for each rank, as vLLM writes them.

    Ranks share cores where there are too few of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(num_ranks):
        first = rank * threads
        chosen = {cores[(first + thread) % len(cores)] for thread in range(threads)}
        ranks.append(",".join(map(str, sorted(chosen))))
    return "|".join(ranks)
