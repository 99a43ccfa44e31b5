"""Bytes that somebody else reads are progress."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_ray.profiling.progress import begin, counting_reads, progress


def test_what_is_read_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))
    begin()
    with counting_reads(interval_s=0.02):
        time.sleep(0.2)
        assert str(progress()) == "nothing"  # nobody reads
        until = time.monotonic() + 60
        while progress().unit != "bytes read" and time.monotonic() < until:
            file.read_bytes()
    assert progress().unit == "bytes read" and progress().done >= 1 << 20


@pytest.mark.processes
def test_so_is_what_a_child_reads(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))
    code = f"from pathlib import Path\nwhile True: Path({str(file)!r}).read_bytes()"
    begin()
    with (
        subprocess.Popen([sys.executable, "-c", code]) as child,
        counting_reads(interval_s=0.02),
    ):
        until = time.monotonic() + 60
        while progress().unit != "bytes read" and time.monotonic() < until:
            time.sleep(0.01)
        child.kill()
    assert progress().unit == "bytes read"
