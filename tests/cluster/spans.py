"""A program: engines that compute on the GPUs of trainers.

Usage: python -m tests.cluster.spans GPUS PARALLEL... [--nodes]

It prints what each process was given: `[node, CUDA_VISIBLE_DEVICES]` of each rank, in
layouts of one node with so many GPUs, and then on two nodes of which one is lost. The
nodes have no GPUs, and only say so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.waiting import until
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.placement import ProcessSet, node_resources
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session

Given = list[list[str]]

PREFIX = "given "


class Sees:
    """Says on which node it is, and which GPUs it sees."""

    def __init__(self, context: WorkerContext) -> None:
        self.seen_at_first = os.environ["CUDA_VISIBLE_DEVICES"]

    def given(self) -> list[str]:
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        assert seen == self.seen_at_first
        return [ray.get_runtime_context().get_node_id(), seen]


def start(trainers: int, parallel: int, folder: Path) -> Groups:
    """Start ranks of trainers, and as many engines as their GPUs are enough for."""
    sets = [
        ProcessSet("trainer", trainers, 0.1, 1, "shared", 1, False),
        ProcessSet(
            "engine", trainers // parallel, 0.1, parallel, "shared", 1, False,
            replicas=True, built_first=True, spans=parallel,
        ),
    ]  # fmt: skip
    roles = [Role("actor", "trainer", Sees), Role("rollout", "engine", Sees)]
    return start_groups(sets, roles, stall_s=60, log_dir=folder)


def given(groups: Groups) -> dict[str, Given]:
    return {
        role: [
            seen
            for group in groups.named(role)
            for seen in group.broadcast(Sees.given).result()
        ]
        for role in ("actor", "rollout")
    }


def in_layout(gpus: int, parallel: int, folder: Path) -> list[dict[str, Given]]:
    """Return what was given on one node, and after an engine started again."""
    with start(gpus, parallel, folder) as groups:
        before = given(groups)
        groups.named("rollout")[-1].restart().wait()
        return [before, given(groups)]


def on_two_nodes(
    cluster: Cluster, node: dict[str, Any], gpus: int, parallel: int, folder: Path
) -> list[dict[str, Given]]:
    """Return what was given on two nodes, and after one of them was lost."""
    cluster.add_node(**node)
    until(lambda: len(node_resources()) == 2)
    with start(2 * gpus, parallel, folder) as groups:
        before = given(groups)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        until(lambda: len(node_resources()) == 1)
        cluster.add_node(**node)
        groups.restart(groups.lost())
        return [before, given(groups)]


def main(gpus: int, widths: list[int], *, nodes: bool) -> None:
    node = {
        "num_cpus": 8, "num_gpus": gpus, "object_store_memory": 80 << 20, "include_dashboard": False,
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        with (
            tempfile.TemporaryDirectory() as name,
            Session.open(cluster.address),
        ):
            folder = Path(name)
            found = {width: in_layout(gpus, width, folder) for width in widths}
            if nodes:
                found[0] = on_two_nodes(cluster, node, gpus, widths[0], folder)
        print(PREFIX + json.dumps(found))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers[0], numbers[1:], nodes="--nodes" in sys.argv)
