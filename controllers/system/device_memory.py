"""The smallest of a cluster's GPUs, as the driver of each node reports it.

Invariant: one short task per node asks, and the smallest GPU counts.
"""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import RAY_CALLS, wait
from verl_ray.preflight.machine import smallest_gpu_bytes
from verl_ray.profiling.phases import phase

_SLICE_S = 60.0  # of a wait that lasts as long as it takes


def smallest_gpu_bytes_of(session: Session) -> int | None:
    """Return the memory of the smallest GPU of a cluster.

    Returns:
        Its bytes; None without GPUs, or if a node's driver does not report its own.
    """
    nodes = [node for node in session.resources() if node.total.get("GPU")]
    if not nodes:
        return None

    ask = ray.remote(num_cpus=0)(smallest_gpu_bytes)
    with phase("asking the nodes for their GPUs"):
        pending = []
        for node in nodes:
            affinity = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            placed = ask.options(scheduling_strategy=affinity)
            pending.append(RAY_CALLS.make(placed.remote))
        replies: list[int | None] = []
        # Each round takes what is ready; ends when every node has replied.
        while pending:
            for reference in wait(pending, 1, _SLICE_S):
                pending.remove(reference)
                replies.append(RAY_CALLS.make(ray.get, reference))

    known = [size for size in replies if size is not None]
    if len(known) < len(replies):
        return None
    return min(known)
