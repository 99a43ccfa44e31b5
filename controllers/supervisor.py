"""The supervisor of `verl-ray train`: it starts the driver, and starts it again.

The supervisor is the process that the user or Ray started. The driver is its child, and
reports through a pipe what it finishes and what may be tried again. So the supervisor
needs neither configuration nor cluster, and nothing of the run can break it.

Invariant: a driver that was killed, that ended without its last report, or that has a
failure which another driver may not have, is followed by another one, until too many
bring no new step. One that is refused before it begins, by what may pass, is tried
again until that has taken too long. Otherwise the exit code is the supervisor's own,
and so is that of a driver that was told to stop. Signals go on to the driver.

Deliberately not here: failures that the driver cures itself (`run/restart.py`). This
module imports nothing but Python's library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_PIPE = "VERL_RAY_SUPERVISOR"
"""Environment variable of the driver: what `Reports` takes, as JSON.

Only the driver sees it, and takes it out of its environment.
"""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PAUSE_S = 3.0
"""Time between two drivers. What a killed one leaves ends within it."""

_LONGEST_PAUSE_S = 60.0

_LAST_REPORTS_S = 1.0
"""Time for the last reports of a driver that has ended."""

_LOOK_S = 5.0
"""Time between two looks at a driver. One that is stopped (SIGSTOP) at two of them in a
row is continued: it would wait for ever, and loses nothing."""

_STOPPED = 130
"""Exit code of a driver that was told to stop (`Interrupted`, `verl_ray/errors.py`)."""

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


# ----------------------------------------------------------------------- the supervisor


def supervise(command: Sequence[str]) -> int:
    """Run a driver, and others after it if need be; return the last one's exit code.

    Args:
        command: The command of the driver.
    """
    signals = _ForwardedSignals()
    budget = _Budget()
    number = 0

    # Each round is one driver. It ends with one that is not followed by another.
    while True:
        number += 1
        code = _run_driver(command, number, signals, budget)
        if signals.received is not None or not budget.allows_another(code):
            return code if code >= 0 else 128 - code

        # A cluster of somebody else's may need a while to come back.
        num_before = budget.refusals or budget.without_step
        # A power of many refusals is no float.
        pause_s = min(_PAUSE_S * 2.0 ** min(num_before - 1, 16), _LONGEST_PAUSE_S)
        _say(f"warning: {budget.outlook(code, pause_s)}")
        # A sleep would go on after a signal.
        if signals.arrived.wait(pause_s):
            return _STOPPED


def _say(text: str) -> None:
    """Print to stderr, which may be closed by now."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class _ForwardedSignals:
    """Sends the signals that stop a run on to the driver."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The first of them; None before it."""
        self.arrived = threading.Event()
        self.driver: subprocess.Popen[bytes] | None = None
        for number in _FORWARDED:
            # One that is ignored, as SIGHUP under `nohup`, is ignored by both.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._forward)

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number
        self.arrived.set()
        if self.driver is not None:
            self.driver.send_signal(number)


