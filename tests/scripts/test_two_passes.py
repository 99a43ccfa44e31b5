"""The two passes of scripts/test, on tiny suites."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

HEAD = """
import os, pathlib, signal, subprocess, sys
import pytest

def first_time(name):
    flag = pathlib.Path(__file__).with_name(name)
    was_there = flag.exists()
    flag.touch()
    return not was_there

def test_right():
    pass
"""

PROGRAM = """
import sys
from tests import two_passes
two_passes.LEFT_S = 3.0
sys.exit(two_passes.main())
"""


def passes(folder: Path, suite: str, *options: str) -> tuple[int, list[str]]:
    """The exit code of the check of a suite, and what it printed after pytest."""
    (folder / "test_suite.py").write_text(HEAD + suite)
    (folder / "pytest.ini").write_text("[pytest]\n")
    # This test may be in a lane itself, which its own lanes must not take for theirs.
    outer = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options], cwd=folder, capture_output=True,
        text=True, timeout=300, check=False, env={**outer, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [line.strip() for line in ended.stdout.splitlines() if line.strip()]
    last_of_pytest = max(
        number for number, line in enumerate(lines) if line.startswith("=====")
    )
    return ended.returncode, lines[last_of_pytest + 1 :]


def test_what_passes_runs_once(tmp_path: Path) -> None:
    skipped = "@pytest.mark.skip\ndef test_it():\n    pass"
    assert passes(tmp_path, skipped) == (0, ["1 passed, 1 skipped"])


THEN_RIGHT = """
def test_raced():
    assert not first_time("raced"), "a race"

@pytest.fixture
def thing():
    assert not first_time("thing")

def test_with_thing(thing):
    pass

def test_that_ends_its_lane():
    if first_time("lane"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_passes_the_second_time_is_named(tmp_path: Path) -> None:
    code, lines = passes(tmp_path, THEN_RIGHT)
    assert code == 0
    assert lines[0] == "tests that needed a second pass:"
    shown = dict(zip(lines[1:-1:2], lines[2:-1:2], strict=True))
    expected = {
        "test_raced": r"test_suite.py:15: AssertionError \(\S+ s\); then passed",
        "test_with_thing": r"test_suite.py:19: AssertionError \(\S+ s\); then passed",
        "test_that_ends_its_lane": r"worker 'gw\d' crashed while running 'test_suite.py::test_that_ends_its_lane' \(0.0 s\); then passed",
    }
    assert shown.keys() == {f"test_suite.py::{name}" for name in expected}
    for name, line in expected.items():
        assert re.fullmatch(line, shown[f"test_suite.py::{name}"])
    assert lines[-1] == "4 passed"


def test_a_file_that_was_not_imported_runs_whole(tmp_path: Path) -> None:
    # Each of the three lanes imports the file, and the second pass has none.
    suite = "if os.environ.get('PYTEST_XDIST_WORKER'):\n    import nothing_like_it"
    code, (_, name, reason, total) = passes(tmp_path, suite)
    assert (code, name, total) == (0, "test_suite.py", "1 passed")
    assert reason.startswith("E   ModuleNotFoundError: No module named")


NOT_RIGHT = """
def test_wrong():
    assert 0

def test_then_skipped():
    assert not first_time("skipped")
    pytest.skip()

def test_that_leaves_a_process():
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
ONLY_IN_LANES = """
if os.environ.get("PYTEST_XDIST_WORKER"):
    def test_it():
        assert 0
"""
SIX = """
@pytest.mark.parametrize("n", range(6))
def test_it(n):
    assert 0
"""


@pytest.mark.parametrize(
    ("suite", "errors", "total"),
    [
        (
            NOT_RIGHT,
            [
                "pytest ended with 1 in the second pass",
                "test_suite.py::test_wrong did not pass in the second pass: failed",
                "test_suite.py::test_then_skipped did not pass in the second pass: skipped",
                "a process did not end: ",
            ],
            "1 failed, 2 passed, 1 skipped",
        ),
        (
            ONLY_IN_LANES,
            [
                "pytest ended with 4 in the second pass",
                "test_suite.py::test_it did not pass in the second pass: missing",
            ],
            "1 failed, 1 passed",
        ),
        (SIX, ["6 tests need a second pass; at most 5 may"], "6 failed, 1 passed"),
    ],
    ids=["wrong, skipped, a process", "missing", "six"],
)
def test_what_refuses_a_change(
    tmp_path: Path, suite: str, errors: list[str], total: str
) -> None:
    code, lines = passes(tmp_path, suite)
    assert code == 1
    shown = [line for line in lines if line.startswith("error: ")]
    assert len(shown) == len(errors), lines
    for line, error in zip(shown, errors, strict=True):
        assert line.startswith(f"error: {error}")
    assert lines[-1] == total


def test_nothing_selected_is_refused(tmp_path: Path) -> None:
    code, lines = passes(tmp_path, "", "-k", "nothing_like_it")
    assert code == 1
    assert lines[0] == "error: pytest ended with 5 in the first pass"
