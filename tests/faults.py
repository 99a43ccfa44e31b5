"""`verl-ray` in a process in which something dies, stops or is held where it is told to.

A fault is written as PHASE@COUNT:ACTION=PROCESS, with an optional +SECONDS: as the phase
of the driver begins for the COUNT-th time, or so many seconds later, the action is
taken::

    python -m tests.faults updating@2:kill=rollout-0 saving@3:kill=driver+0.01 -- train ...

A phase is named by the beginning of its text. Actions are kill (signal 9), freeze
(stopped for good), hold (stopped for two seconds), slow (stopped for most of the time),
starve (no memory beyond what it has), full (no byte into a file, for a second),
stop (SIGINT), and outage and hour, which somebody outside of the run brings about
(`tests/surroundings.py`) and of which only the line below is written. A process is called by the name of its log without the number of its
incarnation, or `driver`, or by its own name if it descends from the driver; `NAME-child`
are those that NAME has started. With `--supervised` before the faults the driver is the
child of a supervisor, and a fault that has happened does not happen to a later driver.
When each happened is a line of the file HAPPENED in run.dir, and when each phase began
one of the file BEGUN. Deliberately not here: what a run does afterwards.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from controllers.supervisor import (
    is_supervised,
    report_to_supervisor,
    reports,
    supervise,
)
from verl_ray.profiling import phases

ROLLOUTS = "rollouts"
"""Name of the phases whose text says how far rollouts are."""
PHASES = (
    "switching to training",
    ROLLOUTS,
    "computing log-probs",
    "assigning credit",
    "updating",
    "publishing weights",
    "saving",
)
LOADING = "loading the"
"""How the text of the phase begins in which processes start."""
HAPPENED = "happened.jsonl"
BEGUN = "begun.jsonl"
SUPERVISED = "--supervised"
OUTSIDE = ("outage", "hour")
"""Actions that are taken outside of the run."""
_ACTIONS = "|".join(
    ("kill", "freeze", "hold", "slow", "starve", "full", "stop", *OUTSIDE)
)
_FAULT = re.compile(rf"(.+)@(\d+):({_ACTIONS})=([\w:-]+)(?:\+([\d.]+))?")
_HELD_S = 2.0
_FULL_S = 1.0
_PATIENCE_S = 60.0
"""Longest wait for a process that starts."""

_SLOW = "for turn in {1..160}; do kill -STOP $0 2>&- || exit; sleep 0.05; kill -CONT $0 2>&-; sleep 0.01; done"
"""Stops a process for 50 ms of each 60, about 10 s long. It is a program, since a driver
that is stopped cannot continue itself."""


@dataclass(frozen=True)
class Fault:
    """What happens to a process, and when.

    Attributes:
        phase: The phase of the driver in which it happens.
        count: The how manieth phase of this name, from 1.
        action: One of the actions above.
        process: The name of a process, as above.
        after_s: Seconds from the beginning of the phase.
    """

    phase: str
    count: int
    action: str
    process: str = "driver"
    after_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = _FAULT.fullmatch(text)
        assert match is not None, f"{text!r} is not PHASE@COUNT:ACTION=PROCESS+SECONDS"
        phase, count, action, process, after_s = match.groups()
        return cls(phase, int(count), action, process, float(after_s or 0))

    def __str__(self) -> str:
        fault = f"{self.phase}@{self.count}:{self.action}={self.process}"
        return f"{fault}+{self.after_s:g}" if self.after_s else fault

    @property
    def is_at_once(self) -> bool:
        """Whether the driver does not go on before it has happened."""
        waits = self.after_s or self.phase.startswith(LOADING)
        return not waits and self.action not in ("hold", "full")

    def happen(self, logs: Path) -> None:
        """Act now, in a thread of its own unless it is done at once."""
        if self.after_s:
            time.sleep(self.after_s)
        found = processes(logs, self.process)
        until = time.monotonic() + _PATIENCE_S
        while self.phase.startswith(LOADING) and not found:
            assert time.monotonic() < until, f"{self.process} does not start"
            time.sleep(0.01)
            found = processes(logs, self.process)

        happened = {"fault": str(self), "time": time.time(), "found": len(found)}
        _append(logs.parent / HAPPENED, happened)
        # Where there is none, it has died already, and not started again yet.
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._act(process)

    def _act(self, process: psutil.Process) -> None:
        match self.action:
            case "kill":
                process.kill()
            case "freeze":
                process.suspend()
            case "stop":
                process.send_signal(signal.SIGINT)
            case "hold":
                process.suspend()
                try:
                    time.sleep(_HELD_S)
                finally:
                    process.resume()
            case "slow":
                subprocess.Popen(["bash", "-c", _SLOW, str(process.pid)])
            case "starve":
                _limit(process.pid, resource.RLIMIT_AS, process.memory_info().vms)
            case "full":
                before = _limit(process.pid, resource.RLIMIT_FSIZE, 0)
                try:
                    time.sleep(_FULL_S)
                finally:
                    _limit(process.pid, resource.RLIMIT_FSIZE, before)


def _limit(pid: int, what: int, most: int) -> int:
    """Set the soft limit of a process; return what it was."""
    before, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, hard))
    return before


def _append(path: Path, line: dict[str, object]) -> None:
    # The disk of the run may be full, by one of these faults.
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def processes(logs: Path, name: str) -> list[psutil.Process]:
    """Return the processes of this name of the run whose driver this process is."""
    driver = psutil.Process()
    if name == "driver":
        return [driver]
    behind = process_behind(newest_log(logs, name.removesuffix("-child")))
    if behind is not None:
        return behind.children(recursive=True) if name.endswith("-child") else [behind]

    found = []
    for child in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return found


def newest_log(logs: Path, process: str) -> Path:
    """Return the log of a process's last incarnation."""
    later = logs.glob(f"{process}.*.log")
    numbers = [int(log.name.split(".")[-2]) for log in later]
    return logs / (f"{process}.{max(numbers)}.log" if numbers else f"{process}.log")