class _Budget:
    """How many drivers may follow, by what the drivers reported."""

    def __init__(self) -> None:
        self.limit = 0
        """How many may follow without a new step."""
        self.without_step = 0
        """How many drivers in a row have brought no new step."""
        self._newest_step = 0
        self._reason = ""
        self._may_repeat = True
        self._reasons_without_step: set[str] = set()
        self._is_orderly = False
        self.refusals = 0
        """How many drivers in a row were refused before they began; 0 where the last
        one was not."""
        self._refusal = ""
        """What refused the last driver, if it may pass."""
        self._refused_since_s = 0.0
        self._longest_wait_s = 0.0
        self.has_begun = False
        """Whether all of the run has started in a driver."""
        self.has_saved = False
        """Whether a driver has written a checkpoint."""
        self.has_alerted = False
        """Whether W&B's alert about the present wait was sent."""
        self.run_dir = ""
        """Folder of the run; empty until a driver has claimed it."""
        self.same_run: list[str] = []
        """Overrides that make a later driver's run the same as the first one's."""

    def begin(self) -> None:
        """Note that a driver begins."""
        self._reason = self._refusal = ""
        self._may_repeat = True
        self._is_orderly = False

    def note(self, report: dict[str, Any]) -> None:
        """Take a report of a driver."""
        if "max_restarts" in report:
            self.limit = report["max_restarts"]
            self._longest_wait_s = report["max_wait_s"]
            self.same_run = report["same_run"]
            self.run_dir = report["run_dir"]
        if "begun" in report:
            self.has_begun = True
            self.refusals = 0
            self.has_alerted = False
        self.has_alerted = report.get("alerted", self.has_alerted)
        self._refusal = report.get("refused", self._refusal)
        if report.get("step", 0) > self._newest_step:
            self._newest_step = report["step"]
            self.without_step = 0
            self._reasons_without_step.clear()
        self.has_saved = report.get("saved", self.has_saved)
        self._reason = report.get("retry", self._reason)
        self._may_repeat = not report.get("once", not self._may_repeat)
        self._is_orderly = report.get("orderly", self._is_orderly)

    def allows_another(self, code: int) -> bool:
        """Whether another driver follows one that ended with this code."""
        was_told_to_stop = code == _STOPPED or -code in _FORWARDED
        if was_told_to_stop:
            return False
        if self._refusal and not self._reason:
            return self._may_wait()
        if self._is_orderly and not self._reason:
            return False
        self.refusals = 0
        # Numbers, as of a process, differ.
        signature = re.sub(r"\d+", "N", self._reason)
        if not self._may_repeat and signature in self._reasons_without_step:
            _say(f"{self.ending(code)}: the second time without a new step")
            return False
        self._reasons_without_step.add(signature)
        if self.without_step >= self.limit:
            if self.limit:
                _say(
                    f"{self.ending(code)}, and {self.without_step} before it brought no"
                    f" new step (run.recovery.max_restarts = {self.limit})"
                )
            return False
        self.without_step += 1
        return True

    def _may_wait(self) -> bool:
        """Whether another driver is tried after one that was refused."""
        now_s = time.monotonic()
        if not self.refusals:
            self._refused_since_s = now_s
        self.refusals += 1
        waited_s = now_s - self._refused_since_s
        if waited_s < self._longest_wait_s:
            return True
        _say(
            f"{self._refusal}: the run has waited for this for {waited_s:.0f} s"
            f" (run.recovery.max_wait_s = {self._longest_wait_s:g})"
        )
        return False

    def outlook(self, code: int, pause_s: float) -> str:
        """Return how a driver ended, and when the next one starts, in words."""
        if self.refusals:
            waited_s = time.monotonic() - self._refused_since_s
            return (
                f"the run waits for what refuses its start: {self._refusal}; it starts"
                f" again in {pause_s:g} s ({waited_s:.0f} of at most"
                f" {self._longest_wait_s:g} s)"
            )
        return (
            f"{self.ending(code)}; it starts again in {pause_s:g} s (number"
            f" {self.without_step} of at most {self.limit} without a new step)"
        )

    def ending(self, code: int) -> str:
        """Return how a driver ended, in words."""
        reason = self._reason
        if code < 0:
            with contextlib.suppress(ValueError):
                reason = f"signal {signal.Signals(-code).name}"
        reason = reason or f"exit code {code}, without a word"
        return f"the driver ended after step {self._newest_step} ({reason})"


