"""The rendezvous of a wire: a process group of its own for sender and receivers.

The group is independent of the groups that its processes already belong to. Member 0 is
the sender.

Invariant: the group exists only once every endpoint has come, and no endpoint waits
longer than the deadline. The error names the endpoints that did not connect.
Deliberately not here: what is sent.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl_ray.cluster.rendezvous import interface_of, listen
from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import waiting_for_others

_KEY = "run.stall_s"
_POLL_S = 0.02

# Keys that the sender sets in the store.
_COMPLETE = "complete"
_LEFT = "left"

# A setting of torch, and the value that spares the process.
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"


@dataclass(frozen=True)
class WireRendezvous:
    """Where the endpoints of one group find each other."""

    host: str
    port: int
    receivers: int
    """Number of receivers."""
    token: str
    """Makes every rendezvous unique, since a port may be used again."""

    @property
    def size(self) -> int:
        """Number of members: the receivers and the sender."""
        return self.receivers + 1

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class SyncGroup:
    """The process group of one wire."""

    def __init__(self, group: Any, store: Any, deadline: timedelta, name: str) -> None:
        """Take a group of torch.

        Args:
            group: The process group.
            store: The store that it was made with, which has to live as long.
            deadline: Limit of every broadcast.
            name: Name of this member in errors.
        """
        self._group = group
        self._store = store
        self._deadline = deadline
        self._name = name

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to copy member 0's content into the tensors of all members.

        Returns:
            The work for `wait`. The tensor must not be used until then.
        """
        with self._as_sync_errors():
            return self._group.broadcast(tensor, 0, self._deadline)

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is complete on this member.

        Raises:
            WeightSyncError: The deadline has passed, or another member has exited.
        """
        with self._as_sync_errors(), waiting_for_others():
            work.wait(self._deadline)

    def close(self) -> None:
        """Abort what is under way, and close the group."""
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._store = None

    @contextmanager
    def _as_sync_errors(self) -> Iterator[None]:
        """Raise errors of torch as WeightSyncError."""
        try:
            yield
        # torch has no narrower class for it.
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self._name}: a broadcast of weights did not end within"
                f" {self._deadline.total_seconds():.0f} s ({_KEY}), or another"
                f" member has exited: {error}"
            ) from error


def invite(host: str, receivers: int) -> tuple[WireRendezvous, socket.socket]:
    """Choose a rendezvous on a free port of this node. Called by the sender.

    Returns:
        The rendezvous, and the socket that listens there.
    """
    place, listener = listen(host, receivers + 1)
    token = secrets.token_hex(4)
    rendezvous = WireRendezvous(place.address, place.port, receivers, token)
    return rendezvous, listener


@waiting_for_others()
def gather(
    rendezvous: WireRendezvous,
    listener: socket.socket,
    patience_s: float,
    device_type: str,
    stop: threading.Event | None = None,
) -> SyncGroup:
    """Wait for every receiver, and return the group. Called by the sender.

    Args:
        rendezvous: The rendezvous that `invite` chose.
        listener: Its socket.
        patience_s: Seconds to wait for receivers, and limit of every broadcast.
        device_type: Device of the tensors: "cpu" for gloo, "cuda" for NCCL.
        stop: Set by a thread that knows that a receiver will not come. The wait ends
            then.

    Raises:
        WeightSyncError: Receivers did not connect in time; the error names them.
    """
    deadline = timedelta(seconds=patience_s)
    # The store serves on the socket that is listening already, so no other process can
    # take the port in between.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.port,
        rendezvous.size,
        is_master=True,
        timeout=deadline,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

    # Waits for the arrival keys of all receivers. Ends when all are there, when `stop`
    # is set, or when the time is over.
    began = time.monotonic()
    while missing := _missing_receivers(rendezvous, store):
        waited_s = time.monotonic() - began
        stopped = stop is not None and stop.is_set()
        if stopped or waited_s > patience_s:
            # The receivers that came must not wait any longer either.
            store.set(_LEFT, "")
            problem = "did not connect"
            if stopped:
                problem = "will not connect"
            raise WeightSyncError(
                f"weight sync: of {rendezvous.receivers} receivers {missing} {problem}"
                f" to {rendezvous}, which was open for {waited_s:.0f} s (at most"
                f" {patience_s:.0f}, of {_KEY}). Can the nodes of the rollout engines"
                " reach that address?"
            )
        time.sleep(_POLL_S)

    store.set(_COMPLETE, "")
    return _make_group(rendezvous, store, 0, deadline, device_type)


@waiting_for_others()
def join(
    rendezvous: WireRendezvous,
    receiver: int,
    patience_s: float,
    device_type: str,
) -> SyncGroup:
    """Come to a rendezvous, wait for all others, return the group. For receivers.

    Args:
        rendezvous: The rendezvous.
        receiver: Number of this receiver, from 0.
        patience_s: Seconds to wait for the others, and limit of every broadcast.
        device_type: Device of the tensors: "cpu" for gloo, "cuda" for NCCL.

    Raises:
        WeightSyncError: The sender cannot be reached, or another receiver did not
        connect.
    """
    deadline = timedelta(seconds=patience_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            rendezvous.host,
            rendezvous.port,
            rendezvous.size,
            timeout=deadline,
            wait_for_workers=False,
        )
        store.set(_arrival_key(receiver), "")

        # Waits for the sender to see all receivers. Ends with that, when the sender
        # has given up, or when the time is over.
        until = time.monotonic() + patience_s
        while not store.check([_COMPLETE]):
            if time.monotonic() > until or store.check([_LEFT]):
                raise dist.DistError("the sender waits no longer")
            time.sleep(_POLL_S)
    except dist.DistError as error:
        raise WeightSyncError(
            f"weight sync: receiver {receiver} waited {patience_s:.0f} s ({_KEY}) at"
            f" {rendezvous}, where the sender or another receiver did not connect:"
            f" {error}"
        ) from error

    return _make_group(rendezvous, store, receiver + 1, deadline, device_type)


def _missing_receivers(rendezvous: WireRendezvous, store: Any) -> list[int]:
    """Return the receivers that have not come yet."""
    return [
        receiver
        for receiver in range(rendezvous.receivers)
        if not store.check([_arrival_key(receiver)])
    ]


def _arrival_key(receiver: int) -> str:
    """Return the key that a receiver sets in the store when it comes."""
    return f"arrived/{receiver}"


def _make_group(
    rendezvous: WireRendezvous,
    store: Any,
    member: int,
    deadline: timedelta,
    device_type: str,
) -> SyncGroup:
    """Make the process group of torch, and connect its members.

    Raises:
        WeightSyncError: The members cannot connect.
    """
    size = rendezvous.size
    name = f"weight sync, member {member} of {size} at {rendezvous}"
    group_store = dist.PrefixStore("group", store)  # type: ignore[attr-defined]

    group: Any
    try:
        if device_type == "cpu":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = deadline
            gloo._devices = [_network_device(rendezvous)]
            group = dist.ProcessGroupGloo(group_store, member, size, gloo)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = deadline
            with _surviving_exits_of_members():
                group = dist.ProcessGroupNCCL(group_store, member, size, nccl)
    except RuntimeError as error:
        raise WeightSyncError(
            f"{name}: all members came, but could not connect: {error}"
        ) from error

    # NCCL connects with its first broadcast.
    sync_group = SyncGroup(group, store, deadline, name)
    first = sync_group.broadcast(torch.zeros(1, device=device_type))
    sync_group.wait(first)
    return sync_group


@contextmanager
def _surviving_exits_of_members() -> Iterator[None]:
    """Make groups whose watchdog spares this process when another member exits.

    torch's watchdog gives up such a group. By default it would also end the process.
    """
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = _CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before


def _network_device(rendezvous: WireRendezvous) -> Any:
    """Return gloo's device for the interface of this node that leads to the sender.

    On the sender's node this is the interface of its own address.
    """
    family = socket.AF_INET
    if ":" in rendezvous.host:
        family = socket.AF_INET6

    # Connecting a datagram socket sends nothing; it only chooses the interface.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        own_address = probe.getsockname()[0]

    interface = interface_of(own_address)
    if interface is not None:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=own_address)
