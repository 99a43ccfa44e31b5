"""Tests in three processes, then those that failed once more, alone.

A test that fails in the first pass and passes in the second does not fail the check. The
table at the end names it, since it is a fault all the same, of the product or of itself.

Invariant: the check passes only if every test that was collected has passed or was
skipped in the first pass, or has passed in the second.

    python -m tests.two_passes -m "not slow"    the arguments are options of pytest
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

LANES = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")

MOST = 5
"""How many tests may need the second pass."""

SHOWN = 20
"""How many tests the table has."""

LEFT_S = 60.0
"""Seconds in which processes of a pass end after it. Ray's need 5 on a quiet machine."""

RECORD = "VERL_RAY_RECORD_OF_PASS"
"""Environment variable with the file of a pass that pytest runs."""


# ------------------------------------------------------------ a plugin of pytest, per pass


def pytest_configure(config: pytest.Config) -> None:
    """Record what pytest reports, in the process that has the reports of all lanes."""
    path = os.environ.get(RECORD)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(path)))


class _Recorder:
    """Writes a line for each test that is collected, and for each report."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(
        self, node: object, ids: Sequence[str]
    ) -> None:
        self._collected(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def _collected(self, ids: Sequence[str]) -> None:
        self._append([{"test": each} for each in ids])

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        lines = report.longreprtext.strip().splitlines() if report.failed else []
        entry = {
            "test": report.nodeid,
            "outcome": outcome,
            "last_line": lines[-1].strip() if lines else "",
            "seconds": getattr(report, "duration", 0.0),
        }
        self._append([entry])

    def _append(self, entries: Sequence[dict[str, object]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)


# -------------------------------------------------------------------------------- a pass


@dataclass
class Result:
    """What a pass showed of a test, or of a file that could not be collected."""

    outcomes: set[str] = field(default_factory=set)
    last_line: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """`missing` for a test that was collected and that nothing was reported of."""
        rank = ("failed", "skipped", "xfailed", "xpassed", "passed")
        return next((each for each in rank if each in self.outcomes), "missing")

    @property
    def is_good(self) -> bool:
        return self.outcome not in ("failed", "missing", "xpassed")


@dataclass
class Pass:
    """One run of pytest."""

    code: int
    results: dict[str, Result]
    left: list[str]
    """Processes that did not end after it."""


def run(arguments: Sequence[str]) -> Pass:
    """Run pytest in a process, with what it starts, and wait until all of that ends."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        command = [sys.executable, "-m", "pytest", "-p", "tests.two_passes", *arguments]
        process = subprocess.Popen(command, env={**os.environ, RECORD: str(record)})
        code = _wait(process)
        left = _end_what_is_left()
        return Pass(code, _read(record), left)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process.

    Orphans become children of this process and are reaped as they end. A test that
    waits for such a process would see a zombie otherwise.
    """
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _end_what_is_left() -> list[str]:
    """Wait for all processes of the pass, kill those that stay, and return their names."""
    processes = psutil.Process().children(recursive=True)
    staying = psutil.wait_procs(processes, timeout=LEFT_S)[1]
    names = []
    for process in staying:
        try:
            names.append(f"{process.pid}: {' '.join(process.cmdline())[:300]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(staying, timeout=LEFT_S)
    return names


def _read(record: Path) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        result = results.setdefault(entry["test"], Result())
        if "outcome" in entry:
            result.outcomes.add(entry["outcome"])
            result.seconds += entry["seconds"]
            result.last_line = result.last_line or entry["last_line"]
    return results


# ------------------------------------------------------------------------------ the check


def check(options: Sequence[str]) -> int:
    """Run both passes, print what they showed, and return the exit code.

    Args:
        options: Options of pytest. Names of tests would run in the second pass, too.
    """
    first = run([*LANES, "--durations", "20", *options])
    refusals = []
    if first.code not in (0, 1) or not first.results:
        refusals.append(f"pytest ended with {first.code} in the first pass")

    again = {name: each for name, each in first.results.items() if not each.is_good}
    second = Pass(0, {}, [])
    if first.code == 1 and not again:
        refusals.append("pytest ended with 1 in the first pass, and no test failed")
    elif len(again) > MOST:
        refusals.append(f"{len(again)} tests need a second pass; at most {MOST} may")
    elif again and not refusals:
        print(f"\nonce more, alone: {' '.join(again)}\n", flush=True)
        second = run([*options, *again])
        if second.code != 0:
            refusals.append(f"pytest ended with {second.code} in the second pass")
        refusals += [
            f"{name} did not pass in the second pass: {outcome}"
            for name in again
            if (outcome := _second_outcome(name, second)) != "passed"
        ]

    refusals += [f"a process did not end: {each}" for each in first.left + second.left]
    _report(first, second, again, refusals)
    return 1 if refusals else 0


def _second_outcome(name: str, second: Pass) -> str:
    """Return the outcome of a test, or the one of a file: passed if it was collected, some
    of its tests passed and none failed.
    """
    if "::" in name:
        return second.results.get(name, Result()).outcome
    tests = [
        each for test, each in second.results.items() if test.startswith(f"{name}::")
    ]
    failed = name in second.results or not all(each.is_good for each in tests)
    if failed:
        return "failed"
    return "passed" if any(each.outcome == "passed" for each in tests) else "missing"


def _report(
    first: Pass, second: Pass, again: dict[str, Result], refusals: Sequence[str]
) -> None:
    if again:
        print("\ntests that needed a second pass:")
    for name, result in list(again.items())[:SHOWN]:
        outcome = _second_outcome(name, second) if second.results else "not run again"
        why = result.last_line or result.outcome
        print(f"  {name}\n    {why} ({result.seconds:.1f} s); then {outcome}")
    if len(again) > SHOWN:
        print(f"  and {len(again) - SHOWN} others")
    for each in refusals:
        print(f"error: {each}")

    # A file that could not be collected counts by its tests.
    last = {**first.results, **second.results}
    for name in again:
        if "::" not in name and _second_outcome(name, second) == "passed":
            del last[name]
    counts = Counter(each.outcome for each in last.values())
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "missing")
    print(", ".join(f"{counts[each]} {each}" for each in order if counts[each]))


def main() -> int:
    """Make orphans of tests children of this process, and run the check."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # The terminal signals pytest, too, which ends by itself.
    signal.signal(signal.SIGINT, lambda *_: None)
    return check(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
