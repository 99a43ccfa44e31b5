"""Files of a ledger: what happened to each ordinal of a run, as a folder of Parquet.

Invariant: a part is whole or is not there, and holds what a checkpoint of its step
knows and the checkpoint before it did not. What no checkpoint knows is in a part of
its own. So a run that goes on from a step finds the history of this step by leaving
out the later parts. Deliberately not here: which event may follow which (`ledger.py`),
and what a history shows (`controllers/commands/ledger.py`).
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.data.batch import Array
from verl_ray.disk import replace_file, sync
from verl_ray.errors import TrackingError

if TYPE_CHECKING:
    import pyarrow as pa

LEDGER = "ledger.parquet"
"""Folder of the parts, in the folder of a run."""

NONE = -1
"""Value of a column that an event does not have; null in the files."""

_NAME = re.compile(r"(?:step_(\d{8,})|unsaved)\.parquet")
_BEGINS_AT = b"begins_at"  # key of a part's metadata


class Event(enum.IntEnum):
    """Stages of an ordinal, in this order. Trained and rejected settle it."""

    DRAWN = 1
    FINISHED = 2
    TRAINED = 3
    REJECTED = 4
    REPLAYED = 5
    """Learned from once more, which changes nothing about the ordinal."""


_EVENT_NAMES = [event.name.lower() for event in Event]

ROW = np.dtype(
    [
        ("event", np.int8),
        ("ordinal", np.int64),
        ("step", np.int32),
        ("oldest_version", np.int64),
        ("newest_version", np.int64),
        ("restart", np.int16),
        ("reason", np.int32),
        ("time", np.float64),
    ]
)
"""An event of an ordinal.

`event` is an `Event`, `step` the training step (counted from 1) that learned,
`restart` the number of restarts before the event, `reason` the place of the reason in
a list of reasons, and `time` in seconds since 1970. A drawn ordinal has the version of
the policy at that time; a finished one has those of its tokens.
"""

_NUMBERS = [name for name in ROW.names or () if name not in ("event", "reason")]


@dataclass(frozen=True)
class Settled:
    """The ordinals that are trained or rejected at some point of a run.

    Attributes:
        frontier: All ordinals below it are settled, and it is not.
        holes: Ranges [first, end) of settled ordinals above the frontier.
    """

    frontier: int
    holes: Sequence[Sequence[int]] = ()

    def mask(self, size: int) -> Array:
        """Return whether each ordinal below `size` is settled, bool [size]."""
        mask = np.zeros(size, np.bool_)
        mask[: self.frontier] = True
        for first, end in self.holes:
            mask[first:end] = True
        return mask


@dataclass(frozen=True, eq=False)
class History:
    """All events of a ledger.

    Attributes:
        rows: The events in the order of their time, [events] of `ROW`.
        reasons: The reasons that the column `reason` numbers.
        begins_at: What was settled before the first event. A run that goes on from the
            checkpoint of another one has its events alone.
    """

    rows: Array
    reasons: list[str]
    begins_at: Settled

    def of(self, event: Event) -> Array:
        """Return the events of one kind."""
        rows: Array = self.rows[self.rows["event"] == event]
        return rows


def part_path(folder: Path, step: int | None) -> Path:
    """Return the path of a part.

    Args:
        folder: Folder of the ledger.
        step: Step of the checkpoint that knows its events; None for those that no
            checkpoint knows.
    """
    return folder / ("unsaved.parquet" if step is None else f"step_{step:08}.parquet")


def write_part(
    path: Path, rows: Array, reasons: Sequence[str], begins_at: Settled
) -> None:
    """Write a part, in place of an older one; it is on the disk when this returns.

    Args:
        path: Path of the part.
        rows: Events, [events] of `ROW`.
        reasons: The reasons that the column `reason` numbers.
        begins_at: What was settled before the first event of the process.

    Raises:
        TrackingError: The part cannot be written.
    """
    # Imported here, because most processes keep no ledger.
    import pyarrow as pa
    import pyarrow.parquet

    place = {"frontier": begins_at.frontier, "holes": begins_at.holes}
    table = _table(rows, reasons).replace_schema_metadata(
        {_BEGINS_AT: json.dumps(place)}
    )
    content = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, content)
    try:
        is_first = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
        if is_first:
            sync(path.parent.parent)
    except OSError as error:
        raise TrackingError(
            f"{path}: cannot be written ({error}); make room there, or choose another"
            " folder with run.dir"
        ) from error


def _table(rows: Array, reasons: Sequence[str]) -> pa.Table:
    """Return events as the columns of a file."""
    import pyarrow as pa

    columns = {}
    for name in ROW.names or ():
        values = np.ascontiguousarray(rows[name])
        if name == "event":
            codes = pa.array(values - 1)
            columns[name] = pa.DictionaryArray.from_arrays(codes, _EVENT_NAMES)
        elif name == "reason":
            codes = pa.array(values, mask=values == NONE)
            names = pa.array(reasons, pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(codes, names)
        else:
            columns[name] = pa.array(values, mask=values == NONE)
    return pa.table(columns)


def has_parts(folder: Path) -> bool:
    """Return whether a folder has any part of a ledger."""
    return bool(_parts(folder))


def read_parts(folder: Path) -> History:
    """Read the history of a run; the folder has at least one part.

    Raises:
        TrackingError: A part cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute

    tables = [_read_part(path) for path in _parts(folder)]
    table = pa.concat_tables(tables)

    rows = np.empty(len(table), ROW)
    for name in _NUMBERS:
        rows[name] = table[name].fill_null(NONE).to_numpy()

    names = pa.array(_EVENT_NAMES)
    rows["event"] = pyarrow.compute.index_in(table["event"], names).to_numpy() + 1
    reasons = table["reason"].combine_chunks().dictionary_encode()
    rows["reason"] = reasons.indices.fill_null(NONE).to_numpy()

    begins_at = json.loads(tables[0].schema.metadata[_BEGINS_AT])
    return History(rows, reasons.dictionary.to_pylist(), Settled(**begins_at))


