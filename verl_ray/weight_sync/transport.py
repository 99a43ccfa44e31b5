"""The interface of a wire, over which the actor's ranks send buckets to receivers, and
what both ends keep.

Order of the calls:

1. Every rank of the actor makes a `Sender` from the same `WireSpec`. The address that
   rank 0 offers is the address of the wire, with the places of all roots.
2. Each sender calls `Sender.connect` with that address, while each receiving process
   calls `Address.open`. Wires that need a rendezvous perform it here.
3. Any number of syncs follow. Each sends the buckets in the order of the specification,
   with at most `SLOTS` (of this package) in flight.
4. When an endpoint is replaced or a sync fails, all endpoints start again at 1 with a
   new address.

Invariant: an address is small, can be pickled, and is never used twice. A receiver
yields whole parameters. A slot is memory for one bucket: slices are written, whole
parameters are read, and bucket i is in slot i modulo the number of slots. The place of
each slice of a bucket is computed the first time, and reused as long as the same slices
come in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.fingerprint import (
    Fingerprint,
    FingerprintAccumulator,
    Fingerprints,
)
from verl_ray.weight_sync.manifest import Bucket, Entry, Slice

# The driver hands on specifications and results, and does without torch.
if TYPE_CHECKING:
    import torch

Shards = Iterable[tuple[Slice, "torch.Tensor"]]
"""Slices of parameters that a rank owns, each with its content."""


@dataclass(frozen=True)
class WireRoot:
    """A rank of the actor that gathers buckets and broadcasts them."""

    rank: int
    host: str
    """Address of its node."""


@dataclass(frozen=True)
class WireSpec:
    """Specification of a wire, the same for every sender and receiver."""

    buckets: tuple[Bucket, ...]
    receivers: int
    """Number of processes that receive: all ranks of all rollout engines."""
    patience_s: float
    """Seconds that an endpoint waits for its peers before it fails."""
    roots: tuple[WireRoot, ...] = (WireRoot(0, "127.0.0.1"),)
    """The ranks that broadcast buckets, in turn: bucket i is that of root i modulo
    their number. Other wires have no roots, or rank 0 alone."""
    folder: str = ""
    """Directory for the files of wires that use files."""
    delta: bool = False
    """Whether only changes travel, after the first sync."""
    separate_adapter: bool = False
    """Whether the actor's adapter travels apart from the model, not merged into it."""
    keeps_version: bool = False
    """Whether the actor's ranks keep on the host what they have sent."""
    device_type: str = "cpu"
    """Device that carries the buckets: "cpu" or "cuda"."""

    @property
    def slot_bytes(self) -> int:
        """Size of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=1)


@dataclass(frozen=True)
class WireEndpoint:
    """The data with which one receiver opens the wire."""

    wire_spec: WireSpec
    receiver: int
    """Number of this receiver among all receivers, from 0."""
    device: torch.device
    """Device for the received tensors, on wires that have a choice."""


@dataclass(frozen=True)
class SendResult:
    """Report of one rank on its parts of the buckets that it sent."""

    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    """Fingerprints of this rank's slices, taken where it read them.

    The fingerprints of all ranks add up to those of whole parameters.
    """
    nbytes: int = 0
    """Bytes sent, reported by the rank that transfers them; 0 on the others."""
    changed: int = 0
    """Elements changed since the last sync, reported by the same rank."""
    broken: str | None = None
    """Why the transfer stopped, such as a receiver that exited; None while it works.

    This is no error on the actor: its ranks keep making the same calls, so that no
    collective hangs.
    """

    def __add__(self, later: SendResult) -> SendResult:
        """Return the result of these buckets and of later ones."""
        return SendResult(
            fingerprints=self.fingerprints + later.fingerprints,
            nbytes=self.nbytes + later.nbytes,
            changed=self.changed + later.changed,
            broken=self.broken or later.broken,
        )

    @classmethod
    def of_ranks(cls, parts: Sequence[SendResult]) -> SendResult:
        """Return the result of all ranks together.

        Their fingerprints add up, and the time for them is that of the slowest rank.
        """
        together = sum(parts, cls())
        slowest = max(part.fingerprints.seconds for part in parts)
        fingerprints = replace(together.fingerprints, seconds=slowest)
        return replace(together, fingerprints=fingerprints)


class Sender(Protocol):
    """The sending endpoint on one rank of the actor.

    Every rank calls every method, in the same order.
    """

    def offer(self) -> Address:
        """Return the address of the wire; only rank 0's is of use."""

    def connect(self, address: Address) -> None:
        """Prepare for `send`.

        Raises:
            WeightSyncError: Receivers did not connect in time; the error names them.
        """

    def stop_waiting(self) -> None:
        """Make `connect` give up, because a receiver will not connect.

        This is called from another thread.
        """

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Put this rank's slices of the bucket on the wire.

        `shards` has been read when this returns.

        Args:
            bucket: The next bucket of the specification.
            shards: Slices of its parameters, with their content.
            whole: Send every element, even if the wire sends only changes.

        Raises:
            WeightSyncError: A slice is not part of the bucket.
        """

    def finish(self) -> None:
        """Free what only the sync needed: all receivers have committed or given up.

        A broken wire is closed here, also for peers that still wait for it.
        """

    def close(self) -> None:
        """Close the wire and free its memory."""


class Receiver(Protocol):
    """The receiving endpoint in one process."""

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the bucket's parameters, whole, under their Hugging Face names.

        They are valid until `release`. There are none if the bucket is for others.

        Raises:
            WeightSyncError: The bucket did not arrive in time, or it does not fit what
                this endpoint holds.
        """

    def release(self) -> None:
        """Free the slot of the last bucket: its tensors are no longer used.

        The slot may be filled again when this returns.
        """

    def close(self) -> None:
        """Close the wire and free its memory."""


