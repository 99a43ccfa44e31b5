"""The rendezvous of the ranks of one process set for torch.distributed.

Invariant: no port is announced before it is bound. Rank 0 binds a socket and hands it
to the store that listens on it; only then do the other ranks learn the port.
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
class Rendezvous:
    """Address at which the store of one process group listens."""

    address: str
    port: int
    num_ranks: int


def listen(address: str, num_ranks: int) -> tuple[Rendezvous, socket.socket]:
    """Bind a free port of this node for the store; called by rank 0.

    Ranks that connect before the store serves the socket wait in its queue.
    """
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6

    backlog = max(128, num_ranks)
    listener = socket.create_server((address, 0), family=family, backlog=backlog)
    port = listener.getsockname()[1]
    return Rendezvous(address, port, num_ranks), listener


def join(
    rendezvous: Rendezvous,
    rank: int,
    device: str,
    address: str,
    listener: socket.socket | None,
    timeout_s: float,
) -> None:
    """Enter the process group; called by every rank, returns once all have entered.

    The group uses gloo between CPUs and NCCL between GPUs.

    Args:
        rendezvous: Address of the store, from `listen` on rank 0.
        rank: Rank of this process.
        device: "cpu" or the CUDA device of this process.
        address: IP address of this process's node.
        listener: The socket from `listen` on rank 0, None on the other ranks.
        timeout_s: Limit in seconds for entering and for every later collective.
    """
    import torch
    import torch.distributed as dist

    choose_interfaces(address)
    timeout = timedelta(seconds=timeout_s)

    # The store takes over the descriptor of the socket that rank 0 has bound.
    listener_descriptor = None
    if listener is not None:
        listener_descriptor = listener.detach()

    store = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.address,
        rendezvous.port,
        rendezvous.num_ranks,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener_descriptor,
    )

    backend = "gloo"
    device_id = None
    if device != "cpu":
        torch.cuda.set_device(device)
        # The run also reduces tensors on the host, so the group has a half for each.
        backend = "cpu:gloo,cuda:nccl"
        device_id = torch.device(device)

    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=rendezvous.num_ranks,
        timeout=timeout,
        device_id=device_id,
    )


def share_timeout() -> None:
    """Give every process group made since `join` the timeout of the group of all ranks.

    Torch gives a new group 10 or 30 minutes, whatever the timeout of the group of all
    ranks is. The function has no effect where there is no process group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.group.WORLD is None:
        return

    # Every run has the half of the group that works on the host.
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    timeout = backend.options._timeout
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def choose_interfaces(address: str) -> None:
    """Make gloo and NCCL use the network interface that Ray uses.

    An interface that the user has named in the environment stays.
    """
    interface = interface_of(address)
    if interface is None:
        return

    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


def interface_of(address: str) -> str | None:
    """Network interface that holds this node's address.

    Returns:
        The interface's name, or None when no interface holds the address, as behind
        address translation.

    Raises:
        ClusterError: The address is link-local.
    """
    ip = ipaddress.ip_address(address)
    if ip.is_link_local:
        raise ClusterError(
            f"the node's address {address} is link-local and cannot be reached from"
            " other nodes"
        )

    # Every address 127.x.y.z belongs to the loopback interface, which lists only one.
    listed_address = address
    if ip.version == 4 and ip.is_loopback:
        listed_address = "127.0.0.1"

    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        # psutil appends the scope to IPv6 addresses: "fe80::1%eth0".
        addresses = {entry.address.partition("%")[0] for entry in entries}
        if listed_address in addresses:
            return name
    return None
