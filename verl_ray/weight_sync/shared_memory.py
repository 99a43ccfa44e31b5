"""The wire between processes of one node: files in /dev/shm that every process maps.

Invariant: bytes are written once, by the ranks that own them, and are read in place.
Nothing is pickled, gathered or copied. A receiver reads a bucket once every sender has
announced it in the receiver's pipe, so it may be told to receive a bucket before that
is written. It stops waiting when a sender gives up or closes the wire, or when the
process of the first rank has exited.
Deliberately not here: that a slot is filled again only after it was read, which is the
caller's part.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from verl_ray.errors import WeightSyncError
from verl_ray.ownership import owner_of, prefix, remove_stale
from verl_ray.private_files import (
    SHARED_MEMORY,
    create_private,
    open_private,
    shared_folder,
)
from verl_ray.profiling.progress import waiting_for_others
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

_ANNOUNCEMENT = struct.Struct("=q")
"""What a sender writes into a pipe: the number of a bucket among all that it has sent
over this wire, from 0. Pipes hold thousands of them, and write each as a whole."""

_GIVEN_UP = -1
"""Instead of a number: the bucket that comes next will not be sent."""

_LOOK_MS = 200
"""Milliseconds of silence after which a receiver looks whether the sender exists."""


@dataclass(frozen=True)
class SharedMemoryAddress:
    """The files of a wire: all that a process of the same node needs to open them."""

    paths: tuple[str, ...]
    slot_bytes: int
    pipes: tuple[str, ...] = ()
    """A named pipe per receiver. Without pipes, a caller receives what was sent."""
    senders: int = 1
    """Number of ranks that announce each bucket."""

    waits_for_peers: ClassVar[bool] = True

    def open(self, endpoint: WireEndpoint) -> Slots:
        """Map the files."""
        if not self.pipes:
            return map_slots(self)
        return AnnouncedSlots(self, endpoint.receiver)


class AnnouncedSlots(Slots):
    """Slots of which a bucket is read once all senders have announced it."""

    def __init__(self, address: SharedMemoryAddress, receiver: int) -> None:
        """Map the files, and open the pipe of this receiver."""
        super().__init__(_maps(address))
        self._senders = address.senders
        self._path = Path(address.pipes[receiver])
        # The pipe is open for writing too: a read then never finds it closed.
        self._pipe: int | None = _open_pipe(self._path)

        self._num_received = 0
        self._announced: Counter[int] = Counter()
        self._is_given_up = False

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for a bucket, and yield its parameters as `Slots.receive` does.

        Raises:
            WeightSyncError: It will not be sent.
        """
        number = self._num_received
        self._num_received += 1
        if self._announced[number] < self._senders:
            with waiting_for_others():
                self._wait_for(number, bucket)
        del self._announced[number]
        return super().receive(bucket)

    def close(self) -> None:
        """Unmap the files, and close the pipe."""
        super().close()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _wait_for(self, number: int, bucket: Bucket) -> None:
        """Wait until all senders have announced a bucket.

        The wait has no limit of its own: who sends makes progress, or the driver finds
        that it does not.
        """
        assert self._pipe is not None, "the wire is open"
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while self._announced[number] < self._senders:
            if self._is_given_up:
                raise WeightSyncError(
                    f"bucket {bucket.index} will not arrive: the actor has given up"
                    " this weight sync"
                )
            if poll.poll(_LOOK_MS):
                self._read()
                continue

            owner = owner_of(self._path)
            if owner is not None and owner.has_ended:
                raise WeightSyncError(
                    f"bucket {bucket.index} will not arrive: the process of rank 0 of"
                    " the actor has exited"
                )

    def _read(self) -> None:
        """Read the announcements that have come."""
        assert self._pipe is not None, "the wire is open"
        content = os.read(self._pipe, 4096 * _ANNOUNCEMENT.size)
        for (number,) in _ANNOUNCEMENT.iter_unpack(content):
            # Buckets that were announced before are there all the same.
            self._is_given_up |= number == _GIVEN_UP
            self._announced[number] += 1


