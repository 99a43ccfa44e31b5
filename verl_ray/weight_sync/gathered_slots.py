"""Slots with whole buckets, gathered from all ranks of the actor.

Each bucket has a root, which needs it whole. The other ranks pack the slices that they
own behind one another in their slot, and send them to the root in one message each.

Invariant: the bits are those of the owners, and no byte of a bucket is sent twice to
the same rank. A bucket that its root owns alone is not communicated, and ranks that own
nothing send nothing. Which rank owns which slices is exchanged when a bucket is
gathered for the first time, and may not change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance, waiting_for_others
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.manifest import ALIGNMENT_BYTES, Bucket, Slice, aligned
from verl_ray.weight_sync.transport import (
    Shards,
    SlicePlace,
    Slots,
    packed_range,
    slice_view,
)

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """Return the values of all ranks of the actor, by rank. Collective."""
    if not _has_several_ranks():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class _Message:
    """The slices of a bucket that one rank owns, as they travel."""

    owner: int
    """The rank that sends it."""
    packed: torch.Tensor
    """Its bytes, uint8: a part of the slot if they lie there as they travel."""
    slices: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Each slice within `packed` and within the slot; none if that is the same."""

    def pack(self) -> None:
        """Copy the slices from the slot."""
        for packed, in_slot in self.slices:
            packed.copy_(in_slot)

    def unpack(self) -> None:
        """Copy the slices to the slot."""
        for packed, in_slot in self.slices:
            in_slot.copy_(packed)
        advance(self.packed.nbytes, "bytes")


@dataclass(frozen=True)
class _Exchange:
    """The messages that make a bucket whole, on one rank."""

    bucket: Bucket
    own: Sequence[Slice]
    """The slices that this rank owns."""
    messages: Sequence[_Message]
    """Those that this rank sends or receives, in the order of their owners."""


