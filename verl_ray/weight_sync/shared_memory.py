"""The wire between processes of one node: files in /dev/shm that every process maps.

Invariant: bytes are written once, by the ranks that own them, and are read in place.
Nothing is pickled, gathered or copied. Deliberately not here: keeping writers and
readers from overtaking each other, which is the caller's part.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.ownership import SHARED_FOLDER, prefix, remove_stale
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.manifest import Bucket
from verl_ray.weight_sync.transport import (
    Address,
    SendResult,
    Shards,
    Slots,
    WireEndpoint,
    WireSpec,
)


@dataclass(frozen=True)
class SharedMemoryAddress:
    """The files of a wire: all that a process of the same node needs to open them."""

    paths: tuple[str, ...]
    slot_bytes: int

    waits_for_peers: ClassVar[bool] = False

    def open(self, endpoint: WireEndpoint) -> Slots:
        """Map the files."""
        return map_slots(self)


class SharedMemorySender:
    """The sending endpoint: rank 0 owns the files, every rank writes into them."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Make the files, on rank 0."""
        self._slots = Slots([])
        self._own_address: SharedMemoryAddress | None = None
        if rank == 0:
            self._own_address = create("sync", wire_spec.slot_bytes)

    def offer(self) -> SharedMemoryAddress:
        """Return the address of the files; an empty one on other ranks than 0."""
        return self._own_address or SharedMemoryAddress((), 0)

    def connect(self, address: Address) -> None:
        """Map the files of rank 0."""
        assert isinstance(address, SharedMemoryAddress)
        self._slots = map_slots(address)

    def stop_waiting(self) -> None:
        """Do nothing: this wire has no rendezvous."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Write this rank's slices in place."""
        fingerprints = self._slots.fill(bucket, shards)
        # The bucket is counted once, by the rank that owns the files.
        nbytes = 0
        if self._own_address is not None:
            nbytes = bucket.nbytes
        return SendResult(fingerprints, nbytes)

    def finish(self) -> None:
        """Do nothing: the files stay for the next sync."""

    def close(self) -> None:
        """Unmap the files; remove them, on rank 0."""
        self._slots.close()
        if self._own_address is not None:
            remove(self._own_address)


def create(session: str, slot_bytes: int) -> SharedMemoryAddress:
    """Make files of `slot_bytes` bytes each, owned by this process.

    Files of owners that have exited are removed first. A live owner removes its files
    with `remove`.

    Args:
        session: A word that is part of the files' names.
        slot_bytes: Size of each file.

    Raises:
        WeightSyncError: /dev/shm has not enough free memory.
    """
    # Memory that a killed run left behind may be all that is missing.
    remove_stale()
    slot_bytes = max(slot_bytes, 1)

    name = f"{prefix('weights')}{session}-{secrets.token_hex(4)}"
    paths = tuple(str(SHARED_FOLDER / f"{name}-{i}") for i in range(SLOTS))
    address = SharedMemoryAddress(paths, slot_bytes)

    for path in address.paths:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # The memory is reserved now: without it, a write into the map would be
            # killed by SIGBUS later.
            os.posix_fallocate(descriptor, 0, slot_bytes)
        except OSError as error:
            remove(address)
            raise _no_memory(slot_bytes, error) from error
        finally:
            os.close(descriptor)
    return address


def _no_memory(slot_bytes: int, error: OSError) -> WeightSyncError:
    """Return the error for a /dev/shm that is too small."""
    usage = os.statvfs(SHARED_FOLDER)
    free_mib = usage.f_bavail * usage.f_frsize / 2**20
    total_mib = usage.f_blocks * usage.f_frsize / 2**20
    return WeightSyncError(
        f"weight sync needs {SLOTS} x {slot_bytes / 2**20:.0f} MiB in {SHARED_FOLDER},"
        f" found {free_mib:.0f} of {total_mib:.0f} MiB free"
        f" ({error.strerror}). Enlarge {SHARED_FOLDER} (in a container: --shm-size),"
        " or lower rollout.sync.bucket_mib"
    )


def map_slots(address: SharedMemoryAddress) -> Slots:
    """Map the files of a wire. Any number of processes may do so.

    See the module for who may write when.
    """
    return Slots([_map(path, address.slot_bytes) for path in address.paths])


def remove(address: SharedMemoryAddress) -> None:
    """Remove the files. Processes that have mapped them keep their maps."""
    for path in address.paths:
        Path(path).unlink(missing_ok=True)


def _map(path: str, nbytes: int) -> torch.Tensor:
    """Return a file's bytes, uint8 [nbytes], shared with all processes that map it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"{path} is not on this node: shared memory joins processes of one node"
            " only (or its owner has exited). Use rollout.sync.transport=broadcast"
        ) from error

    try:
        # The tensor keeps the map alive; the map is closed with its last view.
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
