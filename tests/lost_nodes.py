"""A cluster of two nodes on one machine, one of which is lost with all that it holds.

Deliberately not here: the run (`tests/test_drills.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private.node import Node
from ray.cluster_utils import Cluster

from verl_ray.checkpoint.snapshot_files import short_word
from verl_ray.ownership import Owner
from verl_ray.private_files import shared_folder

SMALL = {"object_store_memory": 200 << 20, "include_dashboard": False}


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Start a head with room for one process, and another node with room for four."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **SMALL})
    try:
        cluster.add_node(num_cpus=4, **SMALL)
        yield cluster
    finally:
        cluster.shutdown()


def snapshots_on(node: Node) -> list[Path]:
    """Return the files of snapshots in the memory of a node."""
    raylet = node.all_processes["raylet"][0].process.pid
    word = short_word(str(Owner.of(raylet)))
    files = shared_folder().glob("verl_ray-snapshot-*")
    return [path for path in files if word in path.name]


def has_second_copies(cluster: Cluster) -> bool:
    """Return whether the head has whole snapshots of an actor and of a critic."""
    names = [path.name for path in snapshots_on(cluster.head_node)]
    return all(
        any(re.search(f"-{role}-0-[01]-index$", name) for name in names)
        for role in ("actor", "critic")
    )


def lose_node(cluster: Cluster) -> None:
    """Kill the raylet of the other node, and remove what it had in shared memory.

    Another node comes in its place.
    """
    (node,) = cluster.worker_nodes
    lost = snapshots_on(node)
    assert lost, list(shared_folder().iterdir())
    cluster.remove_node(node, allow_graceful=False)
    for path in lost:
        path.unlink(missing_ok=True)
    cluster.add_node(num_cpus=4, **SMALL)
