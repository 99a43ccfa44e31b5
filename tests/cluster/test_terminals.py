"""The output of a process whose disk is full for a while."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The limit on the size of a file stands for a full disk. The buffer has 8,192 bytes.
PROGRAM = """
import resource, sys
from verl_ray.cluster.signals import outlast_full_disks
outlast_full_disks()
print("first", flush=True)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
print("0123456789", flush=True)
print("warning", file=sys.stderr)
print("x" * {size}, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("later", flush=True)
print("last")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, "xxx\n"),
        (8_190, "[8191 bytes of output did not fit on the disk]\n"),
    ],
)
def test_a_full_disk_ends_nothing_and_what_is_lost_is_counted(
    size: int, expected: str, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with output.open("a") as file:
        code = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(size=size)],
            stdout=file, stderr=file, check=False,
        ).returncode  # fmt: skip
    assert code == 0
    # "first" and a newline are 6 bytes, so 2 of the next line fit. The buffer keeps 9.
    # The two streams have buffers of their own.
    assert output.read_text() == (
        f"first\n0123456789\n{expected}later\nlast\nwarning\n"
    )


@pytest.mark.processes
def test_a_signal_between_a_write_and_its_return_does_not_repeat_a_line() -> None:
    # A timer of one microsecond finds every place between the calls of a print.
    program = """
import signal, sys
from verl_ray.cluster.signals import outlast_full_disks
outlast_full_disks()

class Interrupted(Exception):
    pass

def raise_error(number, frame):
    raise Interrupted

signal.signal(signal.SIGALRM, raise_error)
for number in range(20_000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 20))
        print(f"{number:05}", flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        pass
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    # Python may run a handler between a number and its newline, which is then missing.
    digits = ended.stdout.replace("\n", "")
    numbers = [int(digits[start : start + 5]) for start in range(0, len(digits), 5)]
    assert len(numbers) > 1_000, ended.stderr
    assert all(before < after for before, after in itertools.pairwise(numbers))


@pytest.mark.processes
def test_a_reader_that_has_seen_enough_is_not_hidden() -> None:
    program = (
        "from verl_ray.cluster.signals import outlast_full_disks\n"
        "outlast_full_disks()\n"
        "import sys; sys.stdin.read(); print('x' * 100000, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) != 0 and "BrokenPipeError" in process.stderr.read()


@pytest.mark.processes
def test_lines_come_at_once_where_they_did_so_before() -> None:
    program = (
        "from verl_ray.cluster.signals import outlast_full_disks\n"
        "outlast_full_disks()\n"
        "import os; print('a line'); os._exit(0)"
    )
    for unbuffered, expected in (("1", "a line\n"), ("", "")):
        ended = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
        assert ended.stdout == expected