def process_behind(log: Path) -> psutil.Process | None:
    """Return the process whose output goes to a file; None if there is none."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log.resolve():
                return process
    return None


def watch(faults: list[Fault], logs: Path) -> None:
    """Let the faults happen in the phases of this process that begin from now on."""
    counts = Counter[Fault]()
    begins = phases.PHASES.phase

    def happening(names: tuple[str, ...]) -> list[Fault]:
        found = []
        for fault in faults:
            if any(name.startswith(fault.phase) for name in names):
                counts[fault] += 1
                if counts[fault] == fault.count:
                    found.append(fault)
        return found

    @contextlib.contextmanager
    def watched(text: phases.Text) -> Iterator[phases.OpenPhase]:
        names = (text,) if isinstance(text, str) else (ROLLOUTS, text())
        with begins(text) as opened:
            if logs.parent.exists():
                _append(logs.parent / BEGUN, {"phase": names[-1], "time": time.time()})
            for fault in happening(names):
                if fault.is_at_once:
                    fault.happen(logs)
                else:
                    threading.Thread(
                        target=fault.happen, args=[logs], daemon=True
                    ).start()
            yield opened

    # Modules that are imported later take this one.
    phases.phase = watched


def main(arguments: list[str]) -> int:
    """Run a command with faults; a run.dir is among its overrides."""
    cut = arguments.index("--")
    if arguments[0] == SUPERVISED:
        if not is_supervised():
            return supervise(sys.orig_argv)
        report_to_supervisor()

    # A supervisor appends the folder of the first driver, which is the same.
    *_, run_dir = [
        argument.removeprefix("run.dir=")
        for argument in arguments[cut:]
        if argument.startswith("run.dir=")
    ]
    folder = Path(run_dir)
    faults = [Fault.parse(fault) for fault in arguments[:cut] if fault != SUPERVISED]
    if reports().restarts and (folder / HAPPENED).exists():
        happened = (folder / HAPPENED).read_text()
        faults = [fault for fault in faults if json.dumps(str(fault)) not in happened]
    watch(faults, folder / "logs")

    from controllers.command_line import main as verl_ray

    try:
        return verl_ray(arguments[cut + 1 :])
    finally:
        reports().end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
