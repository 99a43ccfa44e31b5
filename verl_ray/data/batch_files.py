"""Batches as files: every column of a stage, as NumPy's arrays in one file.

Invariant: a batch that is read equals the one that was written, bit by bit, and nothing
in a file is executed. Deliberately not here: which rows are written, and whether a file
is whole, which the manifest of a checkpoint says.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl_ray.data.batch import Array, Batch, Ragged

B = TypeVar("B", bound=Batch)

_OFFSETS = ".offsets"


def write_batch(path: Path, batch: Batch) -> None:
    """Write a batch to a new file; its columns without values are left out."""
    arrays: dict[str, Array] = {}
    for column in dataclasses.fields(batch):
        values = getattr(batch, column.name)
        if isinstance(values, Ragged):
            arrays[column.name] = values.values
            arrays[column.name + _OFFSETS] = values.offsets
        elif values is not None:
            arrays[column.name] = values
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its flag is no array


def read_batch(path: Path, stage: type[B]) -> B:
    """Read a batch of a stage that `write_batch` wrote."""
    columns: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            if name.endswith(_OFFSETS):
                continue
            values = arrays[name]
            if name + _OFFSETS in arrays.files:
                columns[name] = Ragged(values, arrays[name + _OFFSETS])
            else:
                columns[name] = values
    return stage(**columns)
