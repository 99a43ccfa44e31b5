"""The processes of a step over time, from a trace in Chrome's format.

Invariant: only complete events (`"ph": "X"`) and names of processes and threads are
read; whatever else a trace holds is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ray.report.blocks import Blocks

MOST_EVENTS = 40_000

_MICROSECONDS = 1e-6


def trace_of(
    events: Sequence[Mapping[str, Any]], blocks: Blocks, skipped_bytes: int = 0
) -> dict[str, Any] | None:
    """Add the events of a trace to the blocks, and return the index over them.

    Args:
        events: Events in Chrome's format; times are microseconds.
        blocks: Receives one block with the columns start (seconds since the first
            event), duration (seconds), track and name, the events in order.
        skipped_bytes: Bytes of the trace whose events are not among these.

    Returns:
        The tracks, the names and the number of the block; None without events.
    """
    complete = [event for event in events if _is_complete(event)]
    if not complete:
        return None
    complete.sort(key=lambda event: float(event["ts"]))
    newest = complete[-MOST_EVENTS:]

    titles = _titles(events)
    tracks: dict[str, int] = {}
    names: dict[str, int] = {}
    begun = float(newest[0]["ts"])
    columns: list[list[float]] = [[], [], [], []]
    for event in newest:
        track = titles.get((event.get("pid"), None), f"process {event.get('pid')}")
        thread = titles.get((event.get("pid"), event.get("tid")))
        if thread is not None:
            track = f"{track}: {thread}"
        start_s = (float(event["ts"]) - begun) * _MICROSECONDS
        columns[0].append(round(start_s, 6))
        columns[1].append(round(float(event["dur"]) * _MICROSECONDS, 6))
        columns[2].append(tracks.setdefault(track, len(tracks)))
        columns[3].append(names.setdefault(str(event.get("name")), len(names)))

    return {
        "tracks": list(tracks),
        "names": list(names),
        "block": blocks.add_json(columns),
        "leftOut": len(complete) - len(newest),
        "skippedBytes": skipped_bytes,
    }


def _is_complete(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event.get("dur"))
    return event.get("ph") == "X" and all(isinstance(t, int | float) for t in times)


def _titles(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], str]:
    """Return the names of processes, by (pid, None), and of threads, by (pid, tid)."""
    titles: dict[tuple[Any, Any], str] = {}
    for event in events:
        arguments = event.get("args")
        if event.get("ph") != "M" or not isinstance(arguments, Mapping):
            continue
        name = str(arguments.get("name", ""))
        if event.get("name") == "process_name":
            titles[event.get("pid"), None] = name
        elif event.get("name") == "thread_name":
            titles[event.get("pid"), event.get("tid")] = name
    return titles
