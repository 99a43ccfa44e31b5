"""Program of a guard that runs a command, and leaves nothing of it.

The guard runs no code of the user's. The command has a session of its own, and what it
starts stays a descendant of the guard, whatever it detaches itself from: see
`adopt_orphans`. The guard kills all descendants once the command has ended, once there
are too many of them, or once the other side of its connection is gone. Meanwhile it
reads what the command prints, so that nobody else has to.

Invariant: it sends a byte once the command is started, and one report. Its own end is
the last thing that happens. It imports little, since each episode of a command starts
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

MOST_OUTPUT_BYTES = 16 * 1024
"""Bytes of stdout, and of stderr, that are in the report: the last ones."""

ENDED, TOO_MANY, HUNG_UP = "ended", "too_many", "hung_up"
"""Why a guard has killed what there was: the first word of its report."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_READ_BYTES = 64 * 1024
_MOST_PIPE_BYTES = 1024 * 1024

_NICENESS = 5
"""Niceness of the command, beside that of its guard."""

_MOST_FILES = 1024
"""Files that a process of the command may have open. Some programs close, or look at,
as many as there may be."""

_REST_S = 0.002
"""Rest after each read of output. Whoever prints without end fills the pipe meanwhile,
and waits."""

_REAPED = 10_000
"""Children that are reaped before the next look at all else."""

_LOOK_S = 0.1
"""How often it is asked whether there may be too many descendants."""

_MUCH = 4
"""How many times as many threads as there may be descendants are a reason to count."""

_COUNT_S = 30.0
"""How often they are counted in any case."""

_MARKED_S = 30.0
"""Seconds after which processes are left alone that fork faster than they are killed by
their mark."""


def main() -> None:
    """Run the command of the arguments, and report.

    The arguments are the file descriptor of the connection, the number of processes
    that the command may have, its folder, which the guard removes, and its words. Its
    environment and its stdin are the guard's own.
    """
    descriptor, most, folder, *words = sys.argv[1:]
    connection = int(descriptor)
    os.set_inheritable(connection, False)
    wake = wake_on_child_exit()
    adopt_orphans()

    stdout, stdout_end = os.pipe()
    stderr, stderr_end = os.pipe()
    command = _start(words, folder, stdout_end, stderr_end)
    os.close(stdout_end)
    os.close(stderr_end)
    _send(connection, b"+")
    tails = [_Tail(stdout), _Tail(stderr)]
    cause, status = _watch(connection, wake, command, tails, _ProcessCount(int(most)))

    if cause == TOO_MANY:
        _go_first()
    if cause != ENDED:
        # Mostly that is all, and nothing has to be looked for.
        _kill({command: command})
        time.sleep(0.002)
    survivors = kill_descendants()
    for tail in tails:
        tail.read_rest()
    remove_folder(folder)
    if survivors:
        ids = ", ".join(map(str, survivors))
        print(f"{words[0]}: process {ids} may not be killed from here", file=sys.stderr)

    code = os.waitstatus_to_exitcode(status)
    out, err = tails
    counts = f"{out.num_bytes} {len(out.data)} {err.num_bytes}"
    report = f"{cause} {code} {counts}\n".encode() + out.data + err.data
    _send(connection, report)
    sys.stderr.flush()
    # What Python does at its end would take a quarter of the whole time.
    os._exit(0)


def _send(connection: int, message: bytes) -> None:
    # Nobody may wait for it any more.
    with contextlib.suppress(OSError):
        while message:
            message = message[os.write(connection, message) :]


def _start(words: list[str], folder: str, stdout: int, stderr: int) -> int:
    """Start a command in a folder; return the id of its process."""
    guard = os.getpid()
    command = os.fork()
    if command:
        return command
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.setsid()
        die_with(guard)
        os.chdir(folder)
        # Whoever answers its requests, and whoever kills it, go first.
        os.nice(_NICENESS)
        _bound_what_it_takes()
        # Python ignores them, and a program would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    finally:
        # A shell's status of a command that cannot be started.
        os._exit(127)


