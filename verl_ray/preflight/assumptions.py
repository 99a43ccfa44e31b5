"""The assumptions of the time model, each with its source, and times of exchanges.

Invariant: no figure here was measured by this project. A figure is a maker's, a
publication's, or assumed. The peaks of GPUs are elsewhere
(`verl_ray/preflight/machine.py`). Every GPU sends and receives at the same time, so a
collective takes as long as the bytes that one rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.preflight.machine import Gpu, Machine

GB = 10**9

TRAINING_EFFICIENCY = 0.4
"""Share of the peak FLOPs that a forward or backward pass reaches.

Llama 3 reports 38 to 43 % in bfloat16 on 8,192 and more H100 (arXiv:2407.21783, table
4), with kernels of its own. Plain PyTorch may reach less.
"""

PREFILL_EFFICIENCY = 0.4
"""Share of the peak FLOPs at which engines read prompts. Assumed."""

DECODE_BANDWIDTH_SHARE = 0.5
"""Share of a GPU's memory bandwidth that decoding and the optimizer reach. Assumed."""

NETWORK_SHARE = 0.7
"""Share of a link's peak that collectives, and copies over PCIe, reach. Assumed."""

FLOAT32_SLOWDOWN = 16
"""Times that matrix products take in float32, without TF32, in comparison to bfloat16.

The data sheet of the A100 has 19.5 and 312 TFLOP/s.
"""

DECODE_STEP_S = 0.004
"""Time of an engine's step besides the model: scheduling, sampling. Assumed."""

LAYER_LAUNCH_S = 0.0004
"""Least time of a pass through a layer: the launches of its kernels, one by one.
Assumed."""

EXCHANGE_LATENCY_S = 20e-6
"""Least time of an exchange between tensor-parallel ranks. Assumed."""

MEAN_LENGTH_SHARE = 0.5
"""Mean length of prompts and responses, as a share of the longest. Assumed: lengths of
responses are spread evenly from 0 to the longest."""

HOST_MEMORY_BYTES_PER_S = 200 * GB
"""Memory of a node that all of its processes read and write together. Assumed."""

PROCESS_COPY_BYTES_PER_S = 5 * GB
"""Memory of the host that one process copies, verified by a fingerprint. Assumed."""

HOST_BROADCAST_BYTES_PER_S = 2 * GB
"""Bytes that a broadcast between hosts delivers over gloo. Assumed."""

DISK_BYTES_PER_S = 1 * GB
"""Bytes that a folder takes or gives which all nodes see. Assumed."""


# --------------------------------------------------------------- exchanges between GPUs


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
