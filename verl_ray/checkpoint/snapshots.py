"""The state of one rank's engine in the host's memory, where the process may die.

A snapshot is a file in /dev/shm: a keeper that no process has to be. The kernel keeps
it when a process is killed, and a rank that starts again on this node reads it back.

Invariant: the copy is made by a thread beside the next computations, and `wait` comes
before the state may change.

Only the same rank of the same layout reads a snapshot; a checkpoint (`sharded.py`) is
read by any.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_ray.checkpoint.sharded import Slices
from verl_ray.checkpoint.snapshot_files import (
    Memory,
    SnapshotFile,
    SnapshotFiles,
    SnapshotNames,
)
from verl_ray.checkpoint.snapshot_index import KeyPath, Places, decode, encode
from verl_ray.errors import CheckpointError

_ALIGNMENT = 64


class RankSnapshots:
    """The snapshots of one rank."""

    def __init__(self, place: str, names: SnapshotNames) -> None:
        """Find what an earlier process of this rank left at its place.

        Args:
            place: Beginning of the paths of this rank's files.
            names: Says which snapshots count.
        """
        self._files = SnapshotFiles(place, names)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._copy: Future[float] | None = None

    def follow(self, names: SnapshotNames) -> None:
        """Let others count: the run went back."""
        self.wait()
        self._files.follow(names)

    def steps(self) -> list[int]:
        """Return the steps of which there is a whole snapshot."""
        self.wait()
        return self._files.steps()

    def begin(self, step: int, state: dict[str, Any]) -> float:
        """Begin to copy a state, in place of the older snapshot.

        Args:
            step: The step that has led to the state.
            state: State of the engine, whose tensors stay as they are until `wait`.

        Returns:
            The seconds that the copy before took; 0 for the first one.

        Raises:
            CheckpointError: The copy before failed, since /dev/shm is too small.
        """
        before, self._copy = self._copy, None
        before_s = 0.0 if before is None else before.result()

        file = self._files.oldest()
        computed = None
        if torch.cuda.is_available():
            computed = torch.cuda.current_stream().record_event()
        self._copy = self._thread.submit(_write, file, step, state, computed)
        return before_s

    def wait(self) -> None:
        """Wait until the state may change. If the copy failed, `begin` says so."""
        if self._copy is not None:
            wait([self._copy])

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill a state, in place, from the snapshot of a step.

        Args:
            step: One of `steps`.
            state: State of the engine.
        """
        assert step in self.steps(), "a rank loads a snapshot that it has"
        _read(self._files.of(step), state)

    def close(self) -> None:
        """Remove the snapshots."""
        self._thread.shutdown(cancel_futures=True)
        self._files.remove()


def _write(
    file: SnapshotFile,
    step: int,
    state: dict[str, Any],
    computed: torch.cuda.Event | None,
) -> float:
    """Copy a state to the memory. Return the seconds that it took.

    Args:
        file: Where to; the snapshot in it counts no more.
        step: The step that has led to the state.
        state: The state.
        computed: Event on a device after which the state is there; None without a
            device.

    Raises:
        CheckpointError: There is no room.
    """
    entries: dict[KeyPath, Any] = {}
    tensors: list[tuple[int, Tensor]] = []
    end = 0
    for keys, value in _leaves(state):
        parts = _parts(value)
        if parts is None:
            entries[keys] = value
            continue
        offsets = []
        for part in parts:
            offsets.append(end)
            tensors.append((end, part))
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        entries[keys] = Places(tuple(offsets))

    memory = torch.from_numpy(file.reserve(end, _lock))
    if computed is not None:
        computed.synchronize()
    began_s = time.perf_counter()
    with _own_stream(computed):
        for offset, part in tensors:
            _copy(part.detach(), memory[offset : offset + part.nbytes])
    file.complete(step, encode(entries))
    return time.perf_counter() - began_s


def _read(file: SnapshotFile, state: dict[str, Any]) -> None:
    """Fill a state of the same rank, in place."""
    entries = decode(file.description())
    memory = torch.from_numpy(file.read())
    filled = set()
    for keys, value in list(_leaves(state)):
        if keys not in entries:
            raise CheckpointError(
                f"the snapshot of step {file.step} has no {'.'.join(map(str, keys))}"
            )
        filled.add(keys)
        entry = entries[keys]
        if not isinstance(entry, Places):
            _replace(state, keys, entry)
            continue
        parts = _parts(value)
        assert parts is not None and len(parts) == len(entry.offsets)
        for offset, part in zip(entry.offsets, parts, strict=True):
            source = memory[offset : offset + part.nbytes].view(part.dtype)
            part.detach().copy_(source.view(part.shape))
    if filled != entries.keys():
        raise CheckpointError(f"the snapshot of step {file.step} is of another model")


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to memory on the host, uint8 [bytes of the tensor]."""
    if source.is_cuda or not source.is_contiguous():
        target.view(source.dtype).view(source.shape).copy_(source)
        return
    # One thread copies here; torch would take those that compute.
    numbers = source.reshape(-1).view(torch.uint8).numpy()
    np.copyto(target.numpy(), numbers)


def _leaves(value: Any, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value in nested containers, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            yield from _leaves(inner, (*keys, key))
    else:
        yield keys, value


def _replace(state: dict[str, Any], keys: KeyPath, value: Any) -> None:
    """Replace a value in nested containers."""
    container: Any = state
    for key in keys[:-1]:
        container = container[key]
    container[keys[-1]] = value


def _parts(value: Any) -> list[Tensor] | None:
    """Return the memory of a tensor that this rank holds; None if it is no tensor."""
    # These are tensors, too, so they come before the plain ones.
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, Slices):
        return [part for _, part in value.parts]
    if isinstance(value, Tensor):
        return [value]
    return None


@contextlib.contextmanager
def _own_stream(computed: torch.cuda.Event | None) -> Iterator[None]:
    """Copy from a device beside its later computations, and wait for the copies."""
    if computed is None:
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _lock(memory: Memory) -> None:
    """Lock memory that a device copies to, which is then several times as fast.

    Copies to pageable memory are right, too, so a refusal is no failure.
    """
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
