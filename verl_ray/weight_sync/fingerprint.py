"""Fingerprints: numbers per parameter that show whether the right bits arrived.

Invariant: fingerprints are additive. Those of slices that cover a tensor exactly once
add up to the fingerprint of the whole tensor, wherever and along whichever dims it was
cut. Deliberately not a cryptographic hash, and no statement about what an engine does
with the weights after it received them.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from verl_ray.weight_sync.manifest import Slice

# The driver compares fingerprints, and does without torch.
if TYPE_CHECKING:
    import torch

_LANE_BYTES = 8
_BLOCK_BYTES = 1 << 20
_MODULUS = 1 << 64

_SHIFTS = np.arange(0, 64, 4, dtype=np.uint64)[:, None]
"""Bits by which a hash is shifted for each sum of a fingerprint, [sums, 1]."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a tensor, or of a slice of it."""

    totals: tuple[int, ...]
    """Sums of the bits mixed with their global index, modulo 2^64: 16 of them."""
    numel: int
    """Number of elements that it covers."""

    def __add__(self, other: Fingerprint) -> Fingerprint:
        pairs = zip(self.totals, other.totals, strict=True)
        totals = tuple((ours + theirs) % _MODULUS for ours, theirs in pairs)
        return Fingerprint(totals, self.numel + other.numel)


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of several parameters, and the time that they took."""

    by_name: dict[str, Fingerprint] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of the thread that computed them, and made copies along with them."""

    def __add__(self, other: Fingerprints) -> Fingerprints:
        # Most parameters have a single owner, whose fingerprint is that of the whole.
        sums = self.by_name | other.by_name
        for name in self.by_name.keys() & other.by_name.keys():
            sums[name] = self.by_name[name] + other.by_name[name]
        return Fingerprints(sums, self.seconds + other.seconds)


@dataclass(frozen=True)
class _Pending:
    """A slice whose sums are computed on the device and not read yet."""

    name: str
    numel: int
    """Number of its elements."""
    dtype_term: int
    """What its dtype adds to each total."""
    first: tuple[int, ...]
    """Global index of its first lane, per dim."""
    shape: tuple[int, ...]
    """Number of its lanes, per dim."""


class FingerprintAccumulator:
    """Computes the fingerprints of tensors of one device.

    The device is waited for once for all of them.

    The bits of a tensor are read as a box of 64-bit integers, the lanes, which are
    neighbours along the last dim. S_d are the sums of that box over every dim but d,
    and h is a hash of (d, global index along d). Then

        total_k = sum_d sum_i (h(d, i) >> 4 k) S_d(i)  mod 2^64,  k = 0, ..., 15.

    One pass per dim thus sees any changed value, and rows, columns or blocks that
    changed places. It does not see a change that leaves every one of those sums as it
    was. A slice that starts or ends inside a lane is filled up with zeros, which add
    nothing. A hash of the dtype is added once per element, so the same bits of another
    dtype differ.

    Why sixteen totals: the highest bit of a lane, the sign of every second float32,
    meets only the lowest bit of a factor, so one total misses half of the changes of
    signs. The hashes of the first dim are odd and those of the others even, so every
    lane has an odd factor in total_0, which sees whatever changes in one lane alone;
    the lowest bits of the other fifteen are independent of each other.

    Cost: two passes over a matrix, the second in the cache. On one core that is about
    what a copy takes (1.1 and 1.2 times as fast, for matrices of 7 and 41 MB in
    float32).
    """

    def __init__(self) -> None:
        """Start without tensors."""
        self._sums: list[torch.Tensor] = []
        self._pending: list[_Pending] = []
        self._seconds = 0.0

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        part: Slice | None = None,
        copy: torch.Tensor | None = None,
    ) -> None:
        """Add a slice of a parameter.

        Its memory may change once `take` has returned.

        Args:
            name: The parameter.
            tensor: The content.
            part: The slice that it is; None for all of the parameter.
            copy: Where to copy the content, of the same shape and dtype.
        """
        began = time.perf_counter()

        if tensor.numel():
            lanes, first = _lanes(tensor, part)
            # Both at once read the content once. Offloaded weights may go from the host
            # to a slot on a GPU, where NumPy does not write.
            target = None
            if copy is not None and copy.is_cpu and _is_host_matrix(lanes):
                target = _lanes_in_place(copy, part)
            if copy is not None and target is None:
                copy.copy_(tensor)
            self._sums += _sums(lanes, target)
            dtype_total = tensor.numel() * _dtype_hash(tensor.dtype) % _MODULUS
            shape = tuple(lanes.shape)
            pending = _Pending(name, tensor.numel(), dtype_total, first, shape)
        else:
            pending = _Pending(name, 0, 0, (), ())
        self._pending.append(pending)

        self._seconds += time.perf_counter() - began

    def take(self) -> Fingerprints:
        """Return the sum of each parameter's slices since the last call."""
        import torch

        began = time.perf_counter()

        # The sums of all slices, one after another, in one transfer.
        sums = np.zeros(0, np.uint64)
        if self._sums:
            sums = torch.cat(self._sums).cpu().numpy().view(np.uint64)

        # Arithmetic modulo 2^64. There is one term of the sum over d per dim.
        totals: dict[str, npt.NDArray[np.uint64]] = {}
        numels: Counter[str] = Counter()
        position = 0
        for pending in self._pending:
            total = totals.setdefault(pending.name, np.zeros(len(_SHIFTS), np.uint64))
            total += np.uint64(pending.dtype_term)
            dims = zip(pending.first, pending.shape, strict=True)
            for dim, (start, size) in enumerate(dims):
                dim_sums = sums[position : position + size]
                total += (_index_hash(dim, start, size) >> _SHIFTS) @ dim_sums
                position += size
            numels[pending.name] += pending.numel

        by_name = {
            name: Fingerprint(tuple(total.tolist()), numels[name])
            for name, total in totals.items()
        }
        seconds = self._seconds + time.perf_counter() - began
        self._sums = []
        self._pending = []
        self._seconds = 0.0
        return Fingerprints(by_name, seconds)