def _read_part(path: Path) -> pa.Table:
    """Read one part, with its texts as such."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        texts = {"event": pa.string(), "reason": pa.string()}
        fields = [
            field.with_type(texts.get(field.name, field.type)) for field in table.schema
        ]
        return table.cast(pa.schema(fields, table.schema.metadata)).select(ROW.names)
    # Damaged pages are an OSError; a file with other columns is a KeyError.
    except (pa.ArrowException, OSError, KeyError) as error:
        cause = " ".join(str(error).split())
        raise TrackingError(
            f"{path}: cannot be read as a part of a ledger ({cause}); restore it, or"
            " move it away to see what the others hold"
        ) from None


def drop_later_parts(folder: Path, step: int) -> None:
    """Remove the parts of steps that a run makes again, and what no checkpoint knows.

    Args:
        folder: Folder of the ledger, which need not exist.
        step: Step that the run goes on from; 0 if it begins.

    Raises:
        TrackingError: A part cannot be removed.
    """
    # What a write left behind that was cut short is no part.
    remains = list(folder.glob("*.parquet.part"))
    for path in _parts(folder):
        name = _NAME.fullmatch(path.name)
        assert name is not None, "parts are found by their names"
        if name[1] is None or int(name[1]) > step:
            remains.append(path)

    try:
        for path in remains:
            path.unlink()
    except OSError as error:
        raise TrackingError(
            f"{folder}: a part of steps that are made again cannot be removed"
            f" ({error}); remove it, or choose another folder with run.dir"
        ) from error


def _parts(folder: Path) -> list[Path]:
    """Return the parts of a ledger in the order of their events."""
    paths = [path for path in folder.glob("*.parquet") if _NAME.fullmatch(path.name)]
    # Names of steps are equally long up to 10^8 steps. What is not saved comes last.
    return sorted(paths)
