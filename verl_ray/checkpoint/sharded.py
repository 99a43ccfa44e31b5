"""The state of an engine on disk, to which each rank contributes its shards.

It is written through torch's distributed checkpoint.

Invariant: a state that any number of ranks of any backend wrote is read by any other
number of ranks of any backend, value for value. Only random streams belong to a rank
and a type of device, since torch's generators differ. A rank that the checkpoint does
not contain keeps the stream that it was seeded with.

Every rank calls these functions with the state of its engine. A save may continue while
the engine trains; it then writes a copy of the state as it was.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from verl_ray.checkpoint.hashed_files import HashingFileSystem
from verl_ray.checkpoint.manifest import FileRecord
from verl_ray.checkpoint.state_reader import StateReader, require_plain
from verl_ray.errors import CheckpointError
from verl_ray.models.names import Box
from verl_ray.models.weights import is_first_copy, own_box
from verl_ray.profiling.progress import advance, begin

RANK_KEY = "rng_"
"""Prefix of those keys of a state that belong to one rank."""


def random_key(rank: int, device: str, name: str = "") -> str:
    """Return the key of a random stream.

    Args:
        rank: Rank that the stream belongs to.
        device: Type of device of its generator.
        name: Name of the stream, if the rank has several.
    """
    key = f"{RANK_KEY}{rank}_{device}"
    if name:
        key += f"_{name}"
    return key


# ------------------------------------------------------------------------------ writing


def save(state: dict[str, Any], path: str) -> dict[str, FileRecord]:
    """Write this rank's shards into a directory, and wait until they are on the disk.

    Returns:
        The files that this rank has written, by their names in the directory.

    Raises:
        CheckpointError: The shards cannot be written.
    """
    return _save(state, path, None)


def _save(
    state: dict[str, Any], path: str, group: dist.ProcessGroup | None
) -> dict[str, FileRecord]:
    """Write this rank's shards, coordinated over a process group; None = the default.

    Returns:
        The files that this rank has written, by their names in the directory.

    Raises:
        CheckpointError: The shards cannot be written.
    """
    # If the disk is full, torch reports only that its archive is too short, so the
    # free space becomes part of the error.
    try:
        free_gib = shutil.disk_usage(Path(path).parent).free / 2**30
    except OSError as error:
        alone = CheckpointError(
            f"{path} cannot be written; the directory above it must exist on every node"
            f" (run.dir); {error}"
        )
        # The other ranks wait for this one in what they do together.
        alone.spares_worker = False
        raise alone from error

    with _readable_errors(
        f"{path} cannot be written ({free_gib:.1f} GiB are free there)"
    ):
        writer = FileSystemWriter(path)
        files = HashingFileSystem()
        writer.fs = files
        state_dict_saver.save(
            state,
            storage_writer=writer,
            planner=_CountingSavePlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
        return files.records


class BackgroundSave:
    """A copy of a state that a thread of its own writes to the disk."""

    def __init__(
        self, state: dict[str, Any], path: str, group: dist.ProcessGroup | None
    ) -> None:
        """Copy the state and begin to write it.

        Args:
            state: State of this rank's engine.
            path: Directory to write to.
            group: Process group over CPU tensors of all ranks. Only this thread uses
                it, since the engine uses the others meanwhile.
        """
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._done = self._thread.submit(_save, copy_to_host(state), path, group)

    def wait(self) -> dict[str, FileRecord]:
        """Wait until the state is on the disk.

        Returns:
            The files that this rank has written, by their names in the directory.

        Raises:
            CheckpointError: The state could not be written.
        """
        try:
            return self._done.result()
        finally:
            self._thread.shutdown()


def copy_to_host(state: Any) -> Any:
    """Return the same values in new memory on the host.

    A sharded tensor becomes the slices that this rank holds of it.
    """
    if isinstance(state, dict):
        return {key: copy_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copy_to_host(value) for value in state)

    # These are tensors, too, so they come before the plain ones.
    if isinstance(state, DTensor):
        return _slices_of(state)
    if isinstance(state, Slices):
        copies = []
        if state.saved:
            copies = [(box, _host_copy(part)) for box, part in state.parts]
        return Slices(state.shape, state.dtype, copies, saved=state.saved)

    if isinstance(state, Tensor):
        return _host_copy(state)
    return state


def _slices_of(tensor: DTensor) -> Slices:
    """Return a copy of this rank's part of a sharded tensor, on the host."""
    local = tensor.to_local()
    box = own_box(tensor)
    parts = []
    if local.numel():
        parts = [(box, _host_copy(local))]
    # Ranks may hold the same part; the first of them writes it.
    return Slices(tensor.shape, tensor.dtype, parts, saved=is_first_copy(tensor))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


# ------------------------------------------------------------------------------ reading


