"""The wire over a shared directory: buckets as safetensors files that all nodes see.

It is slow, and it works everywhere.

Invariant: a file exists only if it is whole and flushed to the disk. At most `SLOTS` of
them exist at the same time, and none after the sync. Deliberately not a checkpoint.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl_ray.disk import sync
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.delta import DeltaDecoder, DeltaEncoder
from verl_ray.weight_sync.gathered_slots import GatheredSlots
from verl_ray.weight_sync.manifest import Bucket, Entry
from verl_ray.weight_sync.transport import (
    Address,
    SendResult,
    Shards,
    WireEndpoint,
    WireSpec,
    parameters_in,
)

_KEY = "rollout.sync.folder"
# A shared file system may show a file a moment after it was made.
_POLL_S = 0.02

# Names of the tensors in the file of a packed bucket.
_HEADER = "header"
_BODY = "body"


@dataclass(frozen=True)
class DiskAddress:
    """The directory of a wire."""

    folder: str
    """Directory that belongs to this wire alone."""

    waits_for_peers: ClassVar[bool] = True

    def open(self, endpoint: WireEndpoint) -> DiskReceiver:
        """Wait until this node sees the directory."""
        return DiskReceiver(Path(self.folder), endpoint)


class DiskSender:
    """The sending endpoint: rank 0 gathers buckets and writes them."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Make the directory, on rank 0.

        Raises:
            WeightSyncError: It cannot be made.
        """
        buffer = torch.empty(wire_spec.slot_bytes, dtype=torch.uint8)
        self._slots = GatheredSlots([buffer])
        self._encoder = DeltaEncoder() if wire_spec.delta else None

        self._folder: Path | None = None
        if rank == 0:
            self._folder = Path(wire_spec.folder, f"wire-{secrets.token_hex(4)}")
            try:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
                self._folder.mkdir(0o700)
            except OSError as error:
                raise WeightSyncError(
                    f"{_KEY}: {self._folder} cannot be made: {error}"
                ) from error

    def offer(self) -> DiskAddress:
        """Return the address of the directory; only rank 0's is of use."""
        return DiskAddress(str(self._folder))

    def connect(self, address: Address) -> None:
        """Do nothing: receivers look for the directory themselves."""

    def stop_waiting(self) -> None:
        """Do nothing: this wire has no rendezvous."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Gather the bucket on rank 0, which writes it."""
        fingerprints = self._slots.gather(bucket, shards)
        if self._folder is None:
            return SendResult(fingerprints)

        # The file that used this slot before has been read.
        if bucket.index >= SLOTS:
            old_path = _path(self._folder, bucket.index - SLOTS)
            old_path.unlink(missing_ok=True)

        flat = self._slots.flat(bucket)
        changed = 0
        if self._encoder is not None:
            packed = self._encoder.pack(bucket, flat, whole=whole)
            tensors = {_HEADER: packed.header, _BODY: packed.body}
            changed = packed.changed
        else:
            # safetensors takes no tensors that share memory.
            tensors = {
                name: value.clone() for name, value in parameters_in(flat, bucket)
            }

        path = _path(self._folder, bucket.index)
        _write(path, tensors)
        return SendResult(fingerprints, path.stat().st_size, changed)

    def finish(self) -> None:
        """Remove the files of the sync."""
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory."""
        self._slots.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class DiskReceiver:
    """The receiving endpoint, which reads the files."""

    def __init__(self, folder: Path, endpoint: WireEndpoint) -> None:
        """Wait until this node sees the directory.

        Raises:
            WeightSyncError: This node does not see it.
        """
        wire_spec = endpoint.wire_spec
        self._folder = folder
        self._patience_s = wire_spec.patience_s
        self._decoder = DeltaDecoder() if wire_spec.delta else None
        # A wrong setting is found here, before any bucket is sent.
        self._wait_for(
            folder,
            f"it is not a folder that this node sees. Set {_KEY} to one that all nodes"
            " share",
        )

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the file of the bucket, and yield the parameters in it."""
        path = _path(self._folder, bucket.index)
        self._wait_for(path, f"bucket {bucket.index} did not arrive")
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{path} cannot be read: {error}") from error

        if self._decoder is not None:
            flat = self._decoder.unpack(bucket, tensors[_HEADER], tensors[_BODY])
            yield from parameters_in(flat, bucket)
            return

        for entry in bucket.entries:
            name = entry.parameter.name
            yield name, _checked(tensors.get(name), entry, path)

    def release(self) -> None:
        """Do nothing: a file that is removed stays mapped where it is open."""

    def close(self) -> None:
        """Do nothing: no file is open between reads."""

    def _wait_for(self, path: Path, problem: str) -> None:
        """Wait until a path exists.

        Raises:
            WeightSyncError: It did not appear in time; `problem` says what that means.
        """
        deadline = time.monotonic() + self._patience_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"{path} was waited for {self._patience_s:.0f} s: {problem}"
                )
            time.sleep(_POLL_S)


def _checked(value: torch.Tensor | None, entry: Entry, path: Path) -> torch.Tensor:
    """Return a tensor of a file.

    Raises:
        WeightSyncError: It is missing, or it is not what the manifest says.
    """
    shape = entry.parameter.shape
    if value is None:
        content = "nothing"
    elif value.dtype == entry.dtype and tuple(value.shape) == shape:
        return value
    else:
        content = f"{value.dtype} of shape {tuple(value.shape)}"
    raise WeightSyncError(
        f"{entry.parameter.name}: {path.name} has {content}, expected {entry.dtype}"
        f" {shape}"
    )


def _path(folder: Path, index: int) -> Path:
    """Return the path of a bucket's file."""
    return folder / f"{index:05d}.safetensors"


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file. It appears under its name once it is whole and on the disk."""
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial)
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{_KEY}: {path} cannot be written: {error}") from error
