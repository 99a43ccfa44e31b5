"""The state of an engine on disk, each rank its shards, through torch's distributed checkpoint.

Invariant: what any number of ranks of any backend wrote, any other number of ranks of any backend reads, value for
value; only random streams belong to a rank and a type of device (torch's generators differ), and a rank that the
checkpoint does not know keeps the stream it was seeded with. Every rank calls these, with a state of its engine. Saving
may go on behind the training: what is written then is a copy of the state as it was. Deliberately not here: whether a
checkpoint is whole (`store.py`).
"""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from verl_ray.checkpoint.slices import Slices
from verl_ray.errors import CheckpointError
from verl_ray.models.weights import is_first_copy, own_box
from verl_ray.profiling.progress import advance

RANK_KEY = "rng_"
"""Keys of a state that begin so belong to one rank."""


def random_key(rank: int, device: str, name: str = "") -> str:
    """The key of a random stream of a rank, whose generator is of this type of device; `name`: where there are more."""
    return f"{RANK_KEY}{rank}_{device}" + (f"_{name}" if name else "")


def save(state: dict[str, Any], path: str) -> None:
    """Write this rank's shards into directory `path`, and to the disk. Raises CheckpointError if that fails."""
    _save(state, path, None)


def _save(state: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
    with _readable_errors(f"{path} cannot be written; the directory above it must exist on every node (run.dir)"):
        # torch says of a full disk only that its archive is not as long as it should be
        free = shutil.disk_usage(Path(path).parent).free / 2**30
    with _readable_errors(f"{path} cannot be written ({free:.1f} GiB are free there)"):
        writer, alone = FileSystemWriter(path), not dist.is_initialized()
        state_dict_saver.save(state, storage_writer=writer, planner=_Written(), process_group=group, no_dist=alone)


class Saving:
    """A copy of a state on its way to the disk, in a thread of its own."""

    def __init__(self, state: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
        """`group`: over CPU tensors, of all ranks, for this alone: while the thread runs the others are in use."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._done = self._thread.submit(_save, copied(state), path, group)

    def wait(self) -> None:
        """Until it is on the disk. Raises CheckpointError if that failed."""
        try:
            self._done.result()
        finally:
            self._thread.shutdown()


def copied(state: Any) -> Any:
    """The same values on the host, in memory of their own; of a sharded tensor this rank's part."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    if isinstance(state, DTensor):
        local, box = state.to_local(), own_box(state)
        parts = [(box, local.detach().to("cpu", copy=True))] if local.numel() else []
        return Slices(state.shape, state.dtype, parts, saved=is_first_copy(state))
    if isinstance(state, Slices):
        kept = [(box, part.detach().to("cpu", copy=True)) for box, part in state.parts if state.saved]
        return Slices(state.shape, state.dtype, kept, saved=state.saved)
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def load(state: dict[str, Any], path: str) -> list[str]:
    """Fill `state`, in place, from what `save` wrote. Raises CheckpointError if `path` does not hold such a state.

    Where a rank's random stream was written by a generator of another device, its entry becomes None. Returns what the
    user has to know of such entries.
    """
    with _readable_errors(f"{path} cannot be read"):
        reader = FileSystemReader(path)
        known = reader.read_metadata().state_dict_metadata
        wanted = {key: value for key, value in state.items() if not key.startswith(RANK_KEY) or key in known}
        state_dict_loader.load(wanted, storage_reader=reader, planner=_Read(), no_dist=not dist.is_initialized())
        state.update(wanted)
    notes = []
    for key in sorted(state.keys() - wanted.keys()):
        if found := _of_another_device(key, known):
            state[key] = None
            notes.append(
                f"{path} has the random stream {found}, and this rank's is {key}: it is seeded anew, from the run's "
                f"seed, the step and the rank"
            )
    return notes


def _of_another_device(key: str, known: Iterable[str]) -> str | None:
    """The stream of the same rank and name that another type of device wrote."""
    _, rank, _, *name = key.split("_", 3)
    for other in known:
        parts = other.split("_", 3)
        if other.startswith(RANK_KEY) and parts[1] == rank and parts[3:] == name:
            return other
    return None


class _Written(DefaultSavePlanner):
    """Counts what is handed to the writer, tensor by tensor."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        advance(data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes, "bytes")
        return data


class _Read(DefaultLoadPlanner):
    """Counts what has been read, tensor by tensor."""

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        advance(tensor.nbytes, "bytes")


@contextlib.contextmanager
def _readable_errors(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank needs no group
            yield
    except CheckpointException as error:  # not an Exception; holds those of all ranks
        reasons = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{what}; {'; '.join(dict.fromkeys(reasons))}") from None
    except OSError as error:
        raise CheckpointError(f"{what}; {error}") from error
