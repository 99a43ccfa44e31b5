"""The lines that a process prints, and its last warnings."""

from __future__ import annotations

import io
import os
import sys

import pytest

from verl_ray.profiling.output_lines import LineStream, Warnings


def test_a_line_is_handed_on_once_and_as_it_is_at_its_end() -> None:
    lines: list[str] = []
    stream = LineStream(io.StringIO(), lines.append)
    assert stream.write("first\nsec") == 9
    stream.write("ond\r\n10%\r20%")
    assert lines == ["first", "second"]
    # Bars begin or end with it; what was written over is not kept.
    for number in range(50):
        stream.write(f"\r{number}%")
        assert stream._begun == f"{number}%"
    stream.write("\r")
    for number in range(50, 100):
        stream.write(f"{number}%\r")
        assert stream._begun == f"{number}%\r"
    stream.write("\r100%\nend")
    stream.finish()
    stream.finish()
    assert lines == ["first", "second", "100%", "end"]


def test_the_last_warnings_are_kept_and_everything_is_passed_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings = Warnings()
    before = sys.stderr
    with warnings.kept():
        for number in range(7):
            print(f"warning: {number}", file=sys.stderr)
        print("no warning: 8", file=sys.stderr)
    assert warnings.last == ("2", "3", "4", "5", "6")
    assert sys.stderr is before
    printed = capsys.readouterr().err.splitlines()
    assert printed == [*(f"warning: {number}" for number in range(7)), "no warning: 8"]
    with warnings.kept():
        assert warnings.last == ()


@pytest.mark.processes
def test_a_forked_process_writes_to_the_stream_itself() -> None:
    reading, writing = os.pipe()
    lines: list[str] = []
    with os.fdopen(writing, "w") as file:
        stream = LineStream(file, lines.append)
        child = os.fork()
        if child == 0:
            stream.write("of the child\n")
            stream.flush()
            os._exit(0)
        os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        assert file.read() == "of the child\n"
    assert lines == []
