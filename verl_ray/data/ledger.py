"""Ledger of a run: every ordinal is trained exactly once, or rejected.

An ordinal is the running number of a prompt in the run (`group_id`). It is drawn (given
to the engines), finished (all of its responses are generated and scored), then trained
or rejected, which settles it.

Invariant: an ordinal is settled once, whatever is drawn again after a restart. A
checkpoint holds the frontier, below which all ordinals are settled, and the holes, the
settled ones above it. The memory is that of the ordinals from the frontier on, and of
the events in the last part and since.

The history is a folder of Parquet files. A part is whole or is not there, and holds
what a checkpoint of its step knows and the checkpoint before it did not. What no
checkpoint knows is in a part of its own. So a run that goes on from a step finds the
history of this step by leaving out the later parts.
"""

from __future__ import annotations

import enum
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.columns.batch import Array, Int64
from verl_ray.disk import replace_file, sync
from verl_ray.errors import DataError, TrackingError

if TYPE_CHECKING:
    import pyarrow as pa

# ----------------------------------------------------------------- files of the history

LEDGER = "ledger.parquet"
"""Folder of the parts, in the folder of a run."""

NONE = -1
"""Value of a column that an event does not have; null in the files."""

NO_SPREAD = "all scores of the group are equal"
"""Why a group is rejected that another one replaces in its batch."""

