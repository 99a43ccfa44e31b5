"""A trace of a run's processes (`trace.json`), which Perfetto opens.

Each process notes its spans in a buffer. The driver gathers them after each step and
appends them to the file, in the Trace Event Format of Chrome: an array of objects whose
closing bracket may be missing. So a run that crashed has a file that can be opened.

Invariant: all times of a node are of one clock, its monotonic one, so spans of its
processes compare to the microsecond. To that the wall time of the node is added, as it
was when the node's first spans were gathered. Times of two nodes compare as well as
their wall clocks do. Spans of one thread nest. A buffer that is full forgets its oldest
spans, and the trace has a mark that says how many.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ray.json_lines import lines_of

TRACE = "trace.json"

_NAMES_TRACK = b'"ph": "M"'
"""Part of the lines that say something about a track."""

MOST_SPANS = 10_000
"""Spans of a process that wait to be gathered."""

MOST_BYTES = 1 << 29
"""Size of the file beyond which nothing is written: Perfetto opens about 2 GB."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work, from its beginning to its end.

    Attributes:
        name: Name of the work.
        category: phase, time, wait or call.
        thread: Identity of the thread that did it.
        begin_ns: Beginning on the node's monotonic clock, in nanoseconds.
        end_ns: End, likewise.
        details: Numbers and texts that a person may look at.
    """

    name: str
    category: str
    thread: int
    begin_ns: int
    end_ns: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessSpans:
    """The spans of a process since they were gathered last.

    Attributes:
        name: Name of the process for people.
        pid: Process id on its node.
        node: Host name.
        wall_offset_ns: Wall time minus the monotonic clock, in nanoseconds.
        spans: The spans in the order of their ends.
        forgotten: Number of older spans that the buffer did not hold.
    """

    name: str
    pid: int
    node: str
    wall_offset_ns: int
    spans: list[Span]
    forgotten: int


class SpanBuffer:
    """The spans of this process that are not gathered yet. Any thread may add some.

    Attributes:
        is_on: Whether spans are noted at all.
    """

    def __init__(self, most: int = MOST_SPANS, *, is_on: bool = True) -> None:
        """Begin without spans.

        Args:
            most: Number of spans that wait to be gathered; older ones are forgotten.
            is_on: Whether spans are noted at all.
        """
        self.is_on = is_on
        self._spans: deque[Span] = deque(maxlen=most)
        # A signal handler may end a span of the thread that holds the lock.
        self._lock = threading.RLock()
        self._forgotten = 0

    @contextlib.contextmanager
    def span(
        self, name: str, category: str, details: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Note the block as a span, also where it raises.

        Args:
            name: Name of the work.
            category: See `Span`.
            details: See there.
        """
        if not self.is_on:
            yield
            return

        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            end_ns = time.monotonic_ns()
            thread = threading.get_ident()
            span = Span(name, category, thread, begin_ns, end_ns, details or {})
            with self._lock:
                self._forgotten += len(self._spans) == self._spans.maxlen
                self._spans.append(span)

    @contextlib.contextmanager
    def noted(self, is_on: bool) -> Iterator[None]:
        """Note the spans of the block, and forget what nobody took of them.

        Args:
            is_on: Whether they are noted at all. Workers that are started within the
                block do the same.
        """
        before = self.is_on
        self.is_on = is_on
        try:
            yield
        finally:
            self.is_on = before
            self.take("")

    def take(self, name: str) -> ProcessSpans:
        """Return the spans that ended since the last call.

        Args:
            name: Name of this process for people.
        """
        with self._lock:
            spans = list(self._spans)
            forgotten = self._forgotten
            self._spans.clear()
            self._forgotten = 0
        return ProcessSpans(
            name=name,
            pid=os.getpid(),
            node=socket.gethostname(),
            wall_offset_ns=time.time_ns() - time.monotonic_ns(),
            spans=spans,
            forgotten=forgotten,
        )


SPANS = SpanBuffer(is_on=False)
"""The spans of this process, which notes them where somebody gathers them."""
span = SPANS.span