def load(state: dict[str, Any], path: str) -> list[str]:
    """Fill a state, in place, from what `save` wrote.

    The entry of a random stream becomes None if a generator of another type of device
    wrote it.

    Args:
        state: State of this rank's engine.
        path: Directory to read from.

    Returns:
        What the user has to know about such random streams.

    Raises:
        CheckpointError: The directory does not hold such a state.
    """
    with _readable_errors(f"{path} cannot be read"):
        reader = StateReader(path)
        saved_keys = reader.read_metadata().state_dict_metadata
        # All other keys must be there; torch raises if one is missing.
        requested = {
            key: value
            for key, value in state.items()
            if not key.startswith(RANK_KEY) or key in saved_keys
        }
        state_dict_loader.load(
            requested,
            storage_reader=reader,
            planner=_CountingLoadPlanner(),
            no_dist=not dist.is_initialized(),
        )
        # Values that are not tensors are replaced, not filled.
        state.update(requested)

    notes = []
    for key in sorted(state.keys() - requested.keys()):
        saved_key = _stream_of_another_device(key, saved_keys)
        if saved_key is not None:
            state[key] = None
            notes.append(
                f"{path} has the random stream {saved_key}, and this rank's is {key}:"
                " it is seeded anew, from the run's seed, the step and the rank"
            )
    return notes


def _stream_of_another_device(key: str, saved_keys: Iterable[str]) -> str | None:
    """Return the key of the same stream that another type of device wrote."""
    # See `random_key`: prefix, rank, device, and perhaps a name.
    fields = key.split("_", 3)
    rank = fields[1]
    name = fields[3:]

    for saved_key in saved_keys:
        if not saved_key.startswith(RANK_KEY):
            continue
        saved_fields = saved_key.split("_", 3)
        if saved_fields[1] == rank and saved_fields[3:] == name:
            return saved_key
    return None


# ------------------------------------------------------------------ progress and errors


class _CountingSavePlanner(DefaultSavePlanner):
    """Records progress for every tensor that is handed to the writer."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        # The size of what is no tensor is known only once it is written.
        self._total = sum(_tensor_bytes(item) for item in plan.items)
        # A thread with the identity of this one may have written another checkpoint.
        begin()
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            advance(data.nbytes, "bytes", self._total)
        else:
            self._total += data.getbuffer().nbytes
            advance(data.getbuffer().nbytes, "bytes", self._total)
        return data


def _tensor_bytes(item: WriteItem) -> int:
    """Return the bytes of a tensor, or of a slice of it, that this rank writes."""
    written = item.tensor_data
    if written is None:
        return 0
    return math.prod(written.chunk.sizes) * written.properties.dtype.itemsize


class _CountingLoadPlanner(DefaultLoadPlanner):
    """Records progress for every tensor that has been read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        assert self.metadata is not None, "torch has read it"
        stored = self.metadata.state_dict_metadata
        self._total = 0
        for item in plan.items:
            tensor = stored[item.storage_index.fqn]
            if isinstance(tensor, TensorStorageMetadata):
                itemsize = tensor.properties.dtype.itemsize
                self._total += math.prod(item.lengths) * itemsize
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        require_plain(value, read_item.dest_index.fqn)
        super().load_bytes(read_item, value)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        advance(tensor.nbytes, "bytes", self._total)


@contextlib.contextmanager
def _readable_errors(summary: str) -> Iterator[None]:
    """Raise CheckpointError in place of the errors of torch and of the file system."""
    try:
        with warnings.catch_warnings():
            # A single rank needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        # It is a BaseException, and contains the exceptions of all ranks.
        reasons = []
        for rank, (cause, _) in error.failures.items():
            reasons.append(f"rank {rank}: {type(cause).__name__}: {cause}")
        details = "; ".join(dict.fromkeys(reasons))
        raise CheckpointError(f"{summary}; {details}") from None
    except OSError as error:
        raise CheckpointError(f"{summary}; {error}") from error


# --------------------------------------------------------------------- tensors in parts


class Slices(Tensor):
    """A tensor without memory, of which a rank holds any number of boxes.

    torch's checkpoint requests its parts. Every saved part has its place in the whole
    tensor, so a tensor that is cut in any other way can be read from it.

    The methods with double underscores are the interface that torch expects.
    """

    parts: tuple[tuple[Box, Tensor], ...]
    saved: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[tuple[Box, Tensor]],
        *,
        saved: bool = True,
    ) -> Slices:
        """Create a tensor from its parts.

        Args:
            shape: Shape of the whole tensor.
            dtype: Type of its elements.
            parts: Disjoint boxes and their values, which have the box's shape.
            saved: Whether this rank writes the parts. If not, another rank holds the
                same parts. Every rank reads them.
        """
        tensor: Slices = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype
        )
        tensor.parts = tuple(parts)
        tensor.saved = saved
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func}: slices of a tensor are only saved and loaded")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        # Another rank writes the same parts.
        if not self.saved:
            return []

        items = []
        chunks = self.__create_chunk_list__()
        for chunk, (_box, part) in zip(chunks, self.parts, strict=True):
            properties = TensorProperties.create_from_tensor(part)
            data = TensorWriteData(chunk, properties, self.size())
            item = WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=data,
            )
            items.append(item)
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for box, _part in self.parts:
            sizes = torch.Size(side.stop - side.start for side in box)
            chunks.append(ChunkStorageMetadata(_offsets(box), sizes))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, part in self.parts:
            if _offsets(box) == index.offset:
                return part
        raise AssertionError(f"{index.fqn} has no part at {index.offset}")


def _offsets(box: Box) -> torch.Size:
    """Return the first index of a box in each dimension."""
    return torch.Size(side.start for side in box)
