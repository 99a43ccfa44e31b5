"""Signals that stop a run, and outputs that may close: the end of a process is orderly.

Signals are Ctrl-C, SIGTERM and the end of a terminal (SIGHUP).

There are two ways to obey. By default, a signal raises `Interrupted` wherever the main
thread is, so code that knows nothing of signals ends too. But Ray's compiled calls
swallow such an exception, or turn it into another one when half of their work is done.
Code with calls in flight therefore only records the signal (`deferring_signals`), and
its waits ask for it (`heed_signals`).

Invariant: the effect of the first signal is announced on stderr within a second,
whatever the main thread is doing. Every wait ends with `Interrupted` unless it waits
for something that has to be finished. A second signal ends the process at once; in a
process of somebody else (`borrowing_signals`) it ends what has to be finished, too.
Signals within a second of the first one belong to it: `timeout` signals its child, and
then the child's process group. The text of the announcement is the run's
(`controllers/run/stopping.py`). An output that nobody reads any more never ends the
process, and neither does one that a disk does not take.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from verl_ray.errors import Interrupted

T = TypeVar("T")

# Signals within this time of the first one belong to it.
_ONE_SIGNAL_S = 1.0

# Longest time that the final output may take after a second signal.
_FINAL_OUTPUT_S = 0.5

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outlook:
    """Effect of a signal on the run.

    Attributes:
        next: What happens after the first signal.
        lost: What a second signal loses; empty for nothing.
    """

    next: str
    lost: str


NOTHING_AT_STAKE = Outlook("stopping", "")


@dataclass(eq=False)
class AtomicWork:
    """Work that a stop either abandons or lets finish.

    Attributes:
        committed_at: Time at which it passed its point of no return, in seconds of the
            monotonic clock. None while it can still be abandoned.
        can_be_redone: Returns whether it can be made again from a state that is kept.
    """

    committed_at: float | None = None
    can_be_redone: Callable[[], bool] = lambda: False


class _State:
    """The signals that arrived, and how they are obeyed.

    The main thread and the announcer thread write it, one value at a time, so any
    thread may read it at any moment.

    Attributes:
        received: First signal that arrived.
        announced_at: Time of its announcement, in seconds of the monotonic clock.
        announced: Set after the announcement.
        disturbed: True once a signal raised an exception wherever the main thread was.
        borrowing: True within `borrowing_signals`, where the process must not end.
        insisted: True once a second signal arrived there.
        deferring: Number of open blocks in which a signal is only recorded.
        finishing: Number of open blocks that have to be finished first.
        work: The innermost open `all_or_nothing`.
        outlook: Function that returns the present outlook.
        way_on: Function that returns what to do after a second signal, in words.
        announcer: Thread that announces signals.
        handles_forks: True once forked children reset their state.
    """

    received: signal.Signals | None = None
    announced_at: float | None = None
    announced = threading.Event()
    disturbed = False
    borrowing = False
    insisted = False
    deferring = 0
    finishing = 0
    work: AtomicWork | None = None
    outlook: Callable[[], Outlook] = staticmethod(lambda: NOTHING_AT_STAKE)
    way_on: Callable[[], str] = staticmethod(lambda: "")
    announcer: threading.Thread | None = None
    handles_forks = False


_state = _State()


# -------------------------------------------------------------------- for every program


def stop_on_signals() -> None:
    """Obey SIGINT, SIGTERM and SIGHUP from now on.

    SIGHUP is not obeyed where it is ignored, as under `nohup`. Call the function again
    after `ray.init`, which installs a handler that exits without a message. Python
    handles signals in the main thread alone, so in any other one nothing is done.
    """
    heed_signals()
    if threading.current_thread() is not threading.main_thread():
        return

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_signal)
    if _state.announcer is None:
        _start_announcer()


@contextlib.contextmanager
def borrowing_signals() -> Iterator[None]:
    """Obey signals within the block, in a process that belongs to somebody else.

    All is then as it was before: the handlers, and no signal is remembered. SIGTERM and
    SIGHUP are then sent again, to whoever handled them before. A second signal does not
    end the process: waits end although something had to be finished. In a thread that
    is not the main one, no signal is obeyed.

    Raises:
        Interrupted: A signal arrived, and nothing in the block has heeded it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    assert _state.announcer is None, "no other block obeys signals already"
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    # Only the call says which descriptor was set.
    descriptor = signal.set_wakeup_fd(-1)
    _state.borrowing = True
    stop_on_signals()
    announcer = _state.announcer
    assert announcer is not None
    try:
        yield
        heed_signals()
    finally:
        for number, handler in handlers.items():
            # A handler that was not installed by Python is unknown to it.
            if handler is not None:
                signal.signal(number, handler)
        # The announcer ends with its input.
        os.close(signal.set_wakeup_fd(descriptor))
        announcer.join(_ONE_SIGNAL_S)
        _state.borrowing = False
        received = _state.received
        _forget()
        # Whoever ends the process wants more than the end of this block.
        if received not in (None, signal.SIGINT):
            signal.raise_signal(received)


