"""The reader of a state that torch's distributed checkpoint wrote, and of nothing else.

Torch describes a state by a pickle, `.metadata`, and stores what is no tensor as
pickles. It would run whatever these files say.

Invariant: only what describes tensors, and plain values, is made from the files.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from verl_ray.errors import CheckpointError

_PARTS = (
    (metadata.__name__, "BytesStorageMetadata"),
    (metadata.__name__, "ChunkStorageMetadata"),
    (metadata.__name__, "Metadata"),
    (metadata.__name__, "MetadataIndex"),
    (metadata.__name__, "StorageMeta"),
    (metadata.__name__, "TensorProperties"),
    (metadata.__name__, "TensorStorageMetadata"),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"),
    (filesystem.__name__, "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
)
"""Module and name of what descriptions consist of, apart from torch's types of data."""


class StateReader(FileSystemReader):
    """A reader for torch's distributed checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the state.

        Raises:
            CheckpointError: The file describes something else.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                described: Metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError) as error:
                raise CheckpointError(f"{path} is no description: {error}") from error
        # As torch's own reader does.
        origin = getattr(described, "storage_meta", None) or StorageMeta()
        origin.load_id = self.load_id
        described.storage_meta = origin
        return described


class _Unpickler(pickle.Unpickler):
    """Reads a description, and refuses what is part of none."""

    def find_class(self, module: str, name: str) -> Any:
        is_part = (module, name) in _PARTS
        if module == "torch":
            is_part |= isinstance(getattr(torch, name, None), torch.dtype)
        if not is_part:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def require_plain(value: io.BytesIO, key: str) -> None:
    """Refuse the bytes of a value that are more than plain values and containers.

    Args:
        value: What torch would unpickle, which is at its beginning before and after.
        key: Key of the value, for the error.

    Raises:
        CheckpointError: They refer to something else.
    """
    try:
        torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{key} is no plain value, so it is not read") from error
    value.seek(0)
