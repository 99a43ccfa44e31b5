"""The wire between nodes: rank 0 of the actor broadcasts buckets to all receivers.

Rank 0 gathers each bucket from the actor's ranks. Sending is asynchronous: `send`
returns while the bucket travels, so the next one is gathered meanwhile. A receiver
requests the next bucket before it loads the present one.

Invariant: the group of a wire serves any number of syncs, and is closed by the first
failure. The next group has another address. Has run over gloo only; over NCCL
(`WireSpec.device_type` = "cuda") it is written but has not run on a GPU yet.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.delta import DeltaDecoder, DeltaEncoder, body_bytes
from verl_ray.weight_sync.rendezvous import (
    SyncGroup,
    WireRendezvous,
    gather,
    invite,
    join,
)
from verl_ray.weight_sync.slots import GatheredSlots, Slots, parameters_in
from verl_ray.weight_sync.transport import (
    Address,
    SendResult,
    Shards,
    WireEndpoint,
    WireSpec,
)


@dataclass(frozen=True)
class BroadcastAddress:
    """The rendezvous of sender and receivers."""

    rendezvous: WireRendezvous

    waits_for_peers: ClassVar[bool] = True

    def open(self, endpoint: WireEndpoint) -> BroadcastReceiver:
        """Join the group; return when all endpoints have come."""
        return BroadcastReceiver(self.rendezvous, endpoint)


class BroadcastSender:
    """The sending endpoint: rank 0 gathers buckets and broadcasts them."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Allocate the slots."""
        self._wire_spec = wire_spec
        self._rank = rank
        self._device = _carrier(wire_spec, device)
        self._slots = GatheredSlots(_new_slots(wire_spec, self._device))
        self._encoder = DeltaEncoder() if wire_spec.delta else None

        self._rendezvous: WireRendezvous | None = None
        self._listener: socket.socket | None = None
        self._group: SyncGroup | None = None
        self._stop_waiting = threading.Event()

        self._under_way: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        """By slot: the broadcasts under way, and the memory that each reads."""
        self._broken: str | None = None

    def offer(self) -> BroadcastAddress:
        """Return the rendezvous; only rank 0's is of use."""
        if self._rank == 0:
            self._rendezvous, self._listener = invite(
                self._wire_spec.host,
                self._wire_spec.receivers,
            )
        return BroadcastAddress(self._rendezvous or WireRendezvous("", 0, 0, ""))

    def connect(self, address: Address) -> None:
        """Wait for all receivers, on rank 0."""
        if self._rank != 0:
            return
        assert self._rendezvous is not None and self._listener is not None, (
            "offer comes first"
        )
        self._group = gather(
            self._rendezvous,
            self._listener,
            self._wire_spec.patience_s,
            self._wire_spec.device_type,
            self._stop_waiting,
        )

    def stop_waiting(self) -> None:
        """Make `connect` give up, since a receiver will not come."""
        self._stop_waiting.set()

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Gather the bucket on rank 0, which begins to broadcast it."""
        # The slot is free once its last bucket has left.
        slot = bucket.index % SLOTS
        self._wait(slot)
        # Every rank takes part in this, also while the wire is broken.
        fingerprints = self._slots.gather(bucket, shards)
        if self._group is None or self._broken is not None:
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
                (self._group.broadcast(tensor), tensor)
                for tensor in tensors
                if tensor.numel()
            ]
        except WeightSyncError as error:
            # The actor's ranks stay in step: the driver raises this, not they.
            self._broken = str(error)

        nbytes = sum(tensor.nbytes for tensor in tensors)
        return SendResult(fingerprints, nbytes, changed, self._broken)

    def finish(self) -> None:
        """Wait until all buckets have left; close a broken group."""
        for slot in range(SLOTS):
            self._wait(slot)
        # Receivers that still wait for a broken group get an error now.
        if self._broken is not None and self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        """Close the group and free the slots."""
        if self._listener is not None:
            self._listener.close()
        if self._group is not None:
            self._group.close()
        self._slots.close()
        self._under_way.clear()

    def _wait(self, slot: int) -> None:
        """Wait until the broadcasts from a slot are complete."""
        for work, _ in self._under_way.pop(slot, []):
            assert self._group is not None
            try:
                if self._broken is None:
                    self._group.wait(work)
            except WeightSyncError as error:
                self._broken = str(error)


class BroadcastReceiver:
    """The receiving endpoint of a broadcast."""

    def __init__(self, rendezvous: WireRendezvous, endpoint: WireEndpoint) -> None:
        """Join the group; return when all endpoints have come.

        Raises:
            WeightSyncError: The sender cannot be reached, or another receiver did not
                come.
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

        self._under_way: dict[int, Any] = {}
        """Broadcasts that this endpoint has joined and not waited for, by bucket."""
        self._group = join(
            rendezvous,
            endpoint.receiver,
            wire_spec.patience_s,
            wire_spec.device_type,
        )

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the bucket, request the next one, and yield the parameters."""
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
        self._group.wait(work)

        # The next bucket travels while this one is loaded.
        next_place = bucket.index + 1
        if next_place < len(self._wire_spec.buckets):
            next_bucket = self._wire_spec.buckets[next_place]
            self._under_way[next_bucket.index] = self._begin_receive(next_bucket)
        yield from self._slots.receive(bucket)

    def release(self) -> None:
        """Wait until the device has read the slot."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Close the group and free the slots."""
        self._group.close()
        self._slots.close()
        self._under_way.clear()

    def _begin_receive(self, bucket: Bucket) -> Any:
        """Join the broadcast of a bucket into its slot."""
        return self._group.broadcast(self._slots.flat(bucket))

    def _receive_delta(self, decoder: DeltaDecoder, bucket: Bucket) -> torch.Tensor:
        """Receive a packed bucket, and return the bytes of the bucket."""
        header = torch.empty(
            2 + len(bucket.entries),
            dtype=torch.int64,
            device=self._device,
        )
        self._receive_now(header)
        header = header.cpu()

        # The header says how long the body is.
        nbytes = body_bytes(bucket, header)
        body = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._receive_now(body)
        return decoder.unpack(bucket, header, body)

    def _receive_now(self, tensor: torch.Tensor) -> None:
        """Receive a tensor, and wait for it. An empty tensor is not sent."""
        if tensor.numel():
            self._group.wait(self._group.broadcast(tensor))


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
