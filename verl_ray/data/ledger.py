"""Ledger of a run: every ordinal is trained exactly once, or rejected.

An ordinal is the running number of a prompt in the run (`group_id`). It is drawn (given
to the engines), finished (all of its responses are generated and scored), then trained
or rejected, which settles it.

Invariant: an ordinal is settled once, whatever is drawn again after a restart. A
checkpoint holds the frontier, below which all ordinals are settled, and the holes, the
settled ones above it. The memory is that of the ordinals from the frontier on, and of
the events in the last part and since. Deliberately not here: the rows of a group
(`buffer.py`), and the files of the history (`ledger_parts.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_ray.data.batch import Array, Int64
from verl_ray.data.ledger_parts import (
    NONE,
    ROW,
    Event,
    Settled,
    part_path,
    write_part,
)
from verl_ray.errors import DataError

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
