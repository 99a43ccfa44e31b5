"""The contract of a wire: how buckets get from the actor's ranks to the processes that receive them.

Order: every rank of the actor makes a `Sender` of the same `Route` and is asked for its `offer`; rank 0's is the
address. Then senders and receivers `connect` and `open` at the same time, which is where wires that need it meet; after
that buckets go over it for any number of syncs, in the order of the route, `SLOTS` of them under way at most. When an
end is replaced, or a sync broke off, all begin again with another address.

Invariant: an address is small and picklable, and never used twice; what a receiver gives are whole parameters.
Deliberately not here: what travels (manifest), how much at once (buckets), and who calls in which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.manifest import Slice

Shards = Iterable[tuple[Slice, torch.Tensor]]


@dataclass(frozen=True)
class Route:
    """What every end of a wire is told."""

    buckets: tuple[Bucket, ...]
    receivers: int
    """Processes that receive: all ranks of all rollout engines."""
    patience_s: float
    """How long one end waits for the others."""
    host: str = "127.0.0.1"
    """Where the node of the actor's rank 0 is reached."""
    folder: str = ""
    """For files."""
    delta: bool = False
    """Whether only what changed travels, once all of it has."""
    apart: bool = False
    """Whether the actor's adapter travels beside the model, and not merged into it."""
    over: str = "cpu"
    """The device that buckets are carried from: "cpu" or "cuda"."""

    @property
    def slot_bytes(self) -> int:
        return max((bucket.nbytes for bucket in self.buckets), default=1)


@dataclass(frozen=True)
class Seat:
    """What a receiver is told beside the address."""

    route: Route
    receiver: int
    """Its number among all receivers, from 0."""
    device: torch.device
    """Where it wants the tensors, if the wire has a choice."""


@dataclass(frozen=True)
class Sent:
    """What one rank put on the wire."""

    prints: Prints = field(default_factory=Prints)
    """Of this rank's slices, taken where it read them. Those of all ranks add up."""
    nbytes: int = 0
    """What travels, as the rank knows that carries it; 0 on the others."""
    changed: int = 0
    """Elements that differ from what was sent before, likewise."""
    broken: str | None = None
    """Why nothing travels any more: a receiver is gone. It is no failure of the actor's ranks, which stay in step."""


class Sender(Protocol):
    """The sending end on one rank of the actor. Every rank calls every method, in the same order."""

    def offer(self) -> Address:
        """Where this rank would be found."""

    def connect(self, address: Address) -> None:
        """Be ready for `send`. Raises WeightSyncError, which names the receivers that did not come."""

    def leave(self) -> None:
        """From another thread: a receiver will not come, `connect` waits no longer."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> Sent:
        """Put this rank's slices of the bucket on the wire. What it takes from `shards` is read when it returns.

        Raises:
            WeightSyncError: a slice does not belong there.
        """

    def finish(self) -> None:
        """All receivers have committed, or given up: free what the sync alone needed. A broken wire ends here, for
        those who still wait at it too."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The receiving end in one process."""

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The bucket's parameters, whole, under their Hugging Face names, valid until `release`.

        Raises:
            WeightSyncError: the bucket did not come in time, or what came does not fit what this end holds.
        """

    def release(self) -> None:
        """What was read last is used no more: its place may be filled again when this returns."""

    def close(self) -> None: ...


class Address(Protocol):
    ends_meet: ClassVar[bool]
    """Whether a receiver waits for other ends when it opens and reads; else what it does takes as long as it takes."""

    def open(self, seat: Seat) -> Receiver:
        """The receiving end. Wires whose ends meet return when all ends are there.

        Raises:
            WeightSyncError: nobody is there, or it cannot be reached from here.
        """