class TraceFile:
    """Appends spans to the file of a run."""

    def __init__(self, path: Path, *, continues: bool) -> None:
        """Open the file.

        Args:
            path: Path of the file.
            continues: Whether it goes on, or begins anew.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._path = path
        self._tracks: dict[tuple[str, int, str], int] = {}
        """Number of each process's track, by its node, id and name."""
        self._threads: dict[tuple[int, int], int] = {}
        """Number of each thread in the track of its process."""
        self._offsets_ns: dict[str, int] = {}
        """Wall time minus monotonic clock, by node."""

        # Tracks of earlier processes keep their numbers.
        self._first_track = 1 + (self._repair() if continues and path.exists() else 0)
        if self._first_track == 1:
            path.write_bytes(b"[\n")
        self._bytes = path.stat().st_size

    def _repair(self) -> int:
        """Remove the part of a line that a process has left which was killed.

        Returns:
            The last number of a track; 0 where there is none, or the file is no trace
            that can be continued.
        """
        last_track = 0
        end = 0
        try:
            with self._path.open("rb+") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    # Most lines are spans, and a trace may have millions.
                    if _NAMES_TRACK in line:
                        track = json.loads(line.rstrip(b",\n"))["pid"]
                        last_track = max(last_track, int(track))
                file.truncate(end)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(
                f"warning: {self._path} cannot be continued, and begins anew:"
                f" {error!r}",
                file=sys.stderr,
                flush=True,
            )
            return 0
        return last_track

    @property
    def is_full(self) -> bool:
        """Whether the file has reached its bound, so that nothing more is written."""
        return self._bytes >= MOST_BYTES

    def append(self, processes: Iterable[ProcessSpans]) -> None:
        """Write the spans of some processes.

        Raises:
            OSError: The file cannot be written. It is as before then.
        """
        events = [event for spans in processes for event in self._events(spans)]
        lines = "".join(json.dumps(event) + ",\n" for event in events).encode()
        # All at once, so that hardly any end of a process leaves a part of a line. A
        # disk that is full may take a part.
        with self._path.open("ab", buffering=0) as file:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(self._bytes)
                raise
        self._bytes += len(lines)

    def _events(self, process: ProcessSpans) -> Iterator[dict[str, Any]]:
        """Yield the events of a process, those that name its track first."""
        key = process.node, process.pid, process.name
        if key not in self._tracks:
            track = self._first_track + len(self._tracks)
            self._tracks[key] = track
            name = f"{process.name} (process {process.pid} on {process.node})"
            yield _named("process_name", track, 0, {"name": name})
            yield _named("process_sort_index", track, 0, {"sort_index": track})
        track = self._tracks[key]
        offset_ns = self._offsets_ns.setdefault(process.node, process.wall_offset_ns)

        if process.forgotten and process.spans:
            begin_us = (process.spans[0].begin_ns + offset_ns) / 1000
            text = f"{process.forgotten} older spans are not here: too many for a step"
            mark = {"name": text, "ph": "i", "s": "p", "ts": begin_us}
            yield mark | {"pid": track, "tid": 0}
        for noted in process.spans:
            thread = self._threads.setdefault((track, noted.thread), len(self._threads))
            event = {
                "name": noted.name,
                "cat": noted.category,
                "ph": "X",
                "ts": (noted.begin_ns + offset_ns) / 1000,
                "dur": (noted.end_ns - noted.begin_ns) / 1000,
                "pid": track,
                "tid": thread,
            }
            if noted.details:
                event["args"] = dict(noted.details)
            yield event


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, also of a run that goes on or has crashed.

    Raises:
        OSError: The file cannot be read.
    """
    return events_in(path.read_text("utf-8", "replace"))


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of the whole lines of a trace."""
    events = []
    for line in lines_of(text[: text.rfind("\n") + 1]):
        with contextlib.suppress(ValueError):
            event = json.loads(line.rstrip(",[]") or "null")
            if isinstance(event, dict):
                events.append(event)
    return events


def _named(
    kind: str, track: int, thread: int, details: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an event that says something about a track."""
    return {
        "name": kind, "ph": "M", "pid": track, "tid": thread, "args": dict(details)
    }  # fmt: skip
