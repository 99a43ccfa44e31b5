"""Tests in three processes, then those that failed once more, alone.

A test that fails in the first pass and passes in the second does not fail the check. The
table at the end names it, since it is a fault all the same, of the product or of itself.

Invariant: the check passes only if every test that was collected has passed or was
skipped in the first pass, or has passed in the second, and all processes that ran them
have ended by themselves.

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
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

LANES = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")

MOST = 5
"""How many tests may need the second pass."""

SHOWN = 20
"""How many tests the table has."""

PASS_S = 3600.0
"""Seconds in which a pass ends. A lane that hangs after its last test has no other limit."""

LEFT_S = 60.0
"""Seconds in which processes of a pass end after it. Ray's need 5 on a quiet machine."""

STOPS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end the check, with all that it started."""

NOTHING_SELECTED = 5
"""Exit code of pytest."""

RECORD = "VERL_RAY_RECORD_OF_PASS"
"""Environment variable with the file of a pass that pytest runs."""


# ------------------------------------------------------------ a plugin of pytest, per pass


def pytest_configure(config: pytest.Config) -> None:
    """Record what pytest reports, in the process that has the reports of all lanes."""
    path = os.environ.get(RECORD)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(path)))


class _Recorder:
    """Writes a line for each test that is collected, for each report, and for what
    happens to a lane.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lanes: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(
        self, node: Any, ids: Sequence[str]
    ) -> None:
        self._lanes.add(node.gateway.id)
        self._collected(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._append([{"lane": node.gateway.id, "event": "died"}])

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        self._append([{"lane": report.node.gateway.id, "event": "died in a test"}])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # xdist has such a report with the name of a lane that collected other tests.
        if report.nodeid in self._lanes:
            self._append([{"lane": report.nodeid, "event": "differs"}])
        elif report.failed:
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

    code: int | None
    """Its exit code, or None where it did not end within PASS_S and was killed."""
    results: dict[str, Result] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    """Lanes that died, but not in a test."""
    differ: list[str] = field(default_factory=list)
    """Lanes that collected other tests than the first one. No lane runs a test then."""
    left: list[str] = field(default_factory=list)
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
        return _read(record, code, left)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process, or None if it was killed after PASS_S.

    Orphans become children of this process and are reaped as they end. A test that
    waits for such a process would see a zombie otherwise.
    """
    late = []

    def kill(*_: object) -> None:
        late.append(True)
        _signal_all(signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, PASS_S)
    pid, status = os.waitpid(-1, 0)
    while pid != process.pid:
        pid, status = os.waitpid(-1, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return None if late else process.returncode


def _signal_all(number: int) -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end_what_is_left() -> list[str]:
    """Wait for all processes of the pass, kill those that stay, and return their names.

    Each of them may start others before it ends, so it looks until it finds none.
    """
    names = []
    limit = time.monotonic() + LEFT_S
    while left := psutil.Process().children(recursive=True):
        now = time.monotonic()
        if now < limit:
            psutil.wait_procs(left, timeout=limit - now)
            continue
        if now > limit + LEFT_S:
            break
        for process in left:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{process.pid}: {' '.join(process.cmdline())[:300]}")
                process.kill()
        psutil.wait_procs(left, timeout=LEFT_S)
    return names


def _read(record: Path, code: int | None, left: list[str]) -> Pass:
    """Return the pass that a record is of."""
    lanes: dict[str, list[str]] = {"died": [], "died in a test": [], "differs": []}
    results: dict[str, Result] = {}
    # What follows the last line break is empty, or torn where pytest was killed.
    for line in record.read_text().split("\n")[:-1]:
        entry = json.loads(line)
        if "lane" in entry:
            lanes[entry["event"]].append(entry["lane"])
            continue
        result = results.setdefault(entry["test"], Result())
        if "outcome" in entry:
            result.outcomes.add(entry["outcome"])
            result.seconds += entry["seconds"]
            result.last_line = result.last_line or entry["last_line"]
    dead = [lane for lane in lanes["died"] if lane not in lanes["died in a test"]]
    return Pass(code, results, dead, lanes["differs"], left)


# ------------------------------------------------------------------------------ the check


def check(options: Sequence[str]) -> int:
    """Run both passes, print what they showed, and return the exit code.

    Args:
        options: Options of pytest. Names of tests would run in the second pass, too.
    """
    first = _first_pass(options)
    again = {name: each for name, each in first.results.items() if not each.is_good}
    refusals = _refusals(first, again)
    second = Pass(0)
    if again and not refusals:
        print(f"\nonce more, alone: {' '.join(again)}\n", flush=True)
        second = run([*options, *again])
        if second.code != 0:
            refusals.append(f"pytest {_end(second)} in the second pass")
        refusals += [
            f"{name} did not pass in the second pass: {outcome}"
            for name in again
            if (outcome := _second_outcome(name, second)) != "passed"
        ]

    refusals += [f"a process did not end: {each}" for each in first.left + second.left]
    _report(first, second, again, refusals)
    return 1 if refusals else 0


def _first_pass(options: Sequence[str]) -> Pass:
    """Run the tests in lanes.

    Lanes run nothing if they collected different tests. Where that is because some of
    them could not collect a file, they start once more without it, and it counts as
    failed.
    """
    command = [*LANES, "--durations", "20", *options]
    first = run(command)
    broken = {
        name.partition("::")[0]: each
        for name, each in first.results.items()
        if each.outcome == "failed"
    }
    if not first.differ or not broken:
        return first
    print(f"\nonce more, without: {' '.join(broken)}\n", flush=True)
    rest = run([*command, *(f"--ignore={name}" for name in broken)])
    return Pass(
        1 if rest.code in (0, NOTHING_SELECTED) else rest.code,
        {**rest.results, **broken},
        first.dead + rest.dead,
        rest.differ,
        first.left + rest.left,
    )


def _refusals(first: Pass, again: dict[str, Result]) -> list[str]:
    """Return why the check fails whatever a second pass would show."""
    refusals = [f"lane {lane} died outside of a test" for lane in first.dead]
    if first.differ:
        lanes = ", ".join(first.differ)
        refusals.append(f"lanes collected other tests than the first: {lanes}")
    elif first.code not in (0, 1) or not first.results:
        refusals.append(f"pytest {_end(first)} in the first pass")
    elif first.code == 1 and not again:
        refusals.append("pytest ended with 1 in the first pass, and no test failed")
    elif len(again) > MOST:
        refusals.append(f"{len(again)} tests need a second pass; at most {MOST} may")
    return refusals


def _end(one: Pass) -> str:
    if one.code is None:
        return f"did not end within {PASS_S:g} s"
    return f"ended with {one.code}"


def _second_outcome(name: str, second: Pass) -> str:
    """Return the outcome of a test, or the one of a folder, file or class: passed if it
    was collected, some of its tests passed and none failed.
    """
    tests = [
        each
        for test, each in second.results.items()
        if test.startswith((f"{name}/", f"{name}::"))
    ]
    if not tests:
        return second.results.get(name, Result()).outcome
    if name in second.results or not all(each.is_good for each in tests):
        return "failed"
    return "passed" if any(each.outcome == "passed" for each in tests) else "missing"


def _report(
    first: Pass, second: Pass, again: dict[str, Result], refusals: Sequence[str]
) -> None:
    print()  # a pass that was killed has ended within a line
    if again:
        print("tests that needed a second pass:")
    for name, result in list(again.items())[:SHOWN]:
        outcome = _second_outcome(name, second) if second.results else "not run again"
        why = result.last_line or result.outcome
        print(f"  {name}\n    {why} ({result.seconds:.1f} s); then {outcome}")
    if len(again) > SHOWN:
        print(f"  and {len(again) - SHOWN} others")
    for each in refusals:
        print(f"error: {each}")

    # What could not be collected counts by its tests.
    last = {**first.results, **second.results}
    for name in again:
        if name not in second.results and _second_outcome(name, second) == "passed":
            del last[name]
    counts = Counter(each.outcome for each in last.values())
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "missing")
    print(", ".join(f"{counts[each]} {each}" for each in order if counts[each]))


def _stop(number: int, _: object) -> None:
    """Pass a signal on to all that the check started, see that it ends, and exit."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    _signal_all(number)
    _end_what_is_left()
    sys.exit(128 + number)


def main() -> int:
    """Make orphans of tests children of this process, and run the check."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # The terminal signals pytest, too, which ends by itself.
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    return check(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
