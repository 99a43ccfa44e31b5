"""How the ranks of one set find each other for torch.distributed.

Invariant: no port is chosen before it is bound. Rank 0 binds a socket, hands it to the store that listens on it, and
only then tells the others its number. Deliberately not here: what is sent between ranks.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

from verl_ray.errors import ClusterError


@dataclass(frozen=True)
class Meeting:
    """Where the store of one process group listens."""

    address: str
    port: int
    num_ranks: int


def listen(address: str, num_ranks: int) -> tuple[Meeting, socket.socket]:
    """On rank 0: bind a free port of this node. Ranks that connect before the store serves it wait in its queue."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(128, num_ranks))
    return Meeting(address, listener.getsockname()[1], num_ranks), listener


def join(
    meeting: Meeting, rank: int, device: str, address: str, listener: socket.socket | None, timeout_s: float
) -> None:
    """On every rank: enter the process group; gloo between CPUs, NCCL between GPUs. Rank 0 brings its listener.

    Returns once all ranks have entered; `timeout_s` also bounds every later collective.
    """
    import torch
    import torch.distributed as dist

    choose_interfaces(address)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        meeting.address,
        meeting.port,
        meeting.num_ranks,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    gpu = device != "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=meeting.num_ranks,
        timeout=timeout,
        device_id=torch.device(device) if gpu else None,
    )


def share_timeout() -> None:
    """Give every group that was made since `join` the timeout of the group of all ranks; torch gives a new one 10 or 30
    minutes, whatever that one has. Without effect where there is no group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.group.WORLD is None:
        return
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # every run has the half on the host
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(backend.options._timeout, group)


def choose_interfaces(address: str) -> None:
    """Tell gloo and NCCL of this process to use the interface that Ray uses, each unless the user has named one."""
    interface = interface_of(address)
    if interface is None:
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


def interface_of(address: str) -> str | None:
    """The network interface that holds this node's address; None when no interface does (address translation)."""
    ip = ipaddress.ip_address(address)
    if ip.is_link_local:
        raise ClusterError(f"the node's address {address} is link-local and cannot be reached from other nodes")
    wanted = "127.0.0.1" if ip.version == 4 and ip.is_loopback else address
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.address.partition("%")[0] == wanted for entry in entries):
            return name
    return None