def _bound_what_it_takes() -> None:
    """Bound what this process, and those that it starts, may take of the machine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most > _MOST_FILES:
        most = _MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where memory is short it goes first. A file system may be read-only.
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, b"1000")
        os.close(file)


def _go_first() -> None:
    """Get the processor before all others, if that is allowed.

    Many processes that fork would get it far more often than whoever kills them.
    """
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(1))


def _watch(
    connection: int,
    wake: int,
    command: int,
    tails: list[_Tail],
    count: _ProcessCount,
) -> tuple[str, int]:
    """Wait until everything is to be killed.

    Returns:
        Why, and the wait status of the command; 0 if it has not ended.
    """
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.register(wake, select.POLLIN)
    for tail in tails:
        poller.register(tail.descriptor, select.POLLIN)
    # Waits for the end of the connection, of any child, and for output, all of which it
    # consumes; ends with the connection, the command, or too many processes.
    while True:
        events = dict(poller.poll(1000 * _LOOK_S))
        for tail in tails:
            if tail.descriptor not in events:
                continue
            if tail.read():
                time.sleep(_REST_S)
            else:
                poller.unregister(tail.descriptor)
        if connection in events:
            return HUNG_UP, 0
        if wake in events:
            os.read(wake, 4096)
        status = reap_the_dead(command, _REAPED)
        if status is not None:
            return ENDED, status
        if count.is_exceeded():
            return TOO_MANY, 0


class _Tail:
    """The last bytes that come out of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = 0
        """How many bytes have come."""
        self.data = b""
        """The last ones of them, `MOST_OUTPUT_BYTES` at most."""

    def read(self) -> bool:
        """Read some bytes; return whether more may come."""
        data = os.read(self.descriptor, _READ_BYTES)
        self.num_bytes += len(data)
        self.data = (self.data + data)[-MOST_OUTPUT_BYTES:]
        return bool(data)

    def read_rest(self) -> None:
        """Read what the pipe holds."""
        os.set_blocking(self.descriptor, False)
        last = self.num_bytes + _MOST_PIPE_BYTES
        # What may not be killed may still write.
        with contextlib.suppress(BlockingIOError):
            while self.num_bytes < last and self.read():
                pass


class _ProcessCount:
    """A count of descendants that costs little while there are few.

    To count them takes a look at each process of the machine. The system says at once
    how many threads there are on it, so they are counted when that number has grown by
    much, and now and then in any case.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._file = os.open("/proc/loadavg", os.O_RDONLY)
        self._others: set[int] = set()
        self._least_threads = self._num_threads()
        self._next_look_s = 0.0
        self._next_count_s = time.monotonic() + _COUNT_S

    def is_exceeded(self) -> bool:
        """Return whether there are more descendants than there may be."""
        now = time.monotonic()
        if now < self._next_look_s:
            return False
        self._next_look_s = now + _LOOK_S
        threads = self._num_threads()
        self._least_threads = min(threads, self._least_threads)
        has_grown = threads - self._least_threads > _MUCH * self._most
        if not has_grown and now < self._next_count_s:
            return False
        if not has_grown:
            # An id may be another process's by now.
            self._others.clear()
        self._least_threads = threads
        self._next_count_s = now + _COUNT_S
        return len(_descendants(self._others)) > self._most

    def _num_threads(self) -> int:
        """Return how many threads there are on the machine."""
        return int(os.pread(self._file, 100, 0).split()[3].partition(b"/")[2])


# ------------------------------------------------------------------- descendants


def adopt_orphans() -> None:
    """Become the parent of each descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Let this process be killed when its parent ends.

    Args:
        parent: Id of the parent at the time of the fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the line above, which would then never fire.
    if os.getppid() != parent:
        os._exit(1)


