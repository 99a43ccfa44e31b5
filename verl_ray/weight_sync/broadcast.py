"""The wire between nodes: ranks of the actor broadcast buckets to all receivers.

These ranks, the roots, take turns: each gathers a bucket from the actor's ranks and
broadcasts it in a process group of its own, whose other members are the receivers that
the bucket is for. A root has a group for each set of receivers that it serves.
Sending is asynchronous: `send` returns while the bucket travels, so the next root
gathers the next one meanwhile. A receiver requests the next bucket before it waits for
the present one, so two buckets travel at the same time, from different roots (experts
for some receivers may all come from one).

Invariant: the groups of a wire serve any number of syncs, and each is closed by its
first failure. The next ones have other addresses. A group exists only once every
endpoint has come, and no endpoint waits longer than the deadline; the error names the
endpoints that did not connect. All enter their groups, and begin broadcasts, in the
order of the buckets, so no two wait for each other. Has run over gloo only;
over NCCL (`WireSpec.device_type` = "cuda") it is written but has not run on a GPU yet.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import waiting_for_others
from verl_ray.rendezvous import interface_of, listen
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.delta import DeltaDecoder, DeltaEncoder, body_bytes
from verl_ray.weight_sync.gathered_slots import GatheredSlots, from_all_ranks
from verl_ray.weight_sync.manifest import Bucket
from verl_ray.weight_sync.transport import (
    Address,
    SendResult,
    Shards,
    Slots,
    WireEndpoint,
    WireSpec,
    parameters_in,
)


class GroupKey(NamedTuple):
    """Root and receivers of a process group of a wire."""

    root: int
    """The rank that broadcasts in it."""
    receivers: tuple[int, ...]
    """Numbers of the receivers."""

    @classmethod
    def of(cls, bucket: Bucket, wire_spec: WireSpec) -> GroupKey:
        """Return the key of the group in which a bucket is broadcast."""
        root = wire_spec.roots[bucket.index % len(wire_spec.roots)]
        receivers = bucket.receivers
        if receivers is None:
            receivers = tuple(range(wire_spec.receivers))
        return cls(root.rank, receivers)

    @classmethod
    def all_of(cls, wire_spec: WireSpec) -> list[GroupKey]:
        """Return the keys of a wire's groups, in the order in which they are used."""
        keys = [cls.of(bucket, wire_spec) for bucket in wire_spec.buckets]
        # A dictionary drops duplicates and keeps the order.
        return list(dict.fromkeys(keys))


@dataclass(frozen=True)
class BroadcastAddress:
    """The rendezvous of each group."""

    rendezvous: Mapping[GroupKey, WireRendezvous]

    waits_for_peers: ClassVar[bool] = True

    def open(self, endpoint: WireEndpoint) -> BroadcastReceiver:
        """Join the groups; return when all endpoints have come."""
        return BroadcastReceiver(self, endpoint)


