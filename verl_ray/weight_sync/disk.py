"""The slow sure wire: buckets as safetensors files in a folder that all nodes see.

Invariant: a file exists only whole and flushed to the disk, and at most `SLOTS` of them at once; none is left when the
sync is over. Deliberately not a checkpoint.
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
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.delta import Changes, Held
from verl_ray.weight_sync.slots import GatheredSlots, parameters_in
from verl_ray.weight_sync.transport import Address, Route, Seat, Sent, Shards

_KEY = "rollout.sync.folder"
_POLL_S = 0.02  # a shared file system may show a file a moment after it was made
_HEADER, _BODY = "header", "body"


@dataclass(frozen=True)
class DiskAddress:
    folder: str
    """Of this wire alone."""

    ends_meet: ClassVar[bool] = True

    def open(self, seat: Seat) -> DiskReceiver:
        return DiskReceiver(Path(self.folder), seat)


class DiskSender:
    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._slots = GatheredSlots([torch.empty(route.slot_bytes, dtype=torch.uint8)])
        self._changes = Changes() if route.delta else None
        self._folder = Path(route.folder, f"wire-{secrets.token_hex(4)}") if rank == 0 else None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True)
            except OSError as error:
                raise WeightSyncError(f"{_KEY}: {self._folder} cannot be made: {error}") from error

    def offer(self) -> DiskAddress:
        return DiskAddress(str(self._folder))

    def connect(self, address: Address) -> None:
        """Receivers look for the folder themselves."""

    def leave(self) -> None:
        """Nobody meets here."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> Sent:
        prints = self._slots.gather(bucket, shards)
        if self._folder is None:
            return Sent(prints)
        if bucket.index >= SLOTS:
            _path(self._folder, bucket.index - SLOTS).unlink(missing_ok=True)  # it has been read
        path, flat = _path(self._folder, bucket.index), self._slots.flat(bucket)
        if self._changes is None:
            # safetensors takes no tensors that share memory
            tensors, changed = {name: value.clone() for name, value in parameters_in(flat, bucket)}, 0
        else:
            packed = self._changes.pack(bucket, flat, whole=whole)
            tensors, changed = {_HEADER: packed.header, _BODY: packed.body}, packed.changed
        _write(path, tensors)
        return Sent(prints, path.stat().st_size, changed)

    def finish(self) -> None:
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._slots.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class DiskReceiver:
    def __init__(self, folder: Path, seat: Seat) -> None:
        self._folder, self._patience_s = folder, seat.route.patience_s
        self._held = Held() if seat.route.delta else None
        self._wait_for(folder, f"it is not a folder that this node sees. Set {_KEY} to one that all nodes share")

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        path = _path(self._folder, bucket.index)
        self._wait_for(path, f"bucket {bucket.index} did not come")
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{path} cannot be read: {error}") from error
        if self._held is not None:
            yield from parameters_in(self._held.unpack(bucket, found[_HEADER], found[_BODY]), bucket)
            return
        for entry in bucket.entries:
            name, value = entry.parameter.name, found.get(entry.parameter.name)
            if value is None or value.dtype != entry.dtype or tuple(value.shape) != entry.parameter.shape:
                has = "nothing" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
                raise WeightSyncError(f"{name}: {path.name} has {has}, expected {entry.dtype} {entry.parameter.shape}")
            yield name, value

    def release(self) -> None:
        """Nothing to wait for: a file that is gone stays mapped for who has opened it."""

    def close(self) -> None:
        """Nothing is open between reads."""

    def _wait_for(self, path: Path, otherwise: str) -> None:
        until = time.monotonic() + self._patience_s
        while not path.exists():
            if time.monotonic() > until:
                raise WeightSyncError(f"{path} was waited for {self._patience_s:.0f} s: {otherwise}")
            time.sleep(_POLL_S)


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.safetensors"


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The file is there when it is whole and on the disk."""
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial)
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{_KEY}: {path} cannot be written: {error}") from error