def _is_host_matrix(lanes: torch.Tensor) -> bool:
    """Whether `_matrix_sums` reads these lanes."""
    return lanes.device.type == "cpu" and lanes.dim() == 2


def _sums(lanes: torch.Tensor, copy: torch.Tensor | None) -> list[torch.Tensor]:
    """Return for each dim the sums over all other dims, int64 [size of the dim].

    Args:
        lanes: The lanes.
        copy: Where those of a matrix on the host are copied; None copies nothing.
    """
    # A matrix on the CPU is the common case, and has a faster way.
    if _is_host_matrix(lanes):
        return _matrix_sums(lanes, copy)

    sums: list[torch.Tensor] = []
    for dim in range(lanes.dim()):
        other_dims = [other for other in range(lanes.dim()) if other != dim]
        if other_dims:
            sums.append(lanes.sum(other_dims))
        else:
            sums.append(lanes)
    return sums


def _matrix_sums(lanes: torch.Tensor, copy: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the sums of the rows and of the columns of a matrix on the CPU.

    The matrix is read block by block, so that the second pass, and the copy, read what
    the first has loaded into the cache. It is read by one thread: while weights travel,
    sender, receiver and loader compute at the same time, and threads that must wait for
    each other take several times as long.
    """
    import torch

    matrix = lanes.numpy()
    target = None if copy is None else copy.numpy()
    height, width = matrix.shape
    row_sums = np.empty(height, np.int64)
    column_sums = np.zeros(width, np.int64)

    # At least one row, however wide.
    block_height = max(1, _BLOCK_BYTES // (_LANE_BYTES * width))
    for start in range(0, height, block_height):
        block = matrix[start : start + block_height]
        block.sum(1, out=row_sums[start : start + block_height])
        column_sums += block.sum(0)
        if target is not None:
            target[start : start + block_height] = block
    return [torch.from_numpy(row_sums), torch.from_numpy(column_sums)]


def _lanes(
    tensor: torch.Tensor,
    part: Slice | None,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the bits as lanes, int64, and the global index of the first lane."""
    import torch

    shape = tensor.shape or (1,)
    # Flattened in between, since the strides of dims of size 1 may be anything.
    bits = tensor.detach().contiguous().view(-1).view(shape)

    start = (0,) * bits.dim()
    if part is not None and part.start:
        start = part.start

    per_lane = _LANE_BYTES // bits.element_size()
    bits = bits.view(integer_dtype(bits.element_size()))

    # Zeros fill up the first and the last lane of every row.
    padding_before = start[-1] % per_lane
    padding_after = -(padding_before + bits.shape[-1]) % per_lane
    if padding_before or padding_after:
        bits = torch.nn.functional.pad(bits, (padding_before, padding_after))
    elif bits.storage_offset() % per_lane:
        # Lanes must begin where the memory of the storage has them.
        bits = bits.clone()
    return bits.view(torch.int64), (*start[:-1], start[-1] // per_lane)


def _lanes_in_place(tensor: torch.Tensor, part: Slice | None) -> torch.Tensor | None:
    """Return a tensor's memory as lanes; None unless it consists of whole ones."""
    if not tensor.is_contiguous():
        return None
    lanes, _ = _lanes(tensor, part)
    return lanes if lanes.data_ptr() == tensor.data_ptr() else None


@functools.cache
def integer_dtype(nbytes: int) -> torch.dtype:
    """Return the integer dtype whose elements have 1, 2, 4 or 8 bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[nbytes]


@functools.cache
def _dtype_hash(dtype: torch.dtype) -> int:
    """Return a hash of a dtype, 64 bits."""
    digest = hashlib.blake2b(str(dtype).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@functools.lru_cache(maxsize=256)
def _index_hash(dim: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Return hashes of (dim, index) for `count` indices from `first`, uint64 [count].

    The hash is the finaliser of splitmix64 (Steele et al., OOPSLA 2014), with a lowest
    bit of 1 in dim 0 and of 0 in the others.
    """
    seed = np.uint64((dim + 1) * 0x9E3779B97F4A7C15 % _MODULUS)
    # The arithmetic is modulo 2^64 on purpose.
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint64) + seed
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    lowest_bit = np.uint64(1)
    return x | lowest_bit if dim == 0 else x & ~lowest_bit
