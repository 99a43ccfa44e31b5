"""What changed of a bucket since it was sent last, and the bucket made from it again: for slow wires.

Invariant: lossless. Bits are compared, not values, and what is put together is the sender's bucket bit for bit; so
fingerprints are of whole parameters on both sides. Each bucket that is sent has a number, and changes name the number
they begin at: they are refused by an end that holds another one. Both ends keep a copy of every bucket in host memory.
Deliberately not here: which wire carries them.

A packed bucket is a header, int64 [2 + entries]: the number it begins at (0: nothing), its own number, and for each
parameter the elements that follow, or -1 for all of it; and a body of bytes: for each parameter its indices into the
flattened parameter (int32, or int64 from 2^31 elements on; none when all of it follows), then its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.buckets import ALIGNMENT_BYTES, Bucket, Entry
from verl_ray.weight_sync.fingerprint import BITS

ALL = -1


@dataclass(frozen=True)
class Packed:
    """A bucket as it travels, on the host; `changed` counts the elements that differ from the last one sent."""

    header: torch.Tensor
    body: torch.Tensor
    changed: int


@dataclass
class _Kept:
    number: int
    flat: torch.Tensor


@dataclass
class Changes:
    """The sending end: what was sent last."""

    _kept: dict[int, _Kept] = field(default_factory=dict)

    def pack(self, bucket: Bucket, flat: torch.Tensor, *, whole: bool) -> Packed:
        """`flat`: the bytes of the bucket. `whole`: as for a receiver that holds nothing."""
        flat = flat.cpu()
        kept = self._kept.get(bucket.index)
        header = torch.full((2 + len(bucket.entries),), ALL, dtype=torch.int64)
        header[0], header[1] = (0 if whole or kept is None else kept.number), 1 if kept is None else kept.number + 1
        found: dict[int, torch.Tensor] = {}
        changed = 0
        for place, entry in enumerate(bucket.entries):
            if whole or kept is None:
                changed += entry.parameter.numel
                continue
            where = (_bits(flat, entry) != _bits(kept.flat, entry)).nonzero()[:, 0]
            changed += len(where)
            if len(where) * (_index(entry).itemsize + entry.dtype.itemsize) < _bits(flat, entry).nbytes:
                header[2 + place] = len(where)
                found[place] = where
        body = torch.empty(body_bytes(bucket, header), dtype=torch.uint8)
        for place, entry, indices, values in _sections(bucket, header, body):
            if place in found:
                indices.copy_(found[place])
                torch.index_select(_bits(flat, entry), 0, found[place], out=values)
            else:
                values.copy_(_bits(flat, entry))
        if kept is None:
            self._kept[bucket.index] = _Kept(1, flat.clone())
        else:
            kept.flat.copy_(flat)
            kept.number += 1
        return Packed(header, body, changed)


@dataclass
class Held:
    """The receiving end: what came last."""

    _held: dict[int, _Kept] = field(default_factory=dict)

    def unpack(self, bucket: Bucket, header: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """The bytes of the bucket, uint8 [nbytes]; this end's own copy, which the next ones change.

        Raises:
            WeightSyncError: these are changes to a bucket that this end does not hold.
        """
        base, number = header[:2].tolist()
        held = self._held.setdefault(bucket.index, _Kept(0, torch.zeros(bucket.nbytes, dtype=torch.uint8)))
        if base not in (0, held.number):
            names = [entry.parameter.name for entry in bucket.entries]
            raise WeightSyncError(
                f"bucket {bucket.index} brings changes to its number {base}, this end holds number {held.number}; "
                f"all of {names} must be sent"
            )
        held.number = 0  # until all of it is there
        for _, entry, indices, values in _sections(bucket, header, body.cpu()):
            bits = _bits(held.flat, entry)
            if len(values) == len(bits):
                bits.copy_(values)
            else:
                bits.index_copy_(0, indices.long(), values)
        held.number = number
        return held.flat


def body_bytes(bucket: Bucket, header: torch.Tensor) -> int:
    """Of the body that follows this header."""
    counts = header[2:].tolist()
    return sum(sum(map(_aligned, _sizes(entry, count))) for entry, count in zip(bucket.entries, counts, strict=True))


def _sections(
    bucket: Bucket, header: torch.Tensor, body: torch.Tensor
) -> Iterator[tuple[int, Entry, torch.Tensor, torch.Tensor]]:
    """Place, entry, and views of the body: indices and values of each parameter."""
    at = 0
    for place, (entry, count) in enumerate(zip(bucket.entries, header[2:].tolist(), strict=True)):
        views = []
        for nbytes, dtype in zip(_sizes(entry, count), (_index(entry), BITS[entry.dtype.itemsize]), strict=True):
            views.append(body[at : at + nbytes].view(dtype))
            at += _aligned(nbytes)
        yield place, entry, views[0], views[1]


def _sizes(entry: Entry, count: int) -> tuple[int, int]:
    """Bytes of the indices and of the values."""
    if count == ALL:
        return 0, entry.parameter.numel * entry.dtype.itemsize
    return count * _index(entry).itemsize, count * entry.dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _index(entry: Entry) -> torch.dtype:
    return torch.int32 if entry.parameter.numel < 2**31 else torch.int64


def _bits(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The elements of a parameter as integers, flat."""
    nbytes = entry.parameter.numel * entry.dtype.itemsize
    return flat[entry.offset : entry.offset + nbytes].view(BITS[entry.dtype.itemsize])
