"""A guard for a process that runs users' code: whatever stops first, nothing stays.

The guard is a process that runs no user code and starts the worker, which does. It
kills every descendant, also those that moved to another session, and removes the folder
of their temporary files, in two cases: the other side of the worker's connection is
gone (a deadline, a closed pool, a kill -9 of the pool's process), or the worker has
died. Then it exits the way the worker did.

Invariant: it is no sandbox: it bounds how long user code lives, not what it does. Linux
only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import tempfile
from pathlib import Path

from verl_ray.ownership import prefix, remove_stale
from verl_ray.processes.command_guard import (
    adopt_orphans,
    die_with,
    kill_descendants,
    reap_the_dead,
    remove_folder,
    wake_on_child_exit,
)


def guarded_connection(descriptor: int) -> socket.socket:
    """Return the connection of a worker that has a guard from here on.

    Temporary files of the worker, and of what it starts, lie in a folder that the guard
    removes.

    Args:
        descriptor: The file descriptor of its socket.
    """
    folder = _temporary_folder()
    connection = socket.socket(fileno=descriptor)
    # A program that user code starts must not keep the connection open.
    connection.set_inheritable(False)
    _stand_guard(connection, folder)
    return connection


def _stand_guard(connection: socket.socket, folder: str) -> None:
    """Fork into the guard, which stays here, and the worker, which returns.

    The guard stays until the worker or the other side of the connection is gone; it
    never returns. Must be called before any user code and any thread. The guard holds
    `connection` open but never reads it: the other side sees the end of the stream only
    when every descendant is dead, and `folder` is removed.
    """
    wake = wake_on_child_exit()
    guard = os.getpid()
    # PR_SET_PDEATHSIG alone would not do: it spares grandchildren, and it fires when
    # the *thread* that started the process ends. It is the second line of defence
    # between worker and guard, which is a single thread that lives as long as its
    # process.
    adopt_orphans()

    worker = os.fork()
    if worker == 0:
        _become_worker(guard, wake)
        return

    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.register(wake, select.POLLIN)
    status = None
    # Waits for the end of the connection or of any child; consumes the wake-up bytes;
    # ends when the connection or the worker is gone.
    while status is None and connection.fileno() not in dict(poller.poll()):
        os.read(wake, 4096)
        status = reap_the_dead(worker)

    kill_descendants()
    remove_folder(folder)
    _exit_like(status or 0)


def _temporary_folder() -> str:
    """Make the folder of this process's temporary files; remove those of dead ones."""
    remove_stale(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=prefix("temporary"))
    os.environ["TMPDIR"] = folder
    # It is looked up again.
    tempfile.tempdir = None
    return folder


def _become_worker(guard: int, wake: int) -> None:
    """Turn the forked process into the worker, which dies with its guard."""
    waker = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(wake)
    os.close(waker)
    die_with(guard)


def _exit_like(status: int) -> None:
    """Exit the way `status` reports of the worker.

    The other side reads the cause of the worker's end from the guard's exit code.
    """
    if os.WIFSIGNALED(status):
        cause = os.WTERMSIG(status)
        # One core file is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # SIGKILL has no handler to reset.
        with contextlib.suppress(OSError):
            signal.signal(cause, signal.SIG_DFL)
        os.kill(os.getpid(), cause)
    os._exit(os.waitstatus_to_exitcode(status))