def was_disturbed() -> bool:
    """Whether a signal raised an exception wherever the main thread was.

    Any error after that may be a consequence of it.
    """
    return _state.disturbed


def stoppable(work: Callable[[], T]) -> T:
    """Do the work, and turn a failure that a signal caused into a stop.

    A signal raises an exception in the middle of something. Compiled calls of Ray
    swallow it or turn it into others, so what fails afterwards is part of the stop.
    """
    try:
        return work()
    except Exception:
        if _state.disturbed:
            heed_signals()
        raise


def _start_announcer() -> None:
    if not _state.handles_forks:
        os.register_at_fork(after_in_child=_reset_in_child)
        _state.handles_forks = True
    remember_terminals()

    # The interpreter's own handler writes the number of each signal to the pipe in the
    # moment in which it arrives. The main thread comes to `_on_signal` only when it
    # returns from compiled code.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    _state.announcer = threading.Thread(
        target=_announce_all, args=(reading,), name="signals", daemon=True
    )
    _state.announcer.start()


def heed_signals() -> None:
    """Raise `Interrupted` if a signal arrived, unless work has to be finished first.

    Every wait calls this function.
    """
    if _state.received is None:
        return
    if _state.insisted or not _state.finishing:
        raise Interrupted(f"stopped by {_state.received.name}")


def give_up_work() -> None:
    """Raise `Interrupted` if a signal arrived and the innermost work can be redone.

    It is for work that has to be finished first, and cannot be for now.
    """
    work = _state.work
    if _state.received is not None and work is not None and work.can_be_redone():
        raise Interrupted(f"stopped by {_state.received.name}")


def stop_requested() -> bool:
    """Whether a signal arrived that is obeyed now or later."""
    return _state.received is not None


# ----------------------------------------------------------- for code with work in hand


@contextlib.contextmanager
def deferring_signals() -> Iterator[None]:
    """Keep signals from raising within the block; its waits heed them instead.

    It is for blocks with calls in flight.
    """
    _state.deferring += 1
    try:
        yield
    finally:
        _state.deferring -= 1


@contextlib.contextmanager
def raising_signals() -> Iterator[None]:
    """Let signals raise within the block, although it is within `deferring_signals`.

    It is for a library that waits and knows nothing of signals, while no call is in
    flight. An error of the library that a signal caused is raised as `Interrupted`.
    """
    heed_signals()
    outer = _state.deferring
    _state.deferring = 0
    try:
        yield
    except Exception:
        heed_signals()
        raise
    finally:
        _state.deferring = outer
    heed_signals()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Keep waits within the block from ending with `Interrupted`.

    It is for work of which half would be worse than all.
    """
    _state.finishing += 1
    try:
        yield
    finally:
        _state.finishing -= 1


@contextlib.contextmanager
def all_or_nothing() -> Iterator[AtomicWork]:
    """Let a stop abandon the block before its point of no return, and not after it.

    The block passes that point when it calls `pass_point_of_no_return`.
    """
    outer = _state.work
    work = AtomicWork()
    _state.work = work
    try:
        yield work
    finally:
        _state.work = outer
        if work.committed_at is not None:
            _state.finishing -= 1


def pass_point_of_no_return() -> None:
    """Make a stop wait for the end of the innermost `all_or_nothing` from now on.

    Without an open `all_or_nothing` the function only heeds signals.
    """
    heed_signals()
    work = _state.work
    if work is not None and work.committed_at is None:
        work.committed_at = time.monotonic()
        _state.finishing += 1


@contextlib.contextmanager
def announcing(outlook: Callable[[], Outlook]) -> Iterator[None]:
    """Announce signals within the block by what `outlook` returns at that moment.

    Another thread calls `outlook`. After a signal it remains in use until the process
    ends, to announce what a second signal loses.
    """
    outer = _state.outlook
    _state.outlook = outlook
    try:
        yield
    finally:
        if _state.received is None:
            _state.outlook = outer


@contextlib.contextmanager
def pointing(way_on: Callable[[], str]) -> Iterator[None]:
    """Print what `way_on` returns where a second signal ends the process in the block.

    Another thread calls `way_on`, which may look at the disk.
    """
    outer = _state.way_on
    _state.way_on = way_on
    try:
        yield
    finally:
        _state.way_on = outer


# ------------------------------------------------------------------------ announcements


def _on_signal(number: int, frame: FrameType | None) -> None:
    is_first = _state.received is None
    if is_first:
        _state.received = signal.Signals(number)
        # The announcement comes on the screen before anything that the signal causes.
        if _state.announcer is not None:
            _state.announced.wait(_ONE_SIGNAL_S)

    if is_first and not _state.deferring and not _state.finishing:
        _state.disturbed = True
        heed_signals()


def _announce_all(reading: int) -> None:
    # Consumes the numbers of the signals that arrive. Waits for the next one. Ends with
    # the process, or when the other end of the pipe is closed.
    while numbers := os.read(reading, 1):
        # Other signals may be handled in Python as well; some of them have no name.
        with contextlib.suppress(ValueError):
            _announce(signal.Signals(numbers[0]))
    os.close(reading)


def _announce(number: signal.Signals) -> None:
    if number not in _STOPPING:
        return

    leave_closed_outputs()
    now = time.monotonic()
    outlook = _state.outlook()
    if _state.announced_at is None:
        _state.announced_at = now
        _announce_first(number, outlook)
        _state.announced.set()
    elif now - _state.announced_at < _ONE_SIGNAL_S:
        return
    elif _state.borrowing:
        _state.insisted = True
    else:
        _exit_at_once(number, outlook)


def _announce_first(number: signal.Signals, outlook: Outlook) -> None:
    loss = ""
    if outlook.lost:
        loss = f" and loses {outlook.lost}"
    # The reader of stderr may have exited.
    with contextlib.suppress(OSError, ValueError):
        print(
            f"{number.name}: {outlook.next}. Another one ends it at once{loss}",
            file=sys.stderr,
            flush=True,
        )


def _exit_at_once(number: signal.Signals, outlook: Outlook) -> None:
    loss = "nothing is lost"
    if outlook.lost:
        loss = f"lost: {outlook.lost}"
    # Nothing may delay the exit, so this does not use `sys.stderr` and its lock.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{number.name} again: ended at once, {loss}\n".encode())
        # A disk that hangs must not hold the process.
        speaker = threading.Thread(target=_print_way_on, daemon=True)
        speaker.start()
        speaker.join(_FINAL_OUTPUT_S)
    os._exit(Interrupted.exit_code)


def _print_way_on() -> None:
    # The current folder may be gone.
    with contextlib.suppress(OSError):
        if words := _state.way_on():
            os.write(2, f"{words}\n".encode())


def _reset_in_child() -> None:
    """Forget the parent's signals and its announcer in a forked child."""
    if _state.announcer is not None:
        signal.set_wakeup_fd(-1)
        _forget()


