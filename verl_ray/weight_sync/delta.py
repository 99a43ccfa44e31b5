"""Deltas: only the elements of a bucket that changed since it was sent last.

This is for slow wires.

Invariant: a delta is lossless. Bits are compared, not values, and the decoded bucket is
the sender's bucket bit for bit, so fingerprints are of whole parameters on both sides.
Each bucket that is sent has a number. A delta names the number that it starts from, and
a receiver that holds another number refuses it. Both sides keep a copy of every bucket
in host memory.

A packed bucket has a header and a body.

- The header, int64 [2 + entries], holds the number that the delta starts from (0:
  nothing), its own number, and per parameter the number of elements that follow, or -1
  for all of them.
- The body holds bytes. Per parameter these are the indices into the flattened parameter
  (int32, or int64 from 2^31 elements on; none if all elements follow), then the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.fingerprint import integer_dtype
from verl_ray.weight_sync.manifest import Bucket, Entry, aligned

ALL = -1
"""Count in a header that stands for all elements of a parameter."""


@dataclass(frozen=True)
class Packed:
    """A bucket as it travels, on the host."""

    header: torch.Tensor
    body: torch.Tensor
    changed: int
    """Number of elements that differ from the bucket sent before."""


@dataclass
class _Copy:
    """The copy of a bucket that one side keeps."""

    number: int
    """Number of the bucket; 0 while the copy is not complete."""
    flat: torch.Tensor
    """Bytes of the bucket, uint8 [nbytes]."""


@dataclass(frozen=True)
class _Section:
    """The part of a body that belongs to one parameter, as views of the body."""

    place: int
    """Position of the parameter in its bucket."""
    entry: Entry
    indices: torch.Tensor
    values: torch.Tensor


@dataclass
class DeltaEncoder:
    """The sender's side: the buckets that were sent last."""

    _copies: dict[int, _Copy] = field(default_factory=dict)

    def pack(self, bucket: Bucket, flat: torch.Tensor, *, whole: bool) -> Packed:
        """Pack what changed in a bucket.

        Args:
            bucket: The bucket.
            flat: Its bytes, uint8 [nbytes].
            whole: Whether to pack all of it, for receivers that hold nothing.
        """
        flat = flat.cpu()
        last_sent = self._copies.get(bucket.index)
        base = None if whole else last_sent

        header = _new_header(bucket, base, last_sent)
        changed = 0
        # Indices of the changed elements by place, where only these travel.
        sparse: dict[int, torch.Tensor] = {}
        for place, entry in enumerate(bucket.entries):
            if base is None:
                changed += entry.parameter.numel
                continue
            indices = _changed_indices(base.flat, flat, entry)
            changed += len(indices)
            # A parameter whose changes would be larger than itself travels whole.
            whole_bytes = entry.parameter.numel * entry.dtype.itemsize
            if sum(_sizes(entry, len(indices))) < whole_bytes:
                header[2 + place] = len(indices)
                sparse[place] = indices

        body = torch.empty(body_bytes(bucket, header), dtype=torch.uint8)
        for section in _sections(bucket, header, body):
            bits = _bits(flat, section.entry)
            if section.place in sparse:
                indices = sparse[section.place]
                section.indices.copy_(indices)
                torch.index_select(bits, 0, indices, out=section.values)
            else:
                section.values.copy_(bits)

        # The copy is updated in place, so that there are never two of them.
        if last_sent is None:
            self._copies[bucket.index] = _Copy(1, flat.clone())
        else:
            last_sent.flat.copy_(flat)
            last_sent.number += 1
        return Packed(header, body, changed)


