"""Metrics of the use of machines by the processes of a run.

Invariant: that of `measures.py`. Figures are means over the time since the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

from controllers.watch.measures import Metrics
from verl_ray.profiling.machine_use import MachineUse
from verl_ray.profiling.memory import host_total_gib, host_used_gib


def use_metrics(uses: Sequence[MachineUse]) -> Metrics:
    """Return the use of CPUs and GPUs by process set and by node, and host memory.

    Args:
        uses: Reports of the driver and of the processes that have replied.
    """
    metrics: Metrics = {
        "perf/cpu_memory_used_gb": host_used_gib(),
        "perf/cpu_memory_total_gb": host_total_gib(),
    }
    for name in sorted({use.processes for use in uses}):
        own = [use for use in uses if use.processes == name]
        metrics[f"perf/{name}/cpu_cores"] = sum(use.cpu_cores for use in own)
        busy = [use.gpu_percent for use in own if use.gpu_percent is not None]
        if busy:
            metrics[f"perf/{name}/gpu_percent"] = sum(busy) / len(busy)

    by_node: dict[str, list[MachineUse]] = {}
    for use in uses:
        by_node.setdefault(use.node, []).append(use)
    percents = []
    for number, node in enumerate(sorted(by_node)):
        reports = by_node[node]
        percents.append(sum(use.node_cpu_percent for use in reports) / len(reports))
        if len(by_node) > 1:
            used_gib = max(use.node_used_gib for use in reports)
            metrics[f"perf/node_{number}/cpu_percent"] = percents[-1]
            metrics[f"perf/node_{number}/memory_used_gb"] = used_gib
    metrics["perf/cpu_percent"] = sum(percents) / len(percents)
    return metrics