def _run_driver(
    command: Sequence[str], number: int, signals: _ForwardedSignals, budget: _Budget
) -> int:
    """Run one driver to its end; return its code, the negative number of a signal."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    about = {
        "descriptor": writing,
        "restarts": number - 1,
        "follows_begun": budget.has_begun,
        "follows_saved": budget.has_saved,
        "supervisor": os.getpid(),
        "run_dir": budget.run_dir,
        "has_alerted": budget.has_alerted,
    }
    driver = subprocess.Popen(
        [*command, *budget.same_run],
        env={**os.environ, _PIPE: json.dumps(about)},
        pass_fds=[writing],
    )
    os.close(writing)
    signals.driver = driver
    # A signal may have come before there was a driver.
    if signals.received is not None:
        driver.send_signal(signals.received)

    budget.begin()
    # A process that the driver has forked may keep the pipe open after its end.
    reader = threading.Thread(target=_read, args=[reading, budget], daemon=True)
    reader.start()
    code = _wait_for(driver)
    reader.join(_LAST_REPORTS_S)
    signals.driver = None
    return code


def _wait_for(driver: subprocess.Popen[bytes]) -> int:
    """Return the code of a driver at its end, and let it go on if it is stopped."""
    was_stopped = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return driver.wait(_LOOK_S)
        is_stopped = _is_stopped(driver.pid)
        if was_stopped and is_stopped:
            _say("warning: the driver was stopped (SIGSTOP), and goes on")
            driver.send_signal(signal.SIGCONT)
        was_stopped = is_stopped


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
    return False


def _read(pipe: int, budget: _Budget) -> None:
    """Note what a driver reports, until its end of the pipe is closed."""
    with os.fdopen(pipe, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                budget.note(json.loads(line))


# ------------------------------------------------------------------------ in the driver


class Reports:
    """The way from a driver to its supervisor, if it has one."""

    def __init__(
        self,
        descriptor: int | None = None,
        restarts: int = 0,
        *,
        follows_begun: bool = False,
        follows_saved: bool = False,
        supervisor: int | None = None,
        run_dir: str = "",
        has_alerted: bool = False,
    ) -> None:
        """Take the descriptor of the pipe; None without a supervisor."""
        self._descriptor = descriptor
        self.supervisor = supervisor
        """Process id of the supervisor; None without one."""
        self.has_asked = False
        """Whether this driver has asked its supervisor for another one."""
        self.restarts = restarts
        """How many drivers of this command came before."""
        self.follows_begun = follows_begun
        """Whether all of the run has started in one of them."""
        self.follows_saved = follows_saved
        """Whether one of them has written a checkpoint."""
        self.run_dir = run_dir
        """Folder of the run of those before; empty without one."""
        self.has_alerted = has_alerted
        """Whether W&B's alert about the present wait was sent."""
        self.has_begun = False
        """Whether all of the run has started."""

    def limit(
        self,
        max_restarts: int,
        max_wait_s: float,
        same_run: Sequence[str],
        run_dir: str,
    ) -> None:
        """Report that a killed driver may be followed by others.

        Args:
            max_restarts: By how many without a new step.
            max_wait_s: Longest time in seconds in which others are refused.
            same_run: Overrides of their commands, since the name of a run may hold the
                time.
            run_dir: Folder of the run.
        """
        self._write(
            {
                "max_restarts": max_restarts,
                "max_wait_s": max_wait_s,
                "same_run": list(same_run),
                "run_dir": run_dir,
            }
        )

    def begun(self) -> None:
        """Report that all of the run has started."""
        self.has_begun = True
        self._write({"begun": True})

    def refused(self, reason: str) -> None:
        """Report what refuses the start of this driver, and may pass."""
        self._write({"refused": reason})

    def alerted(self) -> None:
        """Report that W&B's alert about the present wait was sent."""
        self._write({"alerted": True})

    def saved(self) -> None:
        """Report that a checkpoint is written."""
        self._write({"saved": True})

    def finished(self, step: int) -> None:
        """Report a finished step."""
        self._write({"step": step})

    def retry(self, reason: str, *, once: bool = False) -> None:
        """Report that this driver ends with a failure that another may not have.

        Args:
            reason: The failure, in words.
            once: Whether the same one again, without a new step, is the last.
        """
        # Without a supervisor none follows, and the process may make further runs.
        self.has_asked = self._descriptor is not None
        self._write({"retry": reason, "once": once})

    def end(self) -> None:
        """Report that this driver has come to its end and said why."""
        self._write({"orderly": True})

    def _write(self, report: dict[str, object]) -> None:
        if self._descriptor is not None:
            # A supervisor that was killed reads nothing.
            with contextlib.suppress(OSError):
                os.write(self._descriptor, (json.dumps(report) + "\n").encode())


def is_supervised() -> bool:
    """Whether a supervisor has started this process."""
    return _PIPE in os.environ


_reports = Reports()


def reports() -> Reports:
    """Return the way to the supervisor of this process."""
    return _reports


def report_to_supervisor() -> None:
    """Report to the supervisor that has started this process, from now on.

    The process is told to stop (SIGTERM) if its supervisor is killed.
    """
    global _reports
    about = json.loads(os.environ.pop(_PIPE))
    os.set_inheritable(about["descriptor"], False)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != about["supervisor"]:
        # It was killed before the last call.
        os.kill(os.getpid(), signal.SIGTERM)
    _reports = Reports(**about)
