"""The wires by name: the sender of each, and the device that carries its buckets.

Invariant: a wire that cannot join the processes of a run is refused with the reason and
the key to change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.config.rollout import WireName
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.transport import Sender, WireSpec

# The driver chooses the device of a wire, and does without torch.
if TYPE_CHECKING:
    import torch

OpenSender = Callable[[WireSpec, int, "torch.device"], Sender]
"""Makes a sender of a wire's specification, a rank of the actor and its device."""


def sender_of(name: WireName) -> OpenSender:
    """Return the sender of a wire, whose module is imported here."""
    match name:
        case "shared_memory":
            from verl_ray.weight_sync.shared_memory import SharedMemorySender

            return SharedMemorySender
        case "cuda_ipc":
            from verl_ray.weight_sync.cuda_ipc import CudaIpcSender

            return CudaIpcSender
        case "broadcast" | "host_broadcast":
            from verl_ray.weight_sync.broadcast import BroadcastSender

            return BroadcastSender
        case "disk":
            from verl_ray.weight_sync.disk import DiskSender

            return DiskSender


def announces_buckets(name: WireName) -> bool:
    """Whether receivers wait for a bucket, and see at once if none will come.

    The calls that send and receive a bucket may then be made together. Over the other
    wires a receiver would wait until its patience ends for a sender that was lost.
    """
    return name == "shared_memory"


def sends_to_holders(name: WireName) -> bool:
    """Whether a bucket may be for some receivers alone.

    Over the other wires every receiver gets all buckets.
    """
    return name in ("broadcast", "host_broadcast")


@dataclass(frozen=True)
class WireLayout:
    """The nodes and devices of the processes that a wire joins."""

    actor_hosts: Sequence[str]
    """Host name of every rank of the actor, by rank; they are numbered node by node."""
    rollout_hosts: Collection[str]
    """Host name of every rollout replica."""
    gpus: bool
    """Whether the run has GPUs."""
    shares_gpus: bool
    """Whether rollout engines run on the actor's GPUs."""


def carrier_device(name: WireName, wire_layout: WireLayout) -> str:
    """Return the device that carries buckets on this wire: "cpu" or "cuda".

    Raises:
        WeightSyncError: The wire cannot join these processes.
    """
    hosts = sorted({*wire_layout.actor_hosts, *wire_layout.rollout_hosts})
    if name == "shared_memory" and len(hosts) > 1:
        raise WeightSyncError(
            "rollout.sync.transport = shared_memory joins processes of one node; actor"
            f" and rollout run on {hosts}. Use auto, host_broadcast or disk"
        )
    if name == "cuda_ipc" and not wire_layout.shares_gpus:
        raise WeightSyncError(
            "rollout.sync.transport = cuda_ipc joins processes on one GPU; actor and"
            " rollout do not share any. Use auto, or placement=colocated on GPUs"
        )

    if name == "cuda_ipc":
        return "cuda"

    # Two members of one NCCL group cannot be on the same GPU.
    nccl_works = wire_layout.gpus and not wire_layout.shares_gpus
    if name == "broadcast" and nccl_works:
        return "cuda"
    return "cpu"


MOST_ROOTS = 4
"""Most ranks that broadcast: every receiver is in a process group with each."""


def choose_roots(
    name: WireName, wire_layout: WireLayout, num_buckets: int
) -> tuple[int, ...]:
    """Return the ranks of the actor that broadcast buckets in turn, in ascending order.

    There is one per node, on which it has a network card of its own, but at least as
    many as buckets travel at the same time, and at most `MOST_ROOTS`. They are spread
    evenly over the ranks, so they are on different nodes where there are enough.
    """
    if not sends_to_holders(name):
        return (0,)

    num_ranks = len(wire_layout.actor_hosts)
    num_nodes = len(set(wire_layout.actor_hosts))
    num_roots = min(max(num_nodes, SLOTS), MOST_ROOTS, num_ranks, num_buckets)
    return tuple(number * num_ranks // num_roots for number in range(num_roots))