_NAME = re.compile(r"(?:step_(\d{8,})|unsaved)\.parquet")
_AFTER = "events_after_"
"""Begins the name of a file in a snapshot, and the last step with a part ends it."""

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
        frontiers: The frontier at which the process of each event began, int64
            [events].
    """

    rows: Array
    reasons: list[str]
    begins_at: Settled
    frontiers: Int64

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
    return _history(_parts(folder))


def _history(paths: Sequence[Path]) -> History:
    """Read parts, at least one, in the order of their events."""
    import pyarrow as pa
    import pyarrow.compute

    tables = [_read_part(path) for path in paths]
    table = pa.concat_tables(tables)

    rows = np.empty(len(table), ROW)
    for name in _NUMBERS:
        rows[name] = table[name].fill_null(NONE).to_numpy()

    names = pa.array(_EVENT_NAMES)
    rows["event"] = pyarrow.compute.index_in(table["event"], names).to_numpy() + 1
    reasons = table["reason"].combine_chunks().dictionary_encode()
    rows["reason"] = reasons.indices.fill_null(NONE).to_numpy()

    begins_at = [
        Settled(**json.loads(table.schema.metadata[_BEGINS_AT])) for table in tables
    ]
    frontiers = np.repeat(
        [settled.frontier for settled in begins_at], [len(table) for table in tables]
    )
    return History(rows, reasons.dictionary.to_pylist(), begins_at[0], frontiers)


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


# ------------------------------------------------------------------------------- ledger


_LISTED = 8  # ordinals that a message names
_NEW = 0  # in place of the last event of an ordinal that has none

_BEFORE = {
    Event.DRAWN: (_NEW, Event.DRAWN, Event.FINISHED),
    Event.FINISHED: (Event.DRAWN,),
    Event.TRAINED: (Event.FINISHED,),
    Event.REJECTED: (_NEW, Event.DRAWN, Event.FINISHED),
}
"""Event -> what the last event of the ordinal may be. A group that was given up is
drawn again, finished or not."""

_MAY_FOLLOW = np.zeros((len(Event) + 1, len(Event) + 1), np.bool_)
for _event, _last_events in _BEFORE.items():
    _MAY_FOLLOW[_event, _last_events] = True

_STATES = {
    _NEW: "were not drawn",
    Event.DRAWN: "are not finished",
    Event.FINISHED: "are finished already",
    Event.TRAINED: "were trained or rejected before",
    Event.REJECTED: "were trained or rejected before",
}
"""Last event -> what it says about ordinals."""


class Ledger:
    """State and history of each ordinal of a run.

    Every call but `write` and `close` only notes events, for all ordinals at once.
    """

    def __init__(self, folder: Path) -> None:
        """Begin the ledger of a run.

        Args:
            folder: Folder of the parts, created with the first one.
        """
        self._folder = folder
        self._restarts = 0

        self._frontier = 0
        self._last_events = np.zeros(0, np.int8)
        """Last event of each ordinal from the frontier on; `_NEW` where there is none,
        and also behind the end."""

        self._reasons: dict[str, int] = {}
        self._rows = np.empty(0, ROW)
        """Events since the last part. Only the first `_num_rows` are filled."""
        self._num_rows = 0
        self._num_saved = 0
        """How many of these events the last state knows."""
        self._num_written = 0
        """Events of this process that are in parts."""
        self._newest_part: tuple[int | None, Array] = (None, self._rows)
        """Step of the newest part, and its events."""

        self._begins_at = self._settled()
        """What was settled before the first event of this process."""

    def draw(self, ordinals: Int64, version: int) -> None:
        """Note that groups are given to the engines.

        Args:
            ordinals: Ordinals, int64 [groups], settled none of them.
            version: Version of the policy at this time.

        Raises:
            DataError: A group was trained or rejected before.
        """
        self._note(
            Event.DRAWN, ordinals, oldest_version=version, newest_version=version
        )

    def finish(self, ordinals: Int64, oldest: Int64, newest: Int64) -> None:
        """Note that every response of groups is generated and scored.

        Args:
            ordinals: Ordinals, int64 [groups].
            oldest: Oldest version of a token of each group, int64 [groups]; -1 for a
                group without response tokens.
            newest: Newest version, likewise.

        Raises:
            DataError: A group is not being generated.
        """
        self._note(
            Event.FINISHED, ordinals, oldest_version=oldest, newest_version=newest
        )

    def train(self, ordinals: Int64, step: int) -> None:
        """Note that groups, int64 [groups], were trained in a step, counted from 1.

        Raises:
            DataError: A group was trained or rejected before, or is not finished.
        """
        self._note(Event.TRAINED, ordinals, step=step)

    def reject(self, ordinals: Int64, reason: str) -> None:
        """Note that groups, int64 [groups], will not be trained.

        Args:
            ordinals: Ordinals, drawn or not.
            reason: The reason, one of few texts.

        Raises:
            DataError: A group was trained or rejected before.
        """
        number = self._reasons.setdefault(reason, len(self._reasons))
        self._note(Event.REJECTED, ordinals, reason=number)

    def replay(self, ordinals: Int64, step: int) -> None:
        """Note that a step learns once more from groups, int64 [groups].

        Raises:
            DataError: A group was neither trained nor rejected before.
        """
        last_events = self.last_events(ordinals)
        is_open = last_events < Event.TRAINED
        if is_open.any():
            self._refuse(
                Event.REPLAYED, ordinals[is_open], _STATES[last_events[is_open][0]]
            )
        self._append(Event.REPLAYED, ordinals, step=step)

    # ----------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON.

        The part that the next `write` makes ends here.
        """
        self._num_saved = self._num_rows
        settled = self._settled()
        return {
            "frontier": settled.frontier,
            "holes": settled.holes,
            "finished": self._ranges(self._last_events == Event.FINISHED),
            "restarts": self._restarts,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in a new process.

        Groups that were drawn and not finished will be drawn again. So may finished
        ones, which can also be trained as they are.
        """
        assert not self._frontier and not self._num_rows, "nothing has happened yet"
        self._restarts = state["restarts"] + 1
        self._frontier = state["frontier"]

        ends = [end for _, end in [*state["holes"], *state["finished"]]]
        size = max(ends, default=self._frontier) - self._frontier
        self._last_events = np.zeros(size, np.int8)
        for name, event in (("holes", Event.TRAINED), ("finished", Event.FINISHED)):
            for first, end in state[name]:
                places = slice(first - self._frontier, end - self._frontier)
                self._last_events[places] = event
        self._begins_at = self._settled()

    @property
    def bookmark(self) -> int:
        """How many events of this process the last state knows."""
        return self._num_written + self._num_saved

    def inherit(self, former: Ledger, bookmark: int) -> None:
        """Take over the events that a former ledger of this process has in memory.

        Args:
            former: The ledger that the state is of which this one has loaded.
            bookmark: That of the state. If the newest part holds later events, its
                checkpoint does not count, and it is no longer on the disk.
        """
        part_step, part = former._newest_part
        rows = former._rows[: former._num_rows]
        self._num_written = former._num_written
        if bookmark < former._num_written:
            rows = np.concatenate([part, rows])
            self._num_written -= len(part)
            part_step, part = None, part[:0]

        num_rows = bookmark - self._num_written
        assert 0 <= num_rows <= len(rows), "the state is one of that ledger"
        self._newest_part = part_step, part
        self._rows = rows[:num_rows].copy()
        self._num_rows = self._num_saved = num_rows
        self._reasons = dict(former._reasons)
        self._begins_at = former._begins_at

    def keep(self, folder: Path, step: int) -> None:
        """Write what the last state knows and no part holds.

        Args:
            folder: Folder of a snapshot.
            step: The step that the last state is of.
        """
        rows = self._rows[: self._num_saved]
        newest = max(self._newest_part[0] or 0, step - 1)
        path = folder / f"{_AFTER}{newest:08}.parquet"
        write_part(path, rows, list(self._reasons), self._begins_at)

    def take_back(self, folder: Path) -> None:
        """Take back what `keep` wrote, after `load_state`.

        A part that was written later has these events too, and is removed: its
        checkpoint did not come to count.

        Args:
            folder: Folder of the snapshot.
        """
        (path,) = folder.glob(f"{_AFTER}*.parquet")
        drop_later_parts(self._folder, int(path.stem.removeprefix(_AFTER)))
        history = _history([path])
        self._rows = history.rows
        self._num_rows = self._num_saved = len(history.rows)
        self._reasons = {reason: place for place, reason in enumerate(history.reasons)}
        self._begins_at = history.begins_at

    def last_events(self, ordinals: Int64) -> Array:
        """Return the last event of each ordinal, int8 [groups]; 0 where there is none.

        Those that were trained or rejected count as trained.
        """
        places = ordinals - self._frontier
        # All ordinals below the frontier are settled.
        last_events = np.full(len(places), Event.TRAINED, np.int8)
        last_events[places >= len(self._last_events)] = _NEW
        is_known = (places >= 0) & (places < len(self._last_events))
        last_events[is_known] = self._last_events[places[is_known]]
        return last_events

    def write(self, step: int) -> None:
        """Write what the last state knows, and no part does yet, as one part.

        It is on the disk when this returns. What happened since that state belongs to
        the next part: a run that goes on from this step does not know of it.

        Args:
            step: Step of the checkpoint that holds the last state. Its manifest is
                written afterwards.

        Raises:
            TrackingError: The part cannot be written.
        """
        rows = self._rows[: self._num_saved]
        assert not len(rows) or rows["step"].max() <= step, (
            "the last state is that of the step"
        )
        self._write(step, self._num_saved)

    def close(self) -> None:
        """Write what no part holds, at the end of a run: no checkpoint knows of it.

        Raises:
            TrackingError: The part cannot be written.
        """
        self._write(None, self._num_rows)

    def _write(self, step: int | None, num_rows: int) -> None:
        """Write the first rows as a part, and forget them."""
        if not num_rows:
            return
        part = self._rows[:num_rows]
        # The checkpoint of this step did not come to count, and is written again.
        newest_step, newest_part = self._newest_part
        if step is not None and step == newest_step:
            part = np.concatenate([newest_part, part])
        path = part_path(self._folder, step)
        write_part(path, part, list(self._reasons), self._begins_at)
        self._newest_part = step, part.copy()
        self._rows = self._rows[num_rows : self._num_rows]
        self._num_written += num_rows
        self._num_rows = len(self._rows)
        self._num_saved = 0

    # ---------------------------------------------------------------------- events

    def _note(self, event: Event, ordinals: Int64, **columns: Int64 | int) -> None:
        """Note an event of each ordinal, with the columns that it has."""
        if not len(ordinals):
            return

        places = self._places(event, ordinals)
        self._last_events[places] = event
        if event >= Event.TRAINED:
            self._advance()
        self._append(event, ordinals, **columns)

    def _append(self, event: Event, ordinals: Int64, **columns: Int64 | int) -> None:
        """Append an event of each ordinal to the history."""
        row = self._room(len(ordinals))
        row["event"] = event
        row["ordinal"] = ordinals
        for name in ("step", "oldest_version", "newest_version", "reason"):
            row[name] = columns.get(name, NONE)
        row["restart"] = self._restarts
        row["time"] = time.time()

    def _places(self, event: Event, ordinals: Int64) -> Int64:
        """Return where the last events of ordinals stand, which an event may follow.

        Raises:
            DataError: It may not.
        """
        places = ordinals - self._frontier
        lacking = int(places.max()) + 1 - len(self._last_events)
        if lacking > 0:
            self._last_events = np.pad(self._last_events, (0, lacking))

        last_events = self.last_events(ordinals)
        is_allowed = _MAY_FOLLOW[event, last_events]
        if not is_allowed.all():
            last_event = last_events[~is_allowed][0]
            same = ordinals[~is_allowed & (last_events == last_event)]
            self._refuse(event, same, _STATES[last_event])

        in_order = np.sort(ordinals)
        twice = in_order[1:][np.diff(in_order) == 0]
        if len(twice):
            self._refuse(event, twice, "are named twice")
        return places

    def _refuse(self, event: Event, ordinals: Int64, because: str) -> None:
        raise DataError(
            f"the ordinals {first_few(ordinals)} cannot be {event.name.lower()}: they"
            f" {because}; each is drawn, finished, and then trained or rejected once"
        )

    def _advance(self) -> None:
        """Move the frontier to the first ordinal that is not settled."""
        open_places = np.flatnonzero(self._last_events < Event.TRAINED)
        num_settled = open_places[0] if len(open_places) else len(self._last_events)
        self._frontier += int(num_settled)
        self._last_events = self._last_events[num_settled:]

    def _room(self, count: int) -> Array:
        """Return the place for so many further events."""
        begin, end = self._num_rows, self._num_rows + count
        if end > len(self._rows):
            # The size doubles, so that a row is copied about once.
            rows = np.empty(max(end, 2 * begin), ROW)
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        self._num_rows = end
        return self._rows[begin:end]

    def _settled(self) -> Settled:
        """Return what is settled now."""
        holes = self._ranges(self._last_events >= Event.TRAINED)
        return Settled(self._frontier, holes)

    def _ranges(self, mask: Array) -> list[list[int]]:
        """Return ranges [first, end) of the ordinals from the frontier on in a mask."""
        padded = np.pad(mask.astype(np.int8), 1)
        edges = np.flatnonzero(np.diff(padded)) + self._frontier
        ranges: list[list[int]] = edges.reshape(-1, 2).tolist()
        return ranges


def first_few(ordinals: Int64) -> str:
    """Return the first few ordinals as text."""
    text = ", ".join(map(str, ordinals[:_LISTED].tolist()))
    return text + ", ..." if len(ordinals) > _LISTED else text
