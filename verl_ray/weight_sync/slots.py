"""Places of one bucket each, and how slices get into them and whole parameters out.

Invariant: bucket i is in slot i modulo their number. Where each slice of a bucket goes is worked out the first time
and replayed for as long as the same slices come in the same order. Deliberately not here: whose memory it is, and when
a slot may be filled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.buckets import Bucket, Entry
from verl_ray.weight_sync.fingerprint import Fingerprints, Prints
from verl_ray.weight_sync.manifest import Slice
from verl_ray.weight_sync.transport import Shards


@dataclass
class _Recorded:
    """The slices of one bucket in the order they came, and where each goes."""

    bucket: Bucket
    parts: list[Slice] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)


class Slots:
    """`buffers`: flat, of bytes, as large as the largest bucket that will be in them."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._recorded: dict[int, _Recorded] = {}
        self._prints = Fingerprints()

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of the bucket, uint8 [nbytes]."""
        slot = self._buffers[bucket.index % len(self._buffers)]
        if bucket.nbytes > slot.numel():
            raise WeightSyncError(f"bucket {bucket.index} has {bucket.nbytes} bytes, a slot has {slot.numel()}")
        return slot[: bucket.nbytes]

    def fill(self, bucket: Bucket, shards: Shards) -> Prints:
        """Put slices of the bucket's parameters in place, cast to the manifest's dtypes.

        Returns:
            The fingerprints of what was written, taken from the source and not from the slot.

        Raises:
            WeightSyncError: a slice is not of this bucket, lies outside its parameter, or has no memory.
        """
        known = self._recorded.get(bucket.index)
        if known is None or known.bucket is not bucket:
            known = self._recorded[bucket.index] = _Recorded(bucket)
        for place, (part, tensor) in enumerate(shards):
            if tuple(tensor.shape) != part.shape:
                raise WeightSyncError(f"{part.name}: {tuple(tensor.shape)} was sent as a slice of shape {part.shape}")
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise WeightSyncError(
                    f"{part.name} has no memory: this backend gave it back when its weights went to the host. "
                    "placement.offload=optimizer keeps them on the device"
                )
            if place == len(known.parts) or known.parts[place] != part:
                del known.parts[place:], known.targets[place:]
                known.targets.append(self._target(bucket, part))
                known.parts.append(part)
            target = known.targets[place]
            source = tensor.detach().to(target.dtype)
            target.copy_(source)
            self._prints.add(part.name, source, part)
            advance(source.nbytes, "bytes")
        return self._prints.take()

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The bucket's parameters, whole, as views of the slot: valid until it is filled again."""
        return parameters_in(self.flat(bucket), bucket)

    def release(self) -> None:
        """Nothing to wait for: what was read from the host has been read."""

    def close(self) -> None:
        """Let go of the memory; views that are still held keep theirs."""
        self._buffers.clear()
        self._recorded.clear()

    def _target(self, bucket: Bucket, part: Slice) -> torch.Tensor:
        entry = next((one for one in bucket.entries if one.parameter.name == part.name), None)
        if entry is None:
            raise WeightSyncError(f"{part.name} was sent with bucket {bucket.index}, which does not hold it")
        shape = entry.parameter.shape
        stops = [start + size for start, size in zip(part.start, part.shape, strict=True)]
        if len(stops) != len(shape) or any(stop > size for stop, size in zip(stops, shape, strict=True)):
            raise WeightSyncError(f"{part.name}: the slice {part.shape} at {part.start} of {shape} does not exist")
        box = tuple(slice(start, stop) for start, stop in zip(part.start, stops, strict=True))
        return view(self.flat(bucket), entry)[box]


def parameters_in(flat: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's parameters, whole, as views of its bytes."""
    for entry in bucket.entries:
        yield entry.parameter.name, view(flat, entry)


def view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The parameter of `entry` in the bytes of its bucket."""
    nbytes = entry.parameter.numel * entry.dtype.itemsize
    return flat[entry.offset : entry.offset + nbytes].view(entry.dtype).view(entry.parameter.shape)


class GatheredSlots(Slots):
    """Slots that hold whole buckets, put together from the slices of all ranks: on rank 0, or on every rank.

    The bits are the owners' own. For buckets that rank 0 owns alone nothing is sent to it.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, everywhere: bool = False) -> None:
        super().__init__(buffers)
        self._everywhere = everywhere
        self._shared: dict[int, bool] = {}
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._several = (dist.get_rank(), True) if several else (0, False)

    def gather(self, bucket: Bucket, shards: Shards) -> Prints:
        """`fill`, after which the bucket is whole. Collective."""
        flat = self.flat(bucket)
        if self._several and self._shared.get(bucket.index, True):
            flat.zero_()
        written = self.fill(bucket, shards)
        if self._several:
            if bucket.index not in self._shared:
                others = torch.tensor(int(self._rank > 0 and bool(written.by_name)))
                dist.all_reduce(others, dist.ReduceOp.MAX)  # of the host: the gloo half of the process group
                self._shared[bucket.index] = self._everywhere or bool(others)
            if self._shared[bucket.index]:
                add_up(flat, everywhere=self._everywhere)
        return written


def add_up(flat: torch.Tensor, *, everywhere: bool = False) -> None:
    """The bytes of all ranks, uint8 [a multiple of 8], of which each is 0 on all ranks but one, on rank 0 or on every
    rank. Collective; on other ranks than 0 they have no meaning afterwards."""
    lanes = flat.view(torch.int64)
    dist.all_reduce(lanes) if everywhere else dist.reduce(lanes, dst=0)
