"""Slots: memory for one bucket each. Slices are written, whole parameters are read.

Invariant: bucket i is in slot i modulo the number of slots. The place of each slice of
a bucket is computed the first time, and reused as long as the same slices come in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.fingerprint import FingerprintAccumulator, Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Entry, Slice
from verl_ray.weight_sync.transport import Shards


@dataclass
class _FillPlan:
    """The slices of one bucket in the order of their arrival, with their places."""

    bucket: Bucket
    parts: list[Slice] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)


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
        # Another bucket of the same number belongs to another plan of buckets.
        plan = self._plans.get(bucket.index)
        if plan is None or plan.bucket is not bucket:
            plan = _FillPlan(bucket)
            self._plans[bucket.index] = plan

        for place, (part, tensor) in enumerate(shards):
            _check_slice(part, tensor)

            # From the first slice that differs from the last time, the plan is new.
            if place == len(plan.parts) or plan.parts[place] != part:
                del plan.parts[place:]
                del plan.targets[place:]
                plan.targets.append(self._target(bucket, part))
                plan.parts.append(part)

            # The fingerprint is of what travels, so it is taken after the cast.
            target = plan.targets[place]
            source = tensor.detach().to(target.dtype)
            target.copy_(source)
            self._accumulator.add(part.name, source, part)
            advance(source.nbytes, "bytes")
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

    def _target(self, bucket: Bucket, part: Slice) -> torch.Tensor:
        """Return the view of the slot that a slice is written to."""
        by_name = {entry.parameter.name: entry for entry in bucket.entries}
        entry = by_name.get(part.name)
        if entry is None:
            raise WeightSyncError(
                f"{part.name} was sent with bucket {bucket.index}, which does not"
                " hold it"
            )

        shape = entry.parameter.shape
        stops = [
            start + size for start, size in zip(part.start, part.shape, strict=True)
        ]
        is_inside = len(stops) == len(shape) and all(
            stop <= size for stop, size in zip(stops, shape, strict=True)
        )
        if not is_inside:
            raise WeightSyncError(
                f"{part.name}: the slice {part.shape} at {part.start} of {shape} does"
                " not exist"
            )

        # The fill plan keeps this view, so it is made once and not in every sync.
        box = tuple(
            slice(start, stop) for start, stop in zip(part.start, stops, strict=True)
        )
        return parameter_view(self.flat(bucket), entry)[box]


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


class GatheredSlots(Slots):
    """Slots with whole buckets, gathered from all ranks on rank 0 or on every rank.

    The bits are those of the owners. Buckets that rank 0 owns alone are not
    communicated.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        everywhere: bool = False,
    ) -> None:
        """Use these buffers on this rank.

        Args:
            buffers: Buffers, uint8 [bytes], each as large as the largest bucket.
            everywhere: Whether every rank gets the whole buckets, not only rank 0.
        """
        super().__init__(buffers)
        self._everywhere = everywhere
        self._needs_sum: dict[int, bool] = {}
        """By index of the bucket: whether ranks other than 0 own parts of it."""

        self._several_ranks = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = 0
        if self._several_ranks:
            self._rank = dist.get_rank()

    def gather(self, bucket: Bucket, shards: Shards) -> Fingerprints:
        """Fill the slot on every rank, then make the bucket whole. Collective.

        Returns:
            The fingerprints of this rank's slices.
        """
        flat = self.flat(bucket)
        if not self._several_ranks:
            return self.fill(bucket, shards)

        # Bytes of all ranks are summed, so those of the other ranks must be 0 here.
        if self._needs_sum.get(bucket.index, True):
            flat.zero_()
        written = self.fill(bucket, shards)

        if bucket.index not in self._needs_sum:
            # A tensor on the host: the gloo half of the process group carries it.
            others_own = torch.tensor(int(self._rank > 0 and bool(written.by_name)))
            dist.all_reduce(others_own, dist.ReduceOp.MAX)
            self._needs_sum[bucket.index] = self._everywhere or bool(others_own)
        if self._needs_sum[bucket.index]:
            sum_bytes_over_ranks(flat, everywhere=self._everywhere)
        return written


def sum_bytes_over_ranks(flat: torch.Tensor, *, everywhere: bool = False) -> None:
    """Sum the bytes of all ranks, in place. Collective.

    Args:
        flat: uint8 [a multiple of 8]; each byte is 0 on all ranks but one.
        everywhere: Whether every rank gets the sum. Otherwise only rank 0 does, and on
            the others the bytes have no meaning afterwards.
    """
    # Integers are exact: adding 0 leaves every bit of the owner's as it is.
    words = flat.view(torch.int64)
    if everywhere:
        dist.all_reduce(words)
    else:
        dist.reduce(words, dst=0)
