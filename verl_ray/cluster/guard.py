"""The guard of a cluster: a process that kills the cluster when the driver ends.

When a driver is killed, the kernel ends the head processes of its cluster, but Ray's
agents linger for a minute: they first report the death of the raylet to a server that
died with it. A worker that was started just before looks for its raylet for as long.

Invariant: no process of the cluster outlives the guard's input, which ends with the
driver or with the session. Deliberately not here: clusters that the session has not
started.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# The guard holds descriptors of the processes that it is given, so a later process with
# the same id is safe. It waits for the end of its input and kills them. It recognises
# the other processes of the cluster by their command line.
_PROGRAM = """
import contextlib, os, signal, sys

mark = os.fsencode(sys.argv[1])

def kill(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(process, signal.SIGKILL)

processes = []
for pid in sys.argv[2:]:
    with contextlib.suppress(ProcessLookupError):
        processes.append(os.pidfd_open(int(pid)))

sys.stdin.read()

for process in processes:
    kill(process)
for pid in filter(str.isdecimal, os.listdir('/proc')):
    with contextlib.suppress(OSError):
        process = os.pidfd_open(int(pid))
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            if int(pid) != os.getpid() and mark in file.read():
                kill(process)
        os.close(process)
"""


def start_guard(folder: Path, pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start the guard of the cluster with Ray's folder `folder`.

    Args:
        folder: Ray's folder of the cluster, which the command lines of all its workers
            name.
        pids: Processes of the cluster that have started already.

    Returns:
        The guard, which kills the cluster as soon as its input is closed.
    """
    mark = f"--raylet-name={folder}/"
    arguments = [mark, *(str(pid) for pid in pids)]
    return subprocess.Popen(
        [sys.executable, "-ISc", _PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        # Ctrl-C reaches the whole group of the driver. The guard is not in it, since
        # the driver closes the session in order.
        start_new_session=True,
    )
