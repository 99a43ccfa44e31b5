"""A child process with its guard, as its parent sees it: its connection, and its end.

Invariant: nothing that the child has started outlives it, this process, or `end`, which
is bounded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil

_GUARD_S = 60.0
"""Seconds that a guard may take to kill all of a process and remove its folder."""

_ROOT = str(Path(__file__).parents[2])
# What a module imports may start threads, so the guard comes first. The package may be
# importable here only because of how this process was started; the first frame has its
# `sys.path`.
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r});"
    " from verl_ray.processes.guard import guarded_connection;"
    " connection = guarded_connection({descriptor});"
    " from {module} import main; main(connection)"
)


class ChildProcess:
    """A process that calls `main(connection)` of a module, and has a guard."""

    def __init__(self, module: str) -> None:
        """Start the process, and do not wait for it.

        Args:
            module: Name of the module.

        Raises:
            OSError: It cannot be started.
        """
        self.connection, theirs = socket.socketpair()
        """This end of the connection to it."""
        program = _PROGRAM.format(root=_ROOT, descriptor=theirs.fileno(), module=module)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", program],
                    stdin=subprocess.DEVNULL,
                    # What it prints goes to the log, in one order with what it writes
                    # to stderr, and is no part of a command's output.
                    stdout=2,
                    pass_fds=[theirs.fileno()],
                    # What users' code makes of a set does not depend on the process.
                    env={**os.environ, "PYTHONHASHSEED": "0"},
                    # Ctrl-C is for the parent; the processes form one group, to kill.
                    start_new_session=True,
                )
        except BaseException:
            self.connection.close()
            raise
        self._was_stopped = False
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """Id of the process, which is that of its guard."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process, once it has ended."""
        return self._process.returncode < 0

    @property
    def is_stopped(self) -> bool:
        """Whether the process, or its guard, was stopped from outside (SIGSTOP)."""
        with contextlib.suppress(psutil.Error):
            guard = psutil.Process(self.pid)
            family = [guard, *guard.children()]
            return any(each.status() == psutil.STATUS_STOPPED for each in family)
        return False

    def hang_up(self) -> None:
        """Make the guard kill the process and everything that it started."""
        # It may have exited before, or be disconnected.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def end(self) -> str:
        """Hang up, and wait until the process and all that it started are gone.

        What it has sent can still be read.

        Returns:
            How it ended, as the end of a sentence.
        """
        with self._ending:
            # Once it has waited, its id may be that of another process.
            if self._process.returncode is None:
                self._was_stopped = self.is_stopped
                self._kill()
        code = self._process.returncode
        if self._was_stopped:
            return "was stopped (SIGSTOP)"
        if code >= 0:
            return f"exited with status {code}"
        cause = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            cause += ", as the system does where memory is short"
        return cause

    def _kill(self) -> None:
        self.hang_up()
        # Code of the parent's own may have waited for it.
        with contextlib.suppress(ProcessLookupError):
            # A guard that is stopped kills nothing.
            os.kill(self.pid, signal.SIGCONT)
            exited = os.pidfd_open(self.pid)
            poller = select.poll()
            poller.register(exited, select.POLLIN)
            poller.poll(1000 * _GUARD_S)
            os.close(exited)
        # The process group outlives a guard that hangs, or was itself killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
