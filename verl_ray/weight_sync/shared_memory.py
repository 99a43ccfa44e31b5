"""The wire between processes of one node: buckets in files of /dev/shm that every process maps.

Invariant: the bytes are written once, by the ranks that own them, and read in place; nothing is pickled. Each of the
`slots` files holds one bucket at a time (bucket i goes to slot i modulo slots), so a sender may fill the next bucket
while a receiver reads this one; keeping them from lapping each other is the caller's part.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.buckets import Bucket, Entry
from verl_ray.weight_sync.fingerprint import EMPTY, Fingerprint, fingerprint
from verl_ray.weight_sync.manifest import Slice

FOLDER = Path("/dev/shm")
_PREFIX = "verl_ray-weights"
_NAME = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-.+")


@dataclass(frozen=True)
class SharedMemoryAddress:
    """Where the files are: all that a process of the same node needs in order to open them."""

    paths: tuple[str, ...]
    slot_bytes: int

    def open(self) -> SharedMemoryTransport:
        return SharedMemoryTransport(self)


def create(session: str, slot_bytes: int, slots: int = 2) -> SharedMemoryAddress:
    """Make the files, owned by this process, with room for `slot_bytes` each.

    First removes what owners that no longer live have left behind. Files of a live owner go when it calls `remove`.

    Raises:
        WeightSyncError: /dev/shm has not enough room.
    """
    _remove_stale()
    slot_bytes = max(slot_bytes, 1)
    # Never the name of an earlier file: receivers keep what they have opened by its address.
    name = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{session}-{secrets.token_hex(4)}"
    address = SharedMemoryAddress(tuple(str(FOLDER / f"{name}-{i}") for i in range(slots)), slot_bytes)
    for path in address.paths:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, slot_bytes)
        except OSError as error:
            remove(address)
            room = os.statvfs(FOLDER)
            raise WeightSyncError(
                f"weight sync needs {slots} x {slot_bytes / 2**20:.0f} MiB in {FOLDER}, found "
                f"{room.f_bavail * room.f_frsize / 2**20:.0f} of {room.f_blocks * room.f_frsize / 2**20:.0f} MiB free "
                f"({error.strerror}). Enlarge {FOLDER} (in a container: --shm-size), or use smaller buckets"
            ) from error
        finally:
            os.close(descriptor)
    return address


def remove(address: SharedMemoryAddress) -> None:
    """Take the files away; processes that have opened them keep their maps until they close them."""
    for path in address.paths:
        Path(path).unlink(missing_ok=True)


class SharedMemoryTransport:
    """The opened files. Any number of processes may hold one; see the module for who may write when."""

    def __init__(self, address: SharedMemoryAddress) -> None:
        self._slots = [_map(path, address.slot_bytes) for path in address.paths]
        self._slot_bytes = address.slot_bytes

    def write(self, bucket: Bucket, shards: Iterable[tuple[Slice, torch.Tensor]]) -> dict[str, Fingerprint]:
        """Put this rank's slices of the bucket's parameters in place, cast to the manifest's dtypes.

        Returns:
            By parameter name, the fingerprint of what this rank wrote, taken from the source and not from the file.

        Raises:
            WeightSyncError: a slice is not of this bucket, or lies outside its parameter.
        """
        targets = {entry.parameter.name: (entry, self._view(bucket, entry)) for entry in bucket.entries}
        written: dict[str, Fingerprint] = {}
        for part, tensor in shards:
            if part.name not in targets:
                raise WeightSyncError(f"{part.name} was sent with bucket {bucket.index}, which does not hold it")
            entry, target = targets[part.name]
            stops = [start + size for start, size in zip(part.start, part.shape, strict=True)]
            fits = all(stop <= size for stop, size in zip(stops, entry.parameter.shape, strict=True))
            if tuple(tensor.shape) != part.shape or not fits:
                raise WeightSyncError(
                    f"{part.name}: a tensor of shape {tuple(tensor.shape)} was sent as the slice {part.shape} "
                    f"at {part.start} of {entry.parameter.shape}"
                )
            source = tensor.detach().to(entry.dtype)
            box = tuple(slice(start, stop) for start, stop in zip(part.start, stops, strict=True))
            target[box].copy_(source)
            written[part.name] = written.get(part.name, EMPTY) + fingerprint(source, part)
        return written

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The bucket's parameters, whole, as views of the file: valid until the slot is written again."""
        for entry in bucket.entries:
            yield entry.parameter.name, self._view(bucket, entry)

    def close(self) -> None:
        """Let go of the maps; views that are still held keep theirs."""
        self._slots.clear()

    def _view(self, bucket: Bucket, entry: Entry) -> torch.Tensor:
        if bucket.nbytes > self._slot_bytes:
            raise WeightSyncError(f"bucket {bucket.index} has {bucket.nbytes} bytes, a slot has {self._slot_bytes}")
        nbytes = entry.parameter.numel * entry.dtype.itemsize
        slot = self._slots[bucket.index % len(self._slots)]
        return slot[entry.offset : entry.offset + nbytes].view(entry.dtype).view(entry.parameter.shape)


def _map(path: str, nbytes: int) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        # The tensor keeps the map alive, and the map goes with the last view of it.
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _remove_stale() -> None:
    """An owner is the same process only if it also started at the same time: process ids are used again."""
    for path in FOLDER.glob(f"{_PREFIX}-*"):
        match = _NAME.fullmatch(path.name)
        if match and _start_time(int(match["pid"])) != int(match["started"]):
            with contextlib.suppress(OSError):  # of another user, or gone by now
                path.unlink()


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; -1 when there is none of that id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