@dataclass
class DeltaDecoder:
    """The receiver's side: the buckets that arrived last."""

    _copies: dict[int, _Copy] = field(default_factory=dict)

    def unpack(
        self,
        bucket: Bucket,
        header: torch.Tensor,
        body: torch.Tensor,
    ) -> torch.Tensor:
        """Apply a packed bucket to the copy of this side.

        Returns:
            The bytes of the bucket, uint8 [nbytes]. They are this side's own copy,
            which the next delta changes.

        Raises:
            WeightSyncError: The delta starts from a bucket that this side does not
                hold.
        """
        base, number = header[:2].tolist()
        copy = self._copies.get(bucket.index)
        if copy is None:
            copy = _Copy(0, torch.zeros(bucket.nbytes, dtype=torch.uint8))
            self._copies[bucket.index] = copy

        if base not in (0, copy.number):
            raise WeightSyncError(
                f"bucket {bucket.index} holds changes to its number {base}, this"
                f" receiver holds number {copy.number}; all of {bucket.names} must be"
                " sent"
            )

        # Until all of it is written, the copy is no base for another delta.
        copy.number = 0
        for section in _sections(bucket, header, body.cpu()):
            bits = _bits(copy.flat, section.entry)
            # As many values as elements are all of them, without indices.
            if len(section.values) == len(bits):
                bits.copy_(section.values)
            else:
                bits.index_copy_(0, section.indices.long(), section.values)
        copy.number = number
        return copy.flat


def body_bytes(bucket: Bucket, header: torch.Tensor) -> int:
    """Return the size of the body that follows this header."""
    total = 0
    counts = header[2:].tolist()
    for entry, count in zip(bucket.entries, counts, strict=True):
        index_bytes, value_bytes = _sizes(entry, count)
        total += aligned(index_bytes) + aligned(value_bytes)
    return total


def _new_header(
    bucket: Bucket,
    base: _Copy | None,
    last_sent: _Copy | None,
) -> torch.Tensor:
    """Return the header of a bucket of which everything travels, int64 [2 + entries].

    Args:
        bucket: The bucket.
        base: The copy that the delta starts from; None for nothing.
        last_sent: The bucket before this one; None if this is the first.
    """
    header = torch.full((2 + len(bucket.entries),), ALL, dtype=torch.int64)
    header[0] = 0
    if base is not None:
        header[0] = base.number
    header[1] = 1
    if last_sent is not None:
        header[1] = last_sent.number + 1
    return header


def _changed_indices(
    before: torch.Tensor,
    after: torch.Tensor,
    entry: Entry,
) -> torch.Tensor:
    """Return the indices of the elements of a parameter whose bits differ, int64."""
    differs = _bits(after, entry) != _bits(before, entry)
    return differs.nonzero()[:, 0]


def _sections(
    bucket: Bucket,
    header: torch.Tensor,
    body: torch.Tensor,
) -> Iterator[_Section]:
    """Yield the sections of a body, one per parameter, in the order of the bucket."""
    position = 0
    counts = header[2:].tolist()
    for place, (entry, count) in enumerate(zip(bucket.entries, counts, strict=True)):
        index_bytes, value_bytes = _sizes(entry, count)

        indices = body[position : position + index_bytes].view(_index_dtype(entry))
        position += aligned(index_bytes)

        value_dtype = integer_dtype(entry.dtype.itemsize)
        values = body[position : position + value_bytes].view(value_dtype)
        position += aligned(value_bytes)

        yield _Section(place, entry, indices, values)


def _sizes(entry: Entry, count: int) -> tuple[int, int]:
    """Return the bytes of the indices and of the values of `count` elements."""
    if count == ALL:
        return 0, entry.parameter.numel * entry.dtype.itemsize
    return count * _index_dtype(entry).itemsize, count * entry.dtype.itemsize


def _index_dtype(entry: Entry) -> torch.dtype:
    """Return the smallest dtype that holds every index of a parameter."""
    if entry.parameter.numel < 2**31:
        return torch.int32
    return torch.int64


def _bits(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the elements of a parameter as integers, flat, as a view of the bucket."""
    nbytes = entry.parameter.numel * entry.dtype.itemsize
    content = flat[entry.offset : entry.offset + nbytes]
    return content.view(integer_dtype(entry.dtype.itemsize))