class Address(Protocol):
    """Where receivers find a wire."""

    waits_for_peers: ClassVar[bool]
    """Whether a receiver waits for other processes when it opens and receives."""

    def open(self, endpoint: WireEndpoint) -> Receiver:
        """Open the receiving endpoint.

        A wire with a rendezvous returns when all endpoints have come.

        Raises:
            WeightSyncError: No sender was there, or it cannot be reached from here.
        """


@dataclass(frozen=True)
class SealedAddress:
    """An address on its way through the driver, which hands it on unread.

    Its class is in the module of its wire, which imports torch.
    """

    content: bytes
    """The pickled address."""

    @classmethod
    def of(cls, address: Address) -> SealedAddress:
        """Seal an address."""
        return cls(pickle.dumps(address))

    def unsealed(self) -> Address:
        """Return the address, and import the module of its wire."""
        return cast(Address, pickle.loads(self.content))


# ---------------------------------------------------------------- the receiving process


class Inbox:
    """The wire that is open in this process, and fingerprints of what arrived.

    Every tensor that is handed on is fingerprinted before its slot is filled again, at
    the same time as it is loaded.
    """

    def __init__(self) -> None:
        """Start without a wire."""
        # Fingerprints and loading both wait for memory, so they run at the same time.
        self._thread = ThreadPoolExecutor(1, "fingerprints")
        self._pending: Future[Fingerprints] | None = None
        self._receiver: Receiver | None = None

        self._arrived: dict[str, Fingerprint] = {}
        self._seconds = 0.0

    def connect(self, address: Address, endpoint: WireEndpoint) -> None:
        """Open a wire; close the one that was open before."""
        self.close()
        self._receiver = address.open(endpoint)

    def begin(self) -> None:
        """Begin a sync: forget what arrived in another one."""
        self._arrived = {}
        self._seconds = 0.0

    def receive(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return the bucket's parameters, whole, valid until `release`.

        There are none if the bucket is for other receivers.

        Raises:
            WeightSyncError: No wire is open, or the bucket did not arrive over it as it
                was sent.
        """
        if self._receiver is None:
            raise WeightSyncError(
                f"bucket {bucket.index} cannot be received: no wire is open; call"
                " connect first"
            )
        # The caller loads the tensors while the thread takes their fingerprints.
        tensors = dict(self._receiver.receive(bucket))
        if tensors:
            advance(bucket.nbytes, "bytes")
        self._pending = self._thread.submit(_fingerprints, tensors)
        return tensors

    def release(self) -> None:
        """Free the slot of the last bucket, once its fingerprints are taken."""
        assert self._receiver is not None and self._pending is not None, (
            "receive comes first"
        )
        # The thread reads the slot too, so it has to finish first.
        fingerprints = self._pending.result()
        self._pending = None
        self._arrived |= fingerprints.by_name
        self._seconds += fingerprints.seconds
        self._receiver.release()

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of everything that arrived since `begin`."""
        return Fingerprints(self._arrived, self._seconds)

    def close(self) -> None:
        """Close the wire, if one is open."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Fingerprints:
    """Return the fingerprints of whole parameters."""
    accumulator = FingerprintAccumulator()
    for name, tensor in tensors.items():
        accumulator.add(name, tensor)
    return accumulator.take()


# --------------------------------------------------------------------- the sending rank


class KeptVersion:
    """The weights of the published version, on the host, while the actor learns the
    next.

    A replica that starts again meanwhile gets them, so that it generates with the same
    version as the others. Slices of a bucket are those that were sent last, bit by bit.
    The memory of a bucket is used again for the next version.
    """

    def __init__(self) -> None:
        self._slices: dict[int, list[tuple[Slice, torch.Tensor]]] = {}

    def keep(self, index: int, shards: Shards) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield the slices of a bucket, and copy each one to the host."""
        import torch

        older = self._slices.get(index, [])
        copies: list[tuple[Slice, torch.Tensor]] = []

        for number, (piece, content) in enumerate(shards):
            memory = older[number][1] if number < len(older) else None
            if memory is None or memory.shape != content.shape:
                memory = torch.empty_like(content, device="cpu")
            memory.copy_(content)
            copies.append((piece, memory))
            yield piece, content

        self._slices[index] = copies

    def shards(
        self, index: int, device: torch.device
    ) -> Iterator[tuple[Slice, torch.Tensor]] | None:
        """Return the kept slices of a bucket, on a device; None if none were kept."""
        slices = self._slices.get(index)
        if slices is None:
            return None
        return ((piece, content.to(device)) for piece, content in slices)


# -------------------------------------------------------------------------------- slots


@dataclass(frozen=True)
class SlicePlace:
    """A slice of a bucket, and where it is written in every sync."""

    part: Slice
    target: torch.Tensor
    """The slice's memory in the slot, of the dtype in which it travels."""
    packed_end: int
    """Bytes of all slices up to this one, packed behind one another."""


@dataclass(frozen=True)
class _FillPlan:
    """The places of one bucket's slices, in the order of their arrival."""

    bucket: Bucket
    places: list[SlicePlace] = field(default_factory=list)


class Slots:
    """Slots in the memory of this process, or in memory that it shares."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Use these buffers, uint8 [bytes], each as large as the largest bucket."""
        self._buffers = list(buffers)
        self._plans: dict[int, _FillPlan] = {}
        self._accumulator = FingerprintAccumulator()

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of the bucket, uint8 [nbytes]."""
        slot = self._buffers[bucket.index % len(self._buffers)]
        if bucket.nbytes > slot.numel():
            raise WeightSyncError(
                f"bucket {bucket.index} has {bucket.nbytes} bytes, a slot has"
                f" {slot.numel()}"
            )
        return slot[: bucket.nbytes]

    def fill(self, bucket: Bucket, shards: Shards) -> Fingerprints:
        """Write slices of the bucket's parameters, cast to the manifest's dtypes.

        Returns:
            The fingerprints of what was written, taken from the source and not from the
            slot.

        Raises:
            WeightSyncError: A slice is not part of this bucket, lies outside of its
                parameter, or has no memory.
        """
        places = self._places(bucket)
        count = 0
        for part, tensor in shards:
            _check_slice(part, tensor)

            # From the first slice that differs from the last time, the plan is new.
            if count == len(places) or places[count].part != part:
                del places[count:]
                packed_bytes = places[-1].packed_end if places else 0
                places.append(self._new_place(bucket, part, packed_bytes))

            # The fingerprint is of what travels, so it is taken after the cast.
            target = places[count].target
            source = tensor.detach().to(target.dtype)
            self._accumulator.add(part.name, source, part, copy=target)
            advance(source.nbytes, "bytes")
            count += 1

        del places[count:]
        return self._accumulator.take()

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the bucket's parameters, whole, as views of the slot.

        They are valid until the slot is filled again.
        """
        return parameters_in(self.flat(bucket), bucket)

    def release(self) -> None:
        """Do nothing: what was read on the host has been read."""

    def close(self) -> None:
        """Drop the memory; views that still exist keep theirs."""
        self._buffers.clear()
        self._plans.clear()

    def _places(self, bucket: Bucket) -> list[SlicePlace]:
        """Return the places of the slices that were written last."""
        plan = self._plans.get(bucket.index)
        # Another bucket of the same number belongs to another plan of buckets.
        if plan is None or plan.bucket is not bucket:
            plan = _FillPlan(bucket)
            self._plans[bucket.index] = plan
        return plan.places

    def _new_place(self, bucket: Bucket, part: Slice, packed_bytes: int) -> SlicePlace:
        """Return the place of a slice within the whole parameter.

        Args:
            bucket: The bucket.
            part: The slice.
            packed_bytes: Bytes of the slices before it, packed.
        """
        target = slice_view(self.flat(bucket), bucket, part)
        return SlicePlace(part, target, packed_range(packed_bytes, target).stop)


def slice_view(flat: torch.Tensor, bucket: Bucket, part: Slice) -> torch.Tensor:
    """Return a slice of a parameter as a view of the bytes of its bucket.

    Raises:
        WeightSyncError: The slice is not part of this bucket, or lies outside of its
            parameter.
    """
    by_name = {entry.parameter.name: entry for entry in bucket.entries}
    entry = by_name.get(part.name)
    if entry is None:
        raise WeightSyncError(
            f"{part.name} was sent with bucket {bucket.index}, which does not hold it"
        )

    shape = entry.parameter.shape
    stops = [start + size for start, size in zip(part.start, part.shape, strict=True)]
    is_inside = len(stops) == len(shape) and all(
        stop <= size for stop, size in zip(stops, shape, strict=True)
    )
    if not is_inside:
        raise WeightSyncError(
            f"{part.name}: the slice {part.shape} at {part.start} of {shape} does not"
            " exist"
        )

    box = tuple(
        slice(start, stop) for start, stop in zip(part.start, stops, strict=True)
    )
    return parameter_view(flat, entry)[box]


def packed_range(packed_bytes: int, content: torch.Tensor) -> range:
    """Return the bytes that a tensor takes behind `packed_bytes` that are taken.

    It begins at a multiple of the size of its elements.
    """
    size = content.element_size()
    start = -(-packed_bytes // size) * size
    return range(start, start + content.numel() * size)


def _check_slice(part: Slice, tensor: torch.Tensor) -> None:
    """Raise WeightSyncError if a tensor is not the content of its slice."""
    if tuple(tensor.shape) != part.shape:
        raise WeightSyncError(
            f"{part.name}: {tuple(tensor.shape)} was sent as a slice of shape"
            f" {part.shape}"
        )
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise WeightSyncError(
            f"{part.name} has no memory: this backend gave it back when its"
            " weights went to the host. placement.offload=optimizer keeps them"
            " on the device"
        )


def parameters_in(
    flat: torch.Tensor,
    bucket: Bucket,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bucket's parameters, whole, as views of its bytes."""
    for entry in bucket.entries:
        yield entry.parameter.name, parameter_view(flat, entry)


def parameter_view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the parameter of `entry` as a view of the bytes of its bucket."""
    nbytes = entry.parameter.numel * entry.dtype.itemsize
    content = flat[entry.offset : entry.offset + nbytes]
    return content.view(entry.dtype).view(entry.parameter.shape)
