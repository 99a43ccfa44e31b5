"""Which wire carries the weights of a run, and the sending end of each.

Invariant: a wire that cannot join the ends that are there is refused with the reason and the key. Deliberately not
here: how any of them works, and which one `auto` stands for (`verl_ray/config/resolve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from verl_ray.config.rollout import WireName
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.broadcast import BroadcastSender
from verl_ray.weight_sync.cuda_ipc import CudaIpcSender
from verl_ray.weight_sync.disk import DiskSender
from verl_ray.weight_sync.shared_memory import SharedMemorySender
from verl_ray.weight_sync.transport import Route, Sender

SENDERS: Mapping[WireName, Callable[[Route, int, torch.device], Sender]] = {
    "shared_memory": SharedMemorySender,
    "cuda_ipc": CudaIpcSender,
    "broadcast": BroadcastSender,
    "host_broadcast": BroadcastSender,
    "disk": DiskSender,
}


@dataclass(frozen=True)
class Layout:
    """Where the ends of a wire are."""

    actor_hosts: Collection[str]
    rollout_hosts: Collection[str]
    gpus: bool
    shares_gpus: bool
    """Whether rollout engines run on the actor's GPUs."""


def carried_from(name: WireName, layout: Layout) -> str:
    """The device that buckets are carried from on this wire: "cpu" or "cuda".

    Raises:
        WeightSyncError: the wire cannot join these ends.
    """
    hosts = sorted({*layout.actor_hosts, *layout.rollout_hosts})
    if name == "shared_memory" and len(hosts) > 1:
        raise WeightSyncError(
            f"rollout.sync.transport = shared_memory joins processes of one node; actor and rollout run on {hosts}. "
            f"Use auto, host_broadcast or disk"
        )
    if name == "cuda_ipc" and not layout.shares_gpus:
        raise WeightSyncError(
            "rollout.sync.transport = cuda_ipc joins processes on one GPU; actor and rollout do not share any. "
            "Use auto, or placement=colocated on GPUs"
        )
    # two members of one group of NCCL cannot be on the same GPU
    direct = name == "cuda_ipc" or (name == "broadcast" and layout.gpus and not layout.shares_gpus)
    return "cuda" if direct else "cpu"
