"""Resources of the nodes of the connected cluster.

Invariant: only live nodes are returned. Deliberately not here: what fits on them
(`packing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import ray

from verl_ray.cluster.ray_calls import RAY_CALLS


@dataclass(frozen=True)
class NodeResources:
    """Resources of one live node.

    Attributes:
        node_id: Ray's id of the node.
        address: IP address of the node.
        total: Amounts that the node has, by Ray's resource names (CPU, GPU, memory in
            bytes, ...).
        available: Amounts that are free now.
    """

    node_id: str
    address: str
    total: dict[str, float]
    available: dict[str, float]


def node_resources() -> list[NodeResources]:
    """Resources of each live node of the connected cluster (`Session.resources`).

    Raises:
        ClusterError: The cluster is lost, or Ray hangs.
    """
    state = ray._private.state
    available = RAY_CALLS.make(state.available_resources_per_node)
    resources = []
    for node in RAY_CALLS.make(ray.nodes):
        if node["Alive"]:
            node_id = node["NodeID"]
            resources.append(
                NodeResources(
                    node_id=node_id,
                    address=node["NodeManagerAddress"],
                    total=dict(node["Resources"]),
                    available=dict(available.get(node_id, {})),
                )
            )
    return resources
