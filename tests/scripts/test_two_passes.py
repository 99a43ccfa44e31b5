"""The two passes of scripts/test, on tiny suites."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import two_passes

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

HEAD = """
import os, pathlib, signal, subprocess, sys
import pytest

LANE = os.environ.get("PYTEST_XDIST_WORKER")

def first_time(name):
    flag = pathlib.Path(__file__).with_name(name)
    was_there = flag.exists()
    flag.touch()
    return not was_there

def test_right():
    pass
"""

PROGRAM = """
import signal, sys
from tests import two_passes
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
two_passes.LANES = ("-p", "xdist", "-n", "2", *two_passes.LANES[2:])
two_passes.LEFT_S = 3.0
two_passes.PASS_S = float(sys.argv.pop(1))
sys.exit(two_passes.main())
"""


def start(
    folder: Path, suite: str, *options: str, limit: float = 300.0
) -> subprocess.Popen[str]:
    """Start the check of a suite with a limit of each pass."""
    (folder / "test_suite.py").write_text(HEAD + suite)
    (folder / "pytest.ini").write_text("[pytest]\n")
    # This test may be in a lane itself, which its own lanes must not take for theirs.
    outer = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(limit), *options], cwd=folder,
        stdout=subprocess.PIPE, text=True,
        # Plugins are loaded by each of the many processes.
        env={**outer, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


def passes(
    folder: Path, suite: str, *options: str, limit: float = 300.0
) -> tuple[int, list[str]]:
    """The exit code of the check of a suite, and what it printed after pytest."""
    with start(folder, suite, *options, limit=limit) as check:
        printed = check.communicate()[0]
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last_of_pytest = max(
        number for number, line in enumerate(lines) if line.startswith("=====")
    )
    return check.returncode, lines[last_of_pytest + 1 :]


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
        "test_raced": r"test_suite.py:17: AssertionError \(\S+ s\); then passed",
        "test_with_thing": r"test_suite.py:21: AssertionError \(\S+ s\); then passed",
        "test_that_ends_its_lane": r"worker 'gw\d' crashed while running 'test_suite.py::test_that_ends_its_lane' \(\S+ s\); then passed",
    }
    assert shown.keys() == {f"test_suite.py::{name}" for name in expected}
    for name, line in expected.items():
        assert re.fullmatch(line, shown[f"test_suite.py::{name}"])
    assert lines[-1] == "4 passed"


def test_a_file_that_was_not_imported_runs_whole(tmp_path: Path) -> None:
    # Each of the lanes imports the file, and the second pass has none.
    suite = "if LANE:\n    import nothing_like_it"
    code, (_, name, reason, total) = passes(tmp_path, suite)
    assert (code, name, total) == (0, "test_suite.py", "1 passed")
    assert reason.startswith("E   ModuleNotFoundError: No module named")


def test_a_file_that_one_lane_did_not_import_runs_whole(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass")
    suite = "if LANE == 'gw1':\n    import nothing_like_it"
    code, (_, name, reason, total) = passes(tmp_path, suite)
    assert (code, name, total) == (0, "test_suite.py", "2 passed")
    assert reason.startswith("E   ModuleNotFoundError: No module named")


@pytest.mark.slow
def test_a_class_and_a_folder_that_were_not_collected_run_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "test_other.py").write_text("def test_it():\n    pass")
    (folder / "conftest.py").write_text(
        "import os\nassert 'PYTEST_XDIST_WORKER' not in os.environ"
    )
    suite = """
class TestIt:
    @pytest.mark.parametrize("not_an_argument" if LANE else "n", [1, 2])
    def test_it(self, n):
        pass
"""
    code, lines = passes(tmp_path, suite)
    assert code == 0
    assert lines[1:-1:2] == ["folder", "test_suite.py::TestIt"]
    assert lines[-1] == "4 passed"


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
if LANE:
    def test_it():
        assert 0
"""
ORDER_OF_LANES = """
@pytest.mark.parametrize("n", [LANE])
def test_it(n):
    pass
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
        (
            ORDER_OF_LANES,
            ["lanes collected other tests than the first: "],
            "3 missing",
        ),
        (SIX, ["6 tests need a second pass; at most 5 may"], "6 failed, 1 passed"),
    ],
    ids=["wrong, skipped, a process", "missing", "lanes differ", "six"],
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


def test_a_lane_that_dies_outside_of_a_test_refuses_a_change(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("""
import os, signal

def pytest_sessionfinish():
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        os.kill(os.getpid(), signal.SIGKILL)
""")
    suite = "if LANE == 'gw1':\n    os.kill(os.getpid(), signal.SIGKILL)"
    code, lines = passes(tmp_path, suite)
    assert code == 1
    assert sorted(lines) == [
        "1 passed",
        "error: lane gw0 died outside of a test",
        "error: lane gw1 died outside of a test",
    ]


def test_a_pass_that_does_not_end_refuses_a_change(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("""
import os, signal

def pytest_sessionfinish():
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.pause()
""")
    code, lines = passes(tmp_path, "", limit=5.0)
    assert code == 1
    assert "error: pytest did not end within 5 s in the first pass" in lines


# At pytest's end a process imports a module, starts another process, and ends.
LEAVES_A_LATE_PROCESS = """
def test_it():
    pytest_ends = os.pidfd_open(os.getppid())
    late = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    program = f'''
import os, select, sys
select.select([{pytest_ends}], [], [])
os.execv(sys.executable, [sys.executable, "-c", {late!r}])
'''
    subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True,
        pass_fds=[pytest_ends], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
"""


def test_a_process_that_starts_after_the_pass_is_found(tmp_path: Path) -> None:
    code, (error, total) = passes(tmp_path, LEAVES_A_LATE_PROCESS)
    assert (code, total) == (1, "2 passed")
    assert re.fullmatch(r"error: a process did not end: \d+: sleep 600", error)


WAITS_FOR_A_SIGNAL = """
def test_it():
    sleep = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pids = f"{os.getppid()} {os.getpid()} {sleep.pid}"
    pathlib.Path(__file__).with_name("pids").write_text(pids)
    signal.pause()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_ends_what_the_check_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    with start(tmp_path, WAITS_FOR_A_SIGNAL) as check:
        started = [int(pid) for pid in pids.read_text().split()]
        check.send_signal(number)
    assert check.returncode == 128 + number
    assert len(started) == 3
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_a_torn_line_of_a_record_is_no_result(tmp_path: Path) -> None:
    record = tmp_path / "record"
    line = json.dumps({"test": "test_suite.py::test_it"})
    record.write_text(f"{line}\n{line[:9]}")
    results = two_passes._read(record, -9, []).results
    assert results == {"test_suite.py::test_it": two_passes.Result()}
