"""The wire between nodes: rank 0 of the actor puts buckets together and broadcasts their bytes to all receivers.

Invariant: the group of the wire lasts for any number of syncs and ends with the first failure; another one has another
address. Sending is asynchronous: `send` returns while the bucket travels, so the next one is gathered and filled
meanwhile; and a receiver asks for the next bucket before it loads this one. Has run over gloo only; over NCCL
(`Route.over` = "cuda") it is written but has not run on a GPU yet.
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
from verl_ray.weight_sync.delta import Changes, Held, body_bytes
from verl_ray.weight_sync.meeting import Group, Meeting, gather, invite, join
from verl_ray.weight_sync.slots import GatheredSlots, Slots, parameters_in
from verl_ray.weight_sync.transport import Address, Route, Seat, Sent, Shards


@dataclass(frozen=True)
class BroadcastAddress:
    meeting: Meeting

    ends_meet: ClassVar[bool] = True

    def open(self, seat: Seat) -> BroadcastReceiver:
        return BroadcastReceiver(self.meeting, seat)


class BroadcastSender:
    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._route, self._rank = route, rank
        self._device = torch.device("cpu") if route.over == "cpu" else device
        empty = [torch.empty(route.slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        self._slots = GatheredSlots(empty)
        self._changes = Changes() if route.delta else None
        self._meeting: Meeting | None = None
        self._listener: socket.socket | None = None
        self._group: Group | None = None
        self._under_way: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        """By slot: what travels, and the memory that it travels from."""
        self._broken: str | None = None
        self._leaves = threading.Event()

    def offer(self) -> BroadcastAddress:
        if self._rank == 0:
            self._meeting, self._listener = invite(self._route.host, self._route.receivers)
        return BroadcastAddress(self._meeting or Meeting("", 0, 0, ""))

    def connect(self, address: Address) -> None:
        if self._rank == 0:
            assert self._meeting is not None and self._listener is not None, "offer comes first"
            route = self._route
            self._group = gather(self._meeting, self._listener, route.patience_s, route.over, self._leaves)

    def leave(self) -> None:
        self._leaves.set()

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> Sent:
        slot = bucket.index % SLOTS
        self._wait(slot)
        prints = self._slots.gather(bucket, shards)
        if self._group is None or self._broken is not None:
            return Sent(prints, broken=self._broken)
        flat = self._slots.flat(bucket)
        changed, travels = 0, [flat]
        if self._changes is not None:
            packed = self._changes.pack(bucket, flat, whole=whole)
            changed, travels = packed.changed, [part.to(self._device) for part in (packed.header, packed.body)]
        try:
            self._under_way[slot] = [(self._group.broadcast(part), part) for part in travels if part.numel()]
        except WeightSyncError as error:
            self._broken = str(error)
        return Sent(prints, sum(part.nbytes for part in travels), changed, self._broken)

    def finish(self) -> None:
        for slot in range(SLOTS):
            self._wait(slot)
        if self._broken is not None and self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._group is not None:
            self._group.close()
        self._slots.close()
        self._under_way.clear()

    def _wait(self, slot: int) -> None:
        for work, _ in self._under_way.pop(slot, []):
            assert self._group is not None
            try:
                if self._broken is None:
                    self._group.wait(work)
            except WeightSyncError as error:
                self._broken = str(error)


class BroadcastReceiver:
    def __init__(self, meeting: Meeting, seat: Seat) -> None:
        route = seat.route
        self._route, self._device = route, torch.device("cpu") if route.over == "cpu" else seat.device
        self._held = Held() if route.delta else None
        count = 0 if route.delta else SLOTS
        empty = [torch.empty(route.slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._slots = Slots(empty)
        self._coming: dict[int, Any] = {}
        self._group = join(meeting, seat.receiver, route.patience_s, route.over)

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        if self._held is not None:
            header = self._now(torch.empty(2 + len(bucket.entries), dtype=torch.int64, device=self._device)).cpu()
            body = self._now(torch.empty(body_bytes(bucket, header), dtype=torch.uint8, device=self._device))
            yield from parameters_in(self._held.unpack(bucket, header, body), bucket)
            return
        if self._coming and bucket.index not in self._coming:
            raise WeightSyncError(f"bucket {bucket.index} is asked for, while {sorted(self._coming)} is on its way")
        work = self._coming.pop(bucket.index, None) or self._group.broadcast(self._slots.flat(bucket))
        self._group.wait(work)
        for following in self._route.buckets[bucket.index + 1 : bucket.index + 2]:
            self._coming[following.index] = self._group.broadcast(self._slots.flat(following))
        yield from self._slots.receive(bucket)

    def release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._group.close()
        self._slots.close()
        self._coming.clear()

    def _now(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._group.wait(self._group.broadcast(tensor))
        return tensor