def _forget() -> None:
    """Forget the signals that arrived, and the announcer."""
    if _state.received is not None:
        _state.outlook = lambda: NOTHING_AT_STAKE
    _state.announcer = None
    _state.received = None
    _state.announced_at = None
    _state.announced = threading.Event()
    _state.disturbed = False
    _state.insisted = False


# ------------------------------------------------------------------- outputs that close

_STDOUT = 1
_STDERR = 2

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_terminals: tuple[int, ...] = ()
"""Descriptors that were terminals when `remember_terminals` was called."""


class _Output(io.BufferedWriter):
    """A buffer whose writes do not fail with its disk; it says later what was lost.

    What waits in the buffer is written as soon as the disk has room again. The buffer
    takes data and records what it gave the file in C, where no handler of a signal can
    run in between: one that raises there would let a line be written twice.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self._lost_bytes = 0

    def write(self, data: Any) -> int:
        """Take bytes; return how many are taken or lost."""
        size = memoryview(data).nbytes
        try:
            if self._lost_bytes:
                note = f"[{self._lost_bytes} bytes of output did not fit on the disk]\n"
                super().write(note.encode())
                self._lost_bytes = 0
            super().write(data)
        except OSError as error:
            _leave_disks(error)
            self._lost_bytes += size
        return size

    def flush(self) -> None:
        """Give the file what it takes now."""
        try:
            super().flush()
        except OSError as error:
            _leave_disks(error)


def _leave_disks(error: OSError) -> None:
    if error.errno not in _DISK_ERRORS:
        raise error


def outlast_full_disks() -> None:
    """Let no print of this process fail because the disk of its output is full.

    The output of a run often goes to a file beside what the run writes. Streams that
    somebody else has put in place stay as they are.
    """
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or stream is None:
            continue
        stream.flush()
        # PYTHONUNBUFFERED asks for the second.
        is_prompt = stream.line_buffering or stream.write_through
        output = io.TextIOWrapper(
            _Output(descriptor),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=is_prompt or descriptor == _STDERR,
        )
        setattr(sys, name, output)


def remember_terminals() -> None:
    """Remember which of stdout and stderr are terminals now."""
    global _terminals
    _terminals = tuple(
        descriptor for descriptor in (_STDOUT, _STDERR) if os.isatty(descriptor)
    )


def leave_closed_outputs() -> None:
    """Send output to nowhere if its terminal has closed or its reader has exited.

    Such a reader is the `tee` that Ctrl-C ended as well. An error of a print would end
    the work that has to be finished.
    """
    global _terminals
    closed = [
        descriptor
        for descriptor in (_STDOUT, _STDERR)
        if descriptor not in _terminals and _is_pipe_without_reader(descriptor)
    ]
    closed += [descriptor for descriptor in _terminals if not os.isatty(descriptor)]
    if not closed:
        return

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in closed:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    _terminals = tuple(set(_terminals) - set(closed))


def print_error(message: str) -> None:
    """Print to stderr, where signals are answered, even if nobody reads it any more."""
    leave_closed_outputs()
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _is_pipe_without_reader(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            # A poll for no event still reports errors, and returns at once.
            poll = select.poll()
            poll.register(descriptor, 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