def wake_on_child_exit() -> int:
    """Return a pipe that gets a byte whenever a child exits."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # Without a handler no byte is written to the pipe.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def reap_the_dead(worker: int, most: int = sys.maxsize) -> int | None:
    """Reap every child that has exited.

    Args:
        most: How many are reaped at most: some die faster than that.

    Returns:
        The wait status of the worker, if it was among them.
    """
    status = None
    # Ends at a child that still runs, or with ChildProcessError without any children.
    with contextlib.suppress(ChildProcessError):
        for _ in range(most):
            pid, child_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == worker:
                status = child_status
    return status


def kill_descendants() -> list[int]:
    """Kill all descendants of a process that adopts orphans, and wait for their ends.

    Process groups are killed as a whole, so that none of their processes forks
    meanwhile. A descendant without the session of this process is in a group of
    descendants alone.

    Returns:
        Ids of those that may not be killed, since they have another account.
    """
    others: set[int] = set()
    known: set[int] = set()
    pause_s = 0.001
    # Each round kills those that are there; it ends without any child, or with none
    # that may be killed.
    while _has_children():
        groups = _descendants(others)
        refused = _kill(groups)
        if groups and len(refused) == len(groups):
            return refused
        if not groups:
            # An id may be another process's by now.
            others.clear()
        # Those that fork and open sessions are only caught without a pause.
        if groups.keys() <= known:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        known |= groups.keys()
    return []


def kill_marked(mark: str) -> list[int]:
    """Kill all processes that have a text in their environment, whose guard is lost.

    Args:
        mark: The text. What has emptied its environment is not known by it.

    Returns:
        Ids of those that are still there.
    """
    until_s = time.monotonic() + _MARKED_S
    # Each round kills those that are there; it ends without any, or at the deadline.
    while groups := _marked(mark.encode()):
        refused = _kill(groups)
        if len(refused) == len(groups) or time.monotonic() > until_s:
            return list(groups)
        # Others run in this process.
        time.sleep(0.005)
    return []


def _marked(mark: bytes) -> dict[int, int]:
    """Return the process group of each process that has a text in its environment."""
    groups = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (as above)
        # Others' may not be read, and a process may exit while its is.
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                    if mark in file.read():
                        groups[int(name)] = os.getpgid(int(name))
    return groups


def _kill(groups: dict[int, int]) -> list[int]:
    """Kill processes with their groups; return those of which none may be killed.

    Args:
        groups: The group of each process.
    """
    refused = set()
    own = os.getpgrp()
    for target in {-pid if group == own else group for pid, group in groups.items()}:
        try:
            if target < 0:
                os.kill(-target, signal.SIGKILL)
            else:
                os.killpg(target, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            refused.add(abs(target))
    return [
        pid for pid, group in groups.items() if not {pid, group}.isdisjoint(refused)
    ]


def remove_folder(folder: str) -> None:
    """Remove a folder as far as that is allowed, however deep it is."""
    # Most hold nothing but files.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208
            os.unlink(f"{folder}/{name}")  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106
        return
    remove = ["rm", "-rf", "--", folder]
    os.spawnv(os.P_WAIT, "/bin/rm", remove)
    if os.path.lexists(folder):
        os.spawnv(os.P_WAIT, "/bin/chmod", ["chmod", "-R", "u+rwx", "--", folder])
        os.spawnv(os.P_WAIT, "/bin/rm", remove)


def _has_children() -> bool:
    """Reap some children that are dead; return whether there are others."""
    with contextlib.suppress(ChildProcessError):
        for _ in range(_REAPED):
            if not os.waitpid(-1, os.WNOHANG)[0]:
                break
        return True
    return False


def _descendants(others: set[int]) -> dict[int, int]:
    """Return the process group of each descendant that lives, by its id.

    Args:
        others: Ids that are none of descendants, which are not looked at; those that
            are seen now are added.
    """
    groups: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (an import of 10 ms)
        if not name.isdigit() or int(name) in others:
            continue
        # A process may exit while its entry is read.
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                stat = file.read()
            # "pid (name) state parent group ...", where the name may hold spaces and
            # parentheses
            state, parent, group = stat.rpartition(b")")[2].split()[:3]
            children.setdefault(int(parent), []).append(int(name))
            if state not in (b"Z", b"X"):
                groups[int(name)] = int(group)

    reached = [os.getpid()]
    # Grows by the children of each process in it.
    for pid in reached:
        reached += children.get(pid, [])
    own = set(reached[1:])
    others |= {pid for pid in groups if pid not in own}
    return {pid: group for pid, group in groups.items() if pid in own}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
