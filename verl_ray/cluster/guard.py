"""Whether Ray's own processes are well, and the end of a cluster with its driver.

The guard is a process that kills the cluster when the driver ends. It also tells the
driver when the raylet or the control store (gcs) ends or is stopped. The control store
of a cluster that the session has not started is asked for a reply every few seconds.

When a driver is killed, the kernel ends the head processes of its cluster, but Ray's
agents linger for a minute: they first report the death of the raylet to a server that
died with it. A worker that was started just before looks for its raylet for as long.

Invariant: no process of the cluster outlives the guard's input, which ends with the
driver or with the session. Of a cluster that the session has not started, the guard
only watches what it is given. A loss is noted before Ray's own limit, and not while the
control store replies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import ray

from verl_ray.cluster.waiting import ClusterLoss

STOPPED_S = 5.0
"""Seconds for which a process of Ray may be stopped (SIGSTOP) without a consequence.

Ray's control store gives a node up whose raylet does not reply for three times as long.
"""

_LOOK_S = 0.5

_END_S = 10.0
"""Limit in seconds for the end of the guard, which needs a tenth of one."""

# The guard holds descriptors of the processes that it is given, so a later process with
# the same id is safe. It names those on its output that end and are needed, waits for
# the end of its input, and kills all of them. It recognises the other processes of the
# cluster by their command line.
#
# It counts looks at a stopped process and not seconds, since it may be stopped itself,
# as when Slurm suspends a job. A process that was stopped for too long is named, and
# then continued: calls of the driver that wait inside of Ray would otherwise neither
# end nor survive the end of the process.
_PROGRAM = """
import contextlib, os, select, signal, sys

mark = os.fsencode(sys.argv[1])
look_s = float(sys.argv[2])
most_looks = int(sys.argv[3])

def send(process, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(process, number)

def tell(text):
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)

def is_stopped(pid):
    with contextlib.suppress(OSError):
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] == 'T'
    return False

processes = {}
for pid in sys.argv[4:]:
    with contextlib.suppress(OSError):
        with open(f'/proc/{pid}/comm') as file:
            name = file.read().strip()
        processes[os.pidfd_open(int(pid))] = pid, name

poll = select.poll()
poll.register(0, select.POLLIN)
looks = {}
for process, (_, name) in processes.items():
    if name in ('raylet', 'gcs_server'):
        poll.register(process, select.POLLIN)
        looks[process] = 0
ended = False
while not ended:
    for descriptor, _ in poll.poll(1000 * look_s):
        if descriptor in looks:
            poll.unregister(descriptor)
            del looks[descriptor]
            tell(f'{processes[descriptor][1]} has ended')
        else:
            ended = not os.read(0, 1)
    for process in looks:
        pid, name = processes[process]
        looks[process] = looks[process] + 1 if is_stopped(pid) else 0
        if looks[process] == most_looks:
            tell(f'{name} was stopped (SIGSTOP) for {look_s * most_looks:g} s')
            looks[process] = 0
            if mark:
                send(process, signal.SIGCONT)

if not mark:
    sys.exit()
for process in processes:
    send(process, signal.SIGKILL)
for pid in filter(str.isdecimal, os.listdir('/proc')):
    with contextlib.suppress(OSError):
        process = os.pidfd_open(int(pid))
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            if int(pid) != os.getpid() and mark in file.read():
                send(process, signal.SIGKILL)
        os.close(process)
"""


def start_guard(
    folder: Path | None, pids: Iterable[int], stopped_s: float = STOPPED_S
) -> subprocess.Popen[bytes]:
    """Start the guard of the cluster with Ray's folder `folder`.

    Args:
        folder: Ray's folder of the cluster, which the command lines of all its workers
            name. None for a cluster that nothing may be done to.
        pids: Processes of the cluster that have started already.
        stopped_s: Seconds for which a needed process may be stopped (SIGSTOP).

    Returns:
        The guard, which kills the cluster as soon as its input is closed. Its output
        has a line for each needed process that has ended or is stopped for too long.
    """
    mark = "" if folder is None else f"--raylet-name={folder}/"
    most_looks = max(1, round(stopped_s / _LOOK_S))
    arguments = [mark, _LOOK_S, most_looks, *pids]
    return subprocess.Popen(
        [sys.executable, "-ISc", _PROGRAM, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C reaches the whole group of the driver. The guard is not in it, since
        # the driver closes the session in order.
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """Close the guard's input, and wait until it has killed what remains.

    A guard that is stopped (SIGSTOP) goes on, and one that hangs is killed.
    """
    assert guard.stdin is not None, "it was started with a pipe"
    guard.stdin.close()
    for remedy in (signal.SIGCONT, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_END_S)
            return
        guard.send_signal(remedy)
    guard.wait()


def raylets_at(socket: str) -> list[int]:
    """Return the process id of the raylet with this socket; none on another machine.

    Args:
        socket: Path of the socket that processes of this machine connect to.
    """
    # Several raylets of a machine have sockets whose names begin alike.
    argument = f"--raylet_socket_name={socket}"
    raylets = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and argument in process.cmdline():
                raylets.append(process.pid)
    return raylets


# ---------------------------------------------------- whether the control store replies

# Ray waits a minute for a control store that does not reply, and then ends this process
# without a word. It waits for ever where one is stopped.

_RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable with Ray's own limit in seconds; it ends a process then."""

_RAYS_LIMIT_S = 60.0

_ASK_S = 2.0
_REPLY_S = 5.0


def patience_s() -> float:
    """Return for how many seconds a control store may be gone, as while it restarts.

    It is half of Ray's own limit, so that this process can still say why it ends.
    """
    return float(os.environ.get(_RAYS_LIMIT, _RAYS_LIMIT_S)) / 2


class HeadWatch:
    """Asks the control store every few seconds, in a thread of its own."""

    def __init__(self, address: str, limit_s: float, loss: ClusterLoss) -> None:
        """Begin to ask.

        Args:
            address: Address of the control store.
            limit_s: Seconds without a reply after which the cluster is lost.
            loss: Where this is noted.
        """
        self._address = address
        self._limit_s = limit_s
        self._loss = loss
        self._ask = _question(address)
        self._replied_s = time.monotonic()
        self._is_closed = threading.Event()
        for work in (self._ask_on, self._look_on):
            threading.Thread(target=work, name="head watch", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed.set()

    def _ask_on(self) -> None:
        # Asks until the watch is closed. Where the store is gone, Ray may keep a
        # question for longer than its own limit, so another thread looks at the time.
        while not self._is_closed.wait(_ASK_S):
            if self._ask(_REPLY_S):
                self._replied_s = time.monotonic()

    def _look_on(self) -> None:
        # Ends when the watch is closed, or with the loss.
        last_look_s = time.monotonic()
        while not self._is_closed.wait(_ASK_S):
            now_s = time.monotonic()
            # This process may have been stopped itself.
            if now_s - last_look_s > 2 * _ASK_S:
                self._replied_s = now_s
            last_look_s = now_s
            silent_s = now_s - self._replied_s
            if silent_s > self._limit_s:
                self._loss.note(
                    f"gcs_server at {self._address} has not replied for"
                    f" {silent_s:.0f} s"
                )
                return


def _question(address: str) -> Callable[[float], bool]:
    """Return a function that asks for a reply within seconds, whatever it is."""
    client = ray._raylet.GcsClient(address=address)

    def replies(within_s: float) -> bool:
        try:
            client.internal_kv_exists(b"verl_ray", namespace=None, timeout=within_s)
            return True
        # Ray's classes of errors of a connection have nothing in common.
        except Exception:
            return False

    return replies
