"""A scoring process is two: a guard that runs no user code, and the scorer that it started.

Invariant: whatever ends first, nothing stays behind. When the other side of the connection is gone (a deadline, the
end of the pool, a kill -9 of its process) or the scorer has died, the guard kills every descendant, also those that
moved to a session of their own, and then ends the way the scorer ended. Deliberately not a sandbox: it bounds how
long user code lives, not what it does. Linux only.

Why not PR_SET_PDEATHSIG alone: it spares grandchildren, and it fires when the *thread* that started the process
ends. Between scorer and guard, a single thread that lives as long as its process, it is the second line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def stand_guard(connection: socket.socket) -> None:
    """Fork: return in the new process, the scorer; stay here, in the guard, until it or the other side is gone.

    Must be called before any user code and any thread. The guard holds `connection` open but never reads it: the other
    side sees the end of the stream only when every descendant is dead.
    """
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up pipe
    guard = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become our children, where we find them
    scorer = os.fork()
    if scorer == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(wake)
        os.close(waker)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)
        return

    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.register(wake, select.POLLIN)
    status = None
    while status is None and connection.fileno() not in dict(poller.poll()):
        os.read(wake, 4096)
        status = _reap_the_dead(scorer)
    _kill_descendants()
    _end_like(status or 0)


def _reap_the_dead(scorer: int) -> int | None:
    """Reap every child that has ended; the wait status of the scorer if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == scorer:
                status = ended[1]
    return status


def _kill_descendants() -> None:
    """Kill children until there are none; the children of each one that dies become ours, and are next."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children_of(os.getpid()):
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children_of(parent: int) -> list[int]:
    children = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we were looking
            # "pid (name) state parent ...", where the name may hold spaces and parentheses
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(entry.parent.name))
    return children


def _end_like(status: int) -> None:
    """End this process the way `status` says the scorer ended, so that the pool reads the cause from the exit code."""
    if os.WIFSIGNALED(status):
        cause = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(cause, signal.SIG_DFL)
        os.kill(os.getpid(), cause)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