class GatheredSlots(Slots):
    """Slots that hold whole buckets, on their roots or on every rank."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        roots: Sequence[int] = (0,),
        everywhere: bool = False,
    ) -> None:
        """Use these buffers on this rank.

        Args:
            buffers: Buffers, uint8 [bytes], each as large as the largest bucket.
            roots: The ranks that need whole buckets, in turn: bucket i is for the root
                at i modulo their number.
            everywhere: Whether every rank gets the whole buckets, not only their roots.
        """
        super().__init__(buffers)
        self._roots = roots
        self._everywhere = everywhere
        self._exchanges: dict[int, _Exchange] = {}
        """By index of the bucket."""
        # Memory in which messages arrive that have to be unpacked.
        self._staging = torch.empty(0, dtype=torch.uint8)

        self._several_ranks = _has_several_ranks()
        self._rank = 0
        if self._several_ranks:
            self._rank = dist.get_rank()

    def holds(self, bucket: Bucket) -> bool:
        """Whether this rank has the bucket whole once it is gathered."""
        return self._everywhere or self._rank == self._root_of(bucket)

    def gather(self, bucket: Bucket, shards: Shards) -> Fingerprints:
        """Fill the slot on every rank, then make the bucket whole. Collective.

        Returns:
            The fingerprints of this rank's slices.

        Raises:
            WeightSyncError: As of `fill`; or this rank owns other slices than before.
        """
        written = self.fill(bucket, shards)
        if not self._several_ranks:
            return written

        own = [place.part for place in self._places(bucket)]
        exchange = self._exchanges.get(bucket.index)
        if exchange is None or exchange.bucket is not bucket:
            exchange = _Exchange(bucket, own, self._plan_messages(bucket, own))
            self._exchanges[bucket.index] = exchange
        # The other ranks know the slices of the first time.
        if exchange.own != own:
            raise WeightSyncError(
                f"rank {self._rank} owns other slices of bucket {bucket.index} than"
                f" when the wire was opened: {_difference(exchange.own, own)}"
            )

        if self._everywhere:
            self._exchange_everywhere(exchange.messages)
        else:
            self._send_to_root(bucket, exchange.messages)
        return written

    def close(self) -> None:
        """Drop the memory; views that still exist keep theirs."""
        super().close()
        self._exchanges.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    # -------------------------------------------------------------------- communication

    def _send_to_root(self, bucket: Bucket, messages: Sequence[_Message]) -> None:
        """Send this rank's message to the root, or receive those of the others."""
        if not messages:
            return
        if self.holds(bucket):
            operations = [
                dist.P2POp(dist.irecv, message.packed, message.owner)
                for message in messages
            ]
        else:
            (message,) = messages
            root = self._root_of(bucket)
            operations = [dist.P2POp(dist.isend, message.packed, root)]

        # In a batch NCCL needs no communicator for each pair of ranks.
        _wait_for(dist.batch_isend_irecv(operations))
        if self.holds(bucket):
            for message in messages:
                message.unpack()

    def _exchange_everywhere(self, messages: Sequence[_Message]) -> None:
        """Send this rank's message to all others, and receive theirs."""
        works: list[dist.Work | None] = []
        for message in messages:
            if message.owner == self._rank:
                message.pack()
            works.append(dist.broadcast(message.packed, message.owner, async_op=True))

        _wait_for(works)
        for message in messages:
            if message.owner != self._rank:
                message.unpack()

    # ----------------------------------------------------------------------------- plan

    def _new_place(self, bucket: Bucket, part: Slice, packed_bytes: int) -> SlicePlace:
        in_slot = super()._new_place(bucket, part, packed_bytes)
        if not self._several_ranks or self.holds(bucket):
            return in_slot
        # What leaves this rank is packed where it is written.
        packed = _packed_view(self.flat(bucket), packed_bytes, in_slot.target)
        return SlicePlace(part, packed, in_slot.packed_end)

    def _plan_messages(self, bucket: Bucket, own: Sequence[Slice]) -> list[_Message]:
        """Return the messages that this rank sends or receives. Collective."""
        slices_of_ranks = from_all_ranks(own)
        if not self.holds(bucket):
            places = self._places(bucket)
            if not places or not places[-1].packed_end:
                return []
            packed = self.flat(bucket)[: places[-1].packed_end]
            return [_Message(self._rank, packed, ())]

        flat = self.flat(bucket)
        views_of_owners: dict[int, list[torch.Tensor]] = {}
        for owner, slices in enumerate(slices_of_ranks):
            # The root wrote its own slices where they belong.
            if self._everywhere or owner != self._rank:
                views = [slice_view(flat, bucket, part) for part in slices]
                views_of_owners[owner] = views
        return list(self._messages(flat, views_of_owners))

    def _messages(
        self, flat: torch.Tensor, views_of_owners: Mapping[int, list[torch.Tensor]]
    ) -> Iterator[_Message]:
        """Yield the messages of these owners, with the memory that they arrive in.

        Args:
            flat: The bytes of the bucket.
            views_of_owners: The slices of each owner, as views of them.
        """
        staged: dict[int, int] = {}
        needed_bytes = 0
        for owner, views in views_of_owners.items():
            nbytes = _packed_bytes(views)
            first = _packed_at(flat, views)
            if nbytes and first is not None:
                yield _Message(owner, flat[first : first + nbytes], ())
            elif nbytes:
                staged[owner] = nbytes
                needed_bytes += aligned(nbytes)

        # Messages of other buckets arrive in the same memory, which has room for a slot
        # in parts: memory that is made anew would not replace it in their plans.
        if needed_bytes > self._staging.numel():
            parts_bytes = ALIGNMENT_BYTES * dist.get_world_size()
            size = max(needed_bytes, flat.untyped_storage().nbytes() + parts_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=flat.device)

        position = 0
        for owner, nbytes in staged.items():
            packed = self._staging[position : position + nbytes]
            position += aligned(nbytes)
            slices: list[tuple[torch.Tensor, torch.Tensor]] = []
            end = 0
            for in_slot in views_of_owners[owner]:
                slices.append((_packed_view(packed, end, in_slot), in_slot))
                end = packed_range(end, in_slot).stop
            yield _Message(owner, packed, slices)

    def _root_of(self, bucket: Bucket) -> int:
        return self._roots[bucket.index % len(self._roots)]


def _packed_bytes(views: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors, packed behind one another."""
    end = 0
    for view in views:
        end = packed_range(end, view).stop
    return end


def _packed_view(
    memory: torch.Tensor, packed_bytes: int, content: torch.Tensor
) -> torch.Tensor:
    """Return memory for a tensor behind `packed_bytes` that are taken.

    Args:
        memory: The memory, uint8 [bytes].
        packed_bytes: How much of it is taken.
        content: A tensor of the same shape and dtype.
    """
    place = packed_range(packed_bytes, content)
    flat = memory[place.start : place.stop]
    return flat.view(content.dtype).view(content.shape)


def _packed_at(flat: torch.Tensor, views: Iterable[torch.Tensor]) -> int | None:
    """Return the byte at which some views of `flat` begin, if they lie there packed.

    None if they do not lie behind one another as they travel.
    """
    first: int | None = None
    end = 0
    for view in views:
        byte = int(view.storage_offset()) * view.element_size()
        byte -= int(flat.storage_offset())
        place = packed_range(end, view)
        if first is None:
            first = byte
        if not view.is_contiguous() or byte - first != place.start:
            return None
        end = place.stop
    return first


def _difference(before: Sequence[Slice], now: Sequence[Slice]) -> str:
    """Describe where two lists of slices begin to differ."""
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"{new} in place of {old}"
    return f"{len(now)} in place of {len(before)}"


def _has_several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait until exchanges between the actor's ranks are complete."""
    with waiting_for_others():
        for work in works:
            if work is not None:
                work.wait()
