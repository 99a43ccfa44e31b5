"""Spans of processes, and the file that holds them."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from verl_ray.profiling import trace
from verl_ray.profiling.trace import (
    ProcessSpans,
    Span,
    SpanBuffer,
    TraceFile,
    read_trace,
)

HOUR_NS = 3_600_000_000_000


def spans_of(node: str, offset_ns: int, *times: int) -> ProcessSpans:
    """A process with a span of 1000 ns from each time on."""
    noted = [
        Span("actor.update", "call", 77, time, time + 1000, {"rows": 4})
        for time in times
    ]
    return ProcessSpans("trainer-0", 9, node, offset_ns, noted, forgotten=0)


def test_a_buffer_notes_what_ends_and_counts_what_it_forgets() -> None:
    buffer = SpanBuffer(most=3)
    with pytest.raises(ZeroDivisionError), buffer.span("outer", "phase"):
        with buffer.span("inner", "wait", {"rows": 2}):
            pass
        _ = 1 / 0
    inner, outer = buffer.take("driver").spans
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns
    assert inner.details == {"rows": 2} and inner.thread == outer.thread
    assert buffer.take("driver").spans == []

    for name in "abcde":
        with buffer.span(name, "call"):
            pass
    taken = buffer.take("driver")
    assert [span.name for span in taken.spans] == ["c", "d", "e"]
    assert taken.forgotten == 2


def test_spans_are_noted_only_where_somebody_gathers_them() -> None:
    buffer = SpanBuffer(is_on=False)
    with buffer.span("before", "call"), buffer.noted(True):
        with buffer.span("within", "call"):
            pass
        assert [span.name for span in buffer.take("driver").spans] == ["within"]
        with buffer.noted(False), buffer.span("inner", "call"):
            pass
        with buffer.span("last", "call"):
            pass
    # What nobody took is no part of the next run.
    assert buffer.take("driver").spans == [] and not buffer.is_on


def test_all_processes_of_a_node_have_one_clock(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", continues=False)
    file.append([spans_of("a", HOUR_NS, 5000), spans_of("b", 2 * HOUR_NS, 5000)])
    # The wall clock of a node was set; its monotonic clock went on.
    file.append([spans_of("a", 7 * HOUR_NS, 8000)])

    events = read_trace(tmp_path / "trace.json")
    names = [
        event["args"]["name"] for event in events if event["name"] == "process_name"
    ]
    assert names == ["trainer-0 (process 9 on a)", "trainer-0 (process 9 on b)"]
    spans = [event for event in events if event["ph"] == "X"]
    hour_us = HOUR_NS / 1000
    assert [(event["pid"], event["ts"], event["dur"]) for event in spans] == [
        (1, hour_us + 5, 1), (2, 2 * hour_us + 5, 1), (1, hour_us + 8, 1),
    ]  # fmt: skip
    assert all(event["args"] == {"rows": 4} for event in spans)
    # With its bracket it is JSON as a whole.
    text = (tmp_path / "trace.json").read_text()
    assert json.loads(text.rstrip(",\n") + "]") == events


def test_a_run_that_goes_on_continues_a_torn_file_with_tracks_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path, continues=True).append([spans_of("a", 0, 1000)])
    whole = path.read_text()
    path.write_text(whole + '{"name": "actor.upd')
    assert len(read_trace(path)) == 3

    TraceFile(path, continues=True).append([spans_of("a", 0, 2000)])
    assert path.read_text().startswith(whole)
    spans = [event for event in read_trace(path) if event["ph"] == "X"]
    assert [(event["pid"], event["ts"]) for event in spans] == [(1, 1), (2, 2)]
    TraceFile(path, continues=False)
    assert read_trace(path) == []


def test_a_file_that_is_no_trace_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[\n{"ph": "M"\n')
    TraceFile(path, continues=True).append([spans_of("a", 0, 1000)])
    assert "cannot be continued, and begins anew" in capsys.readouterr().err
    assert len(read_trace(path)) == 3


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, continues=False)
    file.append([spans_of("a", 0, 1000)])
    whole = path.read_bytes()

    # The size of files is limited, so only a part of the next lines can be written.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append([spans_of("a", 0, 2000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole
    file.append([spans_of("a", 0, 2000)])
    assert len(read_trace(path)) == 4


def test_a_file_of_its_largest_size_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 100)
    file = TraceFile(tmp_path / "trace.json", continues=False)
    assert not file.is_full
    file.append([spans_of("a", 0, 1000)])
    assert file.is_full
