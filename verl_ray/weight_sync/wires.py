"""Which wire carries the weights of a run, and the sending end of each.

Invariant: what cannot work is refused with the reason and the key; `auto` takes only what has run: shared memory on one
node, else a broadcast over the hosts. Deliberately not here: how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from verl_ray.config.rollout import TransportName
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.broadcast import BroadcastSender
from verl_ray.weight_sync.cuda_ipc import CudaIpcSender
from verl_ray.weight_sync.disk import DiskSender
from verl_ray.weight_sync.shared_memory import SharedMemorySender
from verl_ray.weight_sync.transport import Route, Sender

WireName = Literal["shared_memory", "cuda_ipc", "broadcast", "disk"]

SENDERS: Mapping[WireName, Callable[[Route, int, torch.device], Sender]] = {
    "shared_memory": SharedMemorySender,
    "cuda_ipc": CudaIpcSender,
    "broadcast": BroadcastSender,
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


def choose(name: TransportName, layout: Layout) -> tuple[WireName, str]:
    """The wire, and the device that its buckets are carried from: "cpu" or "cuda".

    Raises:
        WeightSyncError: the wire that the configuration names cannot join these ends.
    """
    hosts = sorted({*layout.actor_hosts, *layout.rollout_hosts})
    if name == "auto":
        return ("shared_memory" if len(hosts) == 1 else "broadcast"), "cpu"
    if name == "shared_memory" and len(hosts) > 1:
        raise WeightSyncError(
            f"rollout.sync.transport = shared_memory joins processes of one node; actor and rollout run on {hosts}. "
            f"Use auto, broadcast or disk"
        )
    if name == "cuda_ipc" and not layout.shares_gpus:
        raise WeightSyncError(
            "rollout.sync.transport = cuda_ipc joins processes on one GPU; actor and rollout do not share any. "
            "Use auto, or placement=colocated on GPUs"
        )
    # two members of one group of NCCL cannot be on the same GPU
    direct = name == "cuda_ipc" or (name == "broadcast" and layout.gpus and not layout.shares_gpus)
    return name, "cuda" if direct else "cpu"