class BroadcastSender:
    """The sending endpoint: roots gather buckets and broadcast them."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Allocate the slots."""
        self._wire_spec = wire_spec
        self._rank = rank
        self._device = _carrier(wire_spec, device)
        self._slots = GatheredSlots(
            _new_slots(wire_spec, self._device),
            roots=[root.rank for root in wire_spec.roots],
        )
        self._encoder = DeltaEncoder() if wire_spec.delta else None

        hosts = {root.rank: root.host for root in wire_spec.roots}
        self._host = hosts.get(rank)
        """Address of this root's node; None if this rank is no root."""

        self._invitations: dict[GroupKey, tuple[WireRendezvous, socket.socket]] = {}
        """The rendezvous of the groups that this rank serves, and their sockets."""
        self._groups: dict[GroupKey, SyncGroup] = {}
        self._stop_waiting = threading.Event()

        self._under_way: dict[int, list[tuple[SyncGroup, Any, torch.Tensor]]] = {}
        """By slot: the broadcasts under way, and the memory that each reads."""
        self._broken: str | None = None

    def offer(self) -> BroadcastAddress:
        """Return the rendezvous of all groups. Collective."""
        if self._host is not None:
            self._invitations = {
                key: invite(self._host, key.receivers)
                for key in GroupKey.all_of(self._wire_spec)
                if key.root == self._rank
            }
        own = {key: rendezvous for key, (rendezvous, _) in self._invitations.items()}
        offered: dict[GroupKey, WireRendezvous] = {}
        for rendezvous_of_rank in from_all_ranks(own):
            offered |= rendezvous_of_rank
        return BroadcastAddress(offered)

    def connect(self, address: Address) -> None:
        """Wait for the receivers of every group of this rank, on a root."""
        for key, (rendezvous, listener) in self._invitations.items():
            self._groups[key] = gather(
                rendezvous,
                listener,
                self._wire_spec.patience_s,
                self._wire_spec.device_type,
                self._stop_waiting,
            )

    def stop_waiting(self) -> None:
        """Make `connect` give up, since a receiver will not come."""
        self._stop_waiting.set()

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Gather the bucket on its root, which begins to broadcast it."""
        # The slot is free once its last bucket has left.
        slot = bucket.index % SLOTS
        self._wait(slot)
        # Every rank takes part in this, also while the wire is broken.
        fingerprints = self._slots.gather(bucket, shards)
        group = self._groups.get(GroupKey.of(bucket, self._wire_spec))
        if group is None or self._broken is not None:
            return SendResult(fingerprints, broken=self._broken)

        flat = self._slots.flat(bucket)
        tensors = [flat]
        changed = 0
        if self._encoder is not None:
            packed = self._encoder.pack(bucket, flat, whole=whole)
            tensors = [packed.header.to(self._device), packed.body.to(self._device)]
            changed = packed.changed

        try:
            self._under_way[slot] = [
                (group, group.broadcast(tensor), tensor)
                for tensor in tensors
                if tensor.numel()
            ]
        except WeightSyncError as error:
            # The actor's ranks stay in step: the driver raises this, not they.
            self._broken = str(error)

        nbytes = sum(tensor.nbytes for tensor in tensors)
        return SendResult(fingerprints, nbytes, changed, self._broken)

    def finish(self) -> None:
        """Wait until all buckets have left; close the groups of a broken wire."""
        for slot in range(SLOTS):
            self._wait(slot)
        # Receivers that still wait for a broken wire get an error now.
        if self._broken is not None:
            self._close_groups()

    def close(self) -> None:
        """Close the groups and free the slots."""
        for _, listener in self._invitations.values():
            listener.close()
        self._close_groups()
        self._slots.close()
        self._under_way.clear()

    def _close_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _wait(self, slot: int) -> None:
        """Wait until the broadcasts from a slot are complete."""
        for group, work, _ in self._under_way.pop(slot, []):
            try:
                if self._broken is None:
                    group.wait(work)
            except WeightSyncError as error:
                self._broken = str(error)


class BroadcastReceiver:
    """The receiving endpoint of a broadcast."""

    def __init__(self, address: BroadcastAddress, endpoint: WireEndpoint) -> None:
        """Join the groups that serve this receiver, once all endpoints have come.

        Raises:
            WeightSyncError: A root cannot be reached, or another receiver did not come.
        """
        wire_spec = endpoint.wire_spec
        self._wire_spec = wire_spec
        self._device = _carrier(wire_spec, endpoint.device)

        # With delta the decoder keeps whole buckets, so there are no slots.
        self._decoder: DeltaDecoder | None = None
        buffers: list[torch.Tensor] = []
        if wire_spec.delta:
            self._decoder = DeltaDecoder()
        else:
            buffers = _new_slots(wire_spec, self._device)
        self._slots = Slots(buffers)

        own = [each for each in wire_spec.buckets if each.is_for(endpoint.receiver)]
        self._places = {bucket.index: place for place, bucket in enumerate(own)}
        """Place of each bucket that this endpoint receives among all of them."""
        self._own = own

        self._under_way: dict[int, Any] = {}
        """Broadcasts that this endpoint has joined and not waited for, by bucket."""
        self._groups: dict[GroupKey, SyncGroup] = {}
        try:
            for key in GroupKey.all_of(wire_spec):
                if endpoint.receiver in key.receivers:
                    self._groups[key] = join(
                        address.rendezvous[key],
                        endpoint.receiver,
                        wire_spec.patience_s,
                        wire_spec.device_type,
                    )
        except WeightSyncError:
            self.close()
            raise

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Request this bucket and the next, wait for it, and yield the parameters.

        A bucket for other receivers yields none.
        """
        if bucket.index not in self._places:
            return
        if self._decoder is not None:
            flat = self._receive_delta(self._decoder, bucket)
            yield from parameters_in(flat, bucket)
            return

        # A broadcast cannot be skipped: what arrives next is what was sent next.
        if self._under_way and bucket.index not in self._under_way:
            raise WeightSyncError(
                f"bucket {bucket.index} is requested, while {sorted(self._under_way)}"
                " is on its way"
            )
        work = self._under_way.pop(bucket.index, None)
        if work is None:
            work = self._begin_receive(bucket)

        # The next bucket travels at the same time, and while this one is loaded: its
        # slot was released before this call.
        next_place = self._places[bucket.index] + 1
        if next_place < len(self._own):
            next_bucket = self._own[next_place]
            self._under_way[next_bucket.index] = self._begin_receive(next_bucket)

        self._group_of(bucket).wait(work)
        yield from parameters_in(self._memory_of(bucket), bucket)

    def release(self) -> None:
        """Wait until the device has read the slot."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Close the groups and free the slots."""
        for group in self._groups.values():
            group.close()
        self._slots.close()
        self._under_way.clear()

    def _group_of(self, bucket: Bucket) -> SyncGroup:
        return self._groups[GroupKey.of(bucket, self._wire_spec)]

    def _memory_of(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket in its slot, uint8 [nbytes].

        Slots are used in turn by the buckets that this endpoint receives.
        """
        return self._slots.flat(replace(bucket, index=self._places[bucket.index]))

    def _begin_receive(self, bucket: Bucket) -> Any:
        """Join the broadcast of a bucket into its slot."""
        return self._group_of(bucket).broadcast(self._memory_of(bucket))

    def _receive_delta(self, decoder: DeltaDecoder, bucket: Bucket) -> torch.Tensor:
        """Receive a packed bucket, and return the bytes of the bucket."""
        group = self._group_of(bucket)
        header = torch.empty(
            2 + len(bucket.entries),
            dtype=torch.int64,
            device=self._device,
        )
        group.wait(group.broadcast(header))
        header = header.cpu()

        # The header says how long the body is.
        nbytes = body_bytes(bucket, header)
        body = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Where nothing changed, nothing follows the header.
        if nbytes:
            group.wait(group.broadcast(body))
        return decoder.unpack(bucket, header, body)


def _carrier(wire_spec: WireSpec, device: torch.device) -> torch.device:
    """Return the device that carries the buckets on this process."""
    if wire_spec.device_type == "cpu":
        return torch.device("cpu")
    return device


def _new_slots(wire_spec: WireSpec, device: torch.device) -> list[torch.Tensor]:
    """Allocate the slots of one endpoint, uint8 [bytes] each."""
    return [
        torch.empty(wire_spec.slot_bytes, dtype=torch.uint8, device=device)
        for _ in range(SLOTS)
    ]


# --------------------------------------------------------- rendezvous and process group

# The groups of a wire are independent of those that its processes already belong to.
# Member 0 of each is its root, the sender.

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
    receivers: tuple[int, ...]
    """Numbers of the receivers."""
    token: str
    """Makes every rendezvous unique, since a port may be used again."""

    @property
    def size(self) -> int:
        """Number of members: the receivers and the sender."""
        return len(self.receivers) + 1

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class SyncGroup:
    """The process group of one root and the receivers that it serves there."""

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


def invite(host: str, receivers: Sequence[int]) -> tuple[WireRendezvous, socket.socket]:
    """Choose a rendezvous on a free port of this node. Called by the sender.

    Args:
        host: Address of this node.
        receivers: Numbers of the receivers that will come.

    Returns:
        The rendezvous, and the socket that listens there.
    """
    place, listener = listen(host, len(receivers) + 1)
    token = secrets.token_hex(4)
    rendezvous = WireRendezvous(place.address, place.port, tuple(receivers), token)
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
                f"weight sync: of {len(rendezvous.receivers)} receivers {missing}"
                f" {problem} to {rendezvous}, which was open for {waited_s:.0f} s"
                f" (at most {patience_s:.0f}, of {_KEY}). Can the nodes of the rollout"
                " engines reach that address?"
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
        receiver: Number of this receiver, one of the rendezvous.
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

    member = 1 + rendezvous.receivers.index(receiver)
    return _make_group(rendezvous, store, member, deadline, device_type)


def _missing_receivers(rendezvous: WireRendezvous, store: Any) -> list[int]:
    """Return the receivers that have not come yet."""
    return [
        receiver
        for receiver in rendezvous.receivers
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
