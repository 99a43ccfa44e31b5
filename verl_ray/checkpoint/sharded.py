"""The state of an engine on disk, each rank its shards, through torch's distributed checkpoint.

Invariant: what any number of ranks of any backend wrote, any other number of ranks of any backend reads, value for
value; only random streams belong to a rank, and a rank that the checkpoint does not know keeps the stream it was
seeded with. Every rank calls these, with a state of its engine. Saving may go on behind the training: what is written
then is a copy of the state as it was. Deliberately not here: whether a checkpoint is whole (`store.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from verl_ray.checkpoint.slices import Slices
from verl_ray.errors import CheckpointError
from verl_ray.models.weights import is_first_copy, own_box

RANK_KEY = "rng_"
"""Keys of a state that begin so belong to one rank."""


def save(state: dict[str, Any], path: str) -> None:
    """Write this rank's shards into directory `path`, and to the disk. Raises CheckpointError if that fails."""
    _save(state, path, None)


def _save(state: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
    with _readable_errors(f"{path} cannot be written; the directory above it must exist on every node (run.dir)"):
        # torch says of a full disk only that its archive is not as long as it should be
        free = shutil.disk_usage(Path(path).parent).free / 2**30
    with _readable_errors(f"{path} cannot be written ({free:.1f} GiB are free there)"):
        writer, alone = FileSystemWriter(path), not dist.is_initialized()
        state_dict_saver.save(state, storage_writer=writer, process_group=group, no_dist=alone)


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


def load(state: dict[str, Any], path: str) -> None:
    """Fill `state`, in place, from what `save` wrote. Raises CheckpointError if `path` does not hold such a state."""
    with _readable_errors(f"{path} cannot be read"):
        reader = FileSystemReader(path)
        known = reader.read_metadata().state_dict_metadata
        wanted = {key: value for key, value in state.items() if not key.startswith(RANK_KEY) or key in known}
        state_dict_loader.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
        state.update(wanted)


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