class SharedMemorySender:
    """The sending endpoint: rank 0 owns the files, every rank writes into them."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Make the files, on rank 0."""
        self._last_bucket = wire_spec.buckets[-1].index
        self._slots = Slots([])
        self._own_address: SharedMemoryAddress | None = None
        if rank == 0:
            self._own_address = create(
                "sync", wire_spec.slot_bytes, wire_spec.receivers
            )

        self._pipes: list[int] = []
        self._num_sent = 0
        self._is_complete = True
        """Whether no receiver waits for a bucket of a sync that has begun."""

    def offer(self) -> SharedMemoryAddress:
        """Return the address of the files; an empty one on other ranks than 0."""
        return self._own_address or SharedMemoryAddress((), 0)

    def connect(self, address: Address) -> None:
        """Map the files of rank 0."""
        assert isinstance(address, SharedMemoryAddress)
        self._slots = map_slots(address)
        self._pipes = [_open_pipe(Path(path)) for path in address.pipes]

    def stop_waiting(self) -> None:
        """Do nothing: this wire has no rendezvous."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Write this rank's slices in place, and announce them."""
        self._is_complete = False
        fingerprints = self._slots.fill(bucket, shards)
        self._announce(self._num_sent)
        self._num_sent += 1
        self._is_complete = bucket.index == self._last_bucket

        # The bucket is counted once, by the rank that owns the files.
        nbytes = 0
        if self._own_address is not None:
            nbytes = bucket.nbytes
        return SendResult(fingerprints, nbytes)

    def finish(self) -> None:
        """Let receivers that wait for further buckets give up; the files stay."""
        if not self._is_complete:
            self._announce(_GIVEN_UP)

    def close(self) -> None:
        """Unmap the files and close the pipes; remove all, on rank 0."""
        self.finish()
        self._slots.close()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        if self._own_address is not None:
            # Receivers keep their maps until they open another wire, which needs the
            # memory.
            _free(self._own_address)
            remove(self._own_address)

    def _announce(self, number: int) -> None:
        """Write a number, or `_GIVEN_UP`, into the pipe of every receiver.

        What was written to memory before is seen by whoever has read it.
        """
        for pipe in self._pipes:
            os.write(pipe, _ANNOUNCEMENT.pack(number))


def create(session: str, slot_bytes: int, receivers: int = 0) -> SharedMemoryAddress:
    """Make files of `slot_bytes` bytes each, owned by this process.

    Files of owners that have exited are removed first. A live owner removes its files
    with `remove`.

    Args:
        session: A word that is part of the files' names.
        slot_bytes: Size of each file.
        receivers: Number of receivers, of which each gets a pipe.

    Raises:
        WeightSyncError: /dev/shm has not enough free memory.
    """
    # Memory that a killed run left behind may be all that is missing.
    folder = shared_folder()
    remove_stale(folder)
    slot_bytes = max(slot_bytes, 1)

    name = f"{prefix('weights')}{session}-{secrets.token_hex(4)}"
    paths = tuple(str(folder / f"{name}-{i}") for i in range(SLOTS))
    pipes = tuple(str(folder / f"{name}-pipe{i}") for i in range(receivers))
    senders = dist.get_world_size() if dist.is_initialized() else 1
    address = SharedMemoryAddress(paths, slot_bytes, pipes, senders)

    for path in address.pipes:
        os.mkfifo(path, 0o600)
    for path in address.paths:
        descriptor = create_private(Path(path))
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
    usage = os.statvfs(SHARED_MEMORY)
    free_mib = usage.f_bavail * usage.f_frsize / 2**20
    total_mib = usage.f_blocks * usage.f_frsize / 2**20
    return WeightSyncError(
        f"weight sync needs {SLOTS} x {slot_bytes / 2**20:.0f} MiB in {SHARED_MEMORY},"
        f" found {free_mib:.0f} of {total_mib:.0f} MiB free"
        f" ({error.strerror}). Enlarge {SHARED_MEMORY} (in a container: --shm-size),"
        " or lower rollout.sync.bucket_mib"
    )


def map_slots(address: SharedMemoryAddress) -> Slots:
    """Map the files of a wire. Any number of processes may do so.

    See the module for who may write when.
    """
    return Slots(_maps(address))


def remove(address: SharedMemoryAddress) -> None:
    """Remove the files. Processes that have mapped them keep their maps."""
    for path in (*address.paths, *address.pipes):
        Path(path).unlink(missing_ok=True)


def _free(address: SharedMemoryAddress) -> None:
    """Free the memory of the files. Processes that have mapped them read zeros.

    Where the file system cannot do that, it is free once all have closed their maps.
    """
    for path in address.paths:
        with (
            contextlib.suppress(OSError),
            os.fdopen(open_private(Path(path), os.O_RDWR), "r+b") as file,
            mmap.mmap(file.fileno(), 0) as memory,
        ):
            memory.madvise(mmap.MADV_REMOVE)


def _open_pipe(path: Path) -> int:
    """Open a named pipe without waiting for its other end."""
    return open_private(path, os.O_RDWR)


def _maps(address: SharedMemoryAddress) -> list[torch.Tensor]:
    """Return the bytes of every file, uint8 [bytes] each."""
    return [_map(path, address.slot_bytes) for path in address.paths]


def _map(path: str, nbytes: int) -> torch.Tensor:
    """Return a file's bytes, uint8 [nbytes], shared with all processes that map it."""
    try:
        descriptor = open_private(Path(path), os.O_RDWR)
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
