"""The wire between processes of one node: buckets in files of /dev/shm that every process maps.

Invariant: the bytes are written once, by the ranks that own them, and read in place; nothing is pickled, gathered or
copied. Keeping writers and readers from lapping each other is the caller's part.
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
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.shared_files import FOLDER, prefix, remove_stale
from verl_ray.weight_sync.slots import Slots
from verl_ray.weight_sync.transport import Address, Route, Seat, Sent, Shards


@dataclass(frozen=True)
class SharedMemoryAddress:
    """Where the files are: all that a process of the same node needs in order to open them."""

    paths: tuple[str, ...]
    slot_bytes: int

    ends_meet: ClassVar[bool] = False

    def open(self, seat: Seat) -> Slots:
        return map_slots(self)


class SharedMemorySender:
    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._route = route
        self._own: SharedMemoryAddress | None = None
        self._slots = Slots([])
        if rank == 0:
            self._own = create("sync", route.slot_bytes)

    def offer(self) -> SharedMemoryAddress:
        return self._own or SharedMemoryAddress((), 0)

    def connect(self, address: Address) -> None:
        assert isinstance(address, SharedMemoryAddress)
        self._slots = map_slots(address)

    def leave(self) -> None:
        """Nobody meets here."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> Sent:
        return Sent(self._slots.fill(bucket, shards), bucket.nbytes if self._own else 0)

    def finish(self) -> None:
        """Nothing to free: the files stay for the next sync."""

    def close(self) -> None:
        self._slots.close()
        if self._own is not None:
            remove(self._own)


def create(session: str, slot_bytes: int) -> SharedMemoryAddress:
    """Make the files, owned by this process, with room for `slot_bytes` each.

    First removes what owners that no longer live have left behind. Files of a live owner go when it calls `remove`.

    Raises:
        WeightSyncError: /dev/shm has not enough room.
    """
    remove_stale()
    slot_bytes = max(slot_bytes, 1)
    name = f"{prefix('weights')}{session}-{secrets.token_hex(4)}"
    address = SharedMemoryAddress(tuple(str(FOLDER / f"{name}-{i}") for i in range(SLOTS)), slot_bytes)
    for path in address.paths:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, slot_bytes)
        except OSError as error:
            remove(address)
            room = os.statvfs(FOLDER)
            raise WeightSyncError(
                f"weight sync needs {SLOTS} x {slot_bytes / 2**20:.0f} MiB in {FOLDER}, found "
                f"{room.f_bavail * room.f_frsize / 2**20:.0f} of {room.f_blocks * room.f_frsize / 2**20:.0f} MiB free "
                f"({error.strerror}). Enlarge {FOLDER} (in a container: --shm-size), or lower rollout.sync.bucket_mib"
            ) from error
        finally:
            os.close(descriptor)
    return address


def map_slots(address: SharedMemoryAddress) -> Slots:
    """Any number of processes may; see the module for who may write when."""
    return Slots([_map(path, address.slot_bytes) for path in address.paths])


def remove(address: SharedMemoryAddress) -> None:
    """Take the files away; processes that have opened them keep their maps until they close them."""
    for path in address.paths:
        Path(path).unlink(missing_ok=True)


def _map(path: str, nbytes: int) -> torch.Tensor:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"{path} is not on this node: shared memory joins processes of one node only (or its owner is gone). Use "
            f"rollout.sync.transport=broadcast"
        ) from error
    try:
        # The tensor keeps the map alive, and the map goes with the last view of it.
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
