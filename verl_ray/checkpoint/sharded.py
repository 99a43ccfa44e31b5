"""The state of an engine on disk, each rank its shards, through torch's distributed checkpoint.

Invariant: what any number of ranks of any backend wrote, any other number of ranks of any backend reads, value for
value; only random streams belong to a rank, and a rank that the checkpoint does not know keeps the stream it was
seeded with. Every rank calls both functions, with a state of its engine. Deliberately not here: whether a checkpoint
is whole (`store.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from verl_ray.errors import CheckpointError

RANK_KEY = "rng_"
"""Keys of a state that begin so belong to one rank."""


def save(state: dict[str, Any], path: str) -> None:
    """Write this rank's shards into directory `path`, and to the disk. Raises CheckpointError if that fails."""
    with _readable_errors(f"{path} cannot be written; the directory above it must exist on every node (run.dir)"):
        # torch says of a full disk only that its archive is not as long as it should be
        free = shutil.disk_usage(Path(path).parent).free / 2**30
    with _readable_errors(f"{path} cannot be written ({free:.1f} GiB are free there)"):
        state_dict_saver.save(state, storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())


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
