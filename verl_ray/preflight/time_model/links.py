"""Times of exchanges between GPUs, and with the host, of a machine or a cluster.

Invariant: every GPU sends and receives at the same time, so a collective takes as long
as the bytes that one rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.preflight.machine import Gpu, Machine
from verl_ray.preflight.time_model.assumptions import NETWORK_SHARE


@dataclass(frozen=True)
class Links:
    """The links of one GPU, in bytes per second that an exchange reaches."""

    gpu: Gpu
    gpus_per_node: int
    peer: float
    """To another GPU of the node."""
    node: float
    """To a GPU of another node."""
    host: float
    """To the memory of the host."""

    @staticmethod
    def of(machine: Machine) -> Links:
        """Return the links of a described machine with GPUs."""
        assert machine.gpu is not None, "a machine with GPUs was described"
        assert machine.link_bytes_per_s is not None, "what is left out is assumed"
        return Links.between(machine.gpu, machine.gpus, machine.link_bytes_per_s)

    @staticmethod
    def between(gpu: Gpu, gpus_per_node: int, link_bytes_per_s: float) -> Links:
        """Return the links of nodes.

        Args:
            gpu: The kind of all GPUs.
            gpus_per_node: Number of GPUs of a node.
            link_bytes_per_s: From each GPU to other nodes and at the same time from
                them, each.
        """
        peer = NETWORK_SHARE * gpu.peer_bytes_per_s
        return Links(
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            peer=peer,
            node=min(peer, NETWORK_SHARE * link_bytes_per_s),
            host=NETWORK_SHARE * gpu.host_bytes_per_s,
        )

    def gather_s(self, nbytes: float, ranks: int, *, stride: int = 1) -> float:
        """Return the time in which every rank gets all of `nbytes`, a part from each.

        To reduce as many bytes and to scatter the sums takes as long.

        Args:
            nbytes: Bytes of all parts together.
            ranks: Number of ranks that exchange. Nothing travels where there are none
                but one, or where a layout does not divide its ranks, which is refused.
            stride: Distance from one of these ranks to the next.
        """
        if ranks <= 1:
            return 0.0
        in_node = ranks * stride <= self.gpus_per_node
        return nbytes * (ranks - 1) / ranks / (self.peer if in_node else self.node)

    def sum_s(self, nbytes: float, ranks: int, *, stride: int = 1) -> float:
        """Return the time in which every rank gets the sum of `nbytes` over all.

        A part is reduced on each rank, and all parts are gathered.
        """
        return 2 * self.gather_s(nbytes, ranks, stride=stride)
