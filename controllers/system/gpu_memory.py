"""The memory of a cluster's GPUs, as the driver of each node reports it.

Invariant: one short task per node asks, and the smallest GPU counts. Deliberately not
here: what follows from it (`verl_ray/preflight/device_defaults.py`).
"""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import wait
from verl_ray.preflight.machine import gpu_memory_bytes
from verl_ray.profiling.phases import phase

_SLICE_S = 60.0  # of a wait that lasts as long as it takes


def smallest_gpu_bytes(session: Session) -> int | None:
    """Return the memory of the smallest GPU of a cluster, in bytes.

    Returns:
        The bytes; None without GPUs, or if a node's driver does not report them.
    """
    nodes = [node for node in session.resources() if node.total.get("GPU")]
    if not nodes:
        return None

    ask = ray.remote(num_cpus=0)(gpu_memory_bytes)
    with phase("asking the nodes for the memory of their GPUs"):
        pending = [
            ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    node.node_id, soft=False
                )
            ).remote()
            for node in nodes
        ]
        sizes: list[int | None] = []
        # Each round takes what is ready; ends when every node has replied.
        while pending:
            for reference in wait(pending, 1, _SLICE_S):
                pending.remove(reference)
                sizes.append(ray.get(reference))

    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return min(known)
