"""Ctrl-C, SIGTERM and a terminal that closes: answered at once, obeyed where nothing is lost by it.

Invariant: the first signal is answered on stderr within a second, whatever the main thread is doing, and every wait
ends with `Interrupted` unless what it waits for has to be finished. A second one ends the process at once. Signals
within a second of the first one are the first one: `timeout` signals its child, and then the child's process group.

There are two ways to obey. Left to itself, a signal raises `Interrupted` wherever the main thread is, so that also
what knows nothing of signals ends. But Ray's compiled calls swallow such an exception, or turn it into another one
when half of their work is done. So whoever has calls in flight only notes the signal (`noting`), and its waits ask
for it (`heed_signals`). Deliberately not here: what is saved, and what the answer says (`controllers/run/stopping.py`).
"""

from __future__ import annotations

import contextlib
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

from verl_ray.errors import Interrupted

_ONE_SIGNAL_S = 1.0


@dataclass(frozen=True)
class Outlook:
    """What a signal brings: what happens after the first one, and what a second one loses."""

    next: str
    lost: str


NOTHING_AT_STAKE = Outlook("stopping", "")


class _State:
    """What came and how it is obeyed. Written by the main thread and by the one that answers; one value at a time."""

    received: signal.Signals | None = None
    answered_at: float | None = None  # monotonic clock
    answered = threading.Event()
    disturbed = False  # an exception was raised wherever the main thread was
    noting = 0  # how many blocks say that a signal is only noted
    finishing = 0  # how many blocks have to be finished first
    work: Work | None = None
    outlook: Callable[[], Outlook] = staticmethod(lambda: NOTHING_AT_STAKE)
    answering: threading.Thread | None = None
    knows_forks = False
    terminals: tuple[int, ...] = ()


_state = _State()


# ------------------------------------------------------------------------------------------------------ for all


def stop_on_signals() -> None:
    """Obey SIGINT, SIGTERM and SIGHUP from here on; the latter not where it is ignored, as under `nohup`.

    Call it again after `ray.init`, which installs a handler of its own that exits without a message. From the main
    thread.
    """
    heed_signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _note)
    if _state.answering is None:
        if not _state.knows_forks:
            os.register_at_fork(after_in_child=_begin_anew)
            _state.knows_forks = True
        _state.terminals = tuple(descriptor for descriptor in (1, 2) if os.isatty(descriptor))
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # The interpreter's own handler writes the number of each signal there, in the moment in which it arrives; the
        # main thread comes to `_note` only when it is back from compiled code.
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        _state.answering = threading.Thread(target=_answer_all, args=(reading,), name="signals", daemon=True)
        _state.answering.start()


def heed_signals() -> None:
    """Raise `Interrupted` if a signal came, unless something has to be finished first. Every wait calls it."""
    if _state.received is not None and not _state.finishing:
        raise Interrupted(f"stopped by {_state.received.name}")


def stop_requested() -> bool:
    """Whether a signal came that is obeyed, or will be."""
    return _state.received is not None


def was_disturbed() -> bool:
    """Whether a signal raised an exception wherever the main thread was: any error after it may be its doing."""
    return _state.disturbed


# ------------------------------------------------------------------------------------ for whoever has work in hand


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Inside, a signal raises nothing by itself; the waits inside heed it. For blocks with calls in flight."""
    _state.noting += 1
    try:
        yield
    finally:
        _state.noting -= 1


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Inside, although within `noting`, a signal raises wherever the main thread is. For a library that waits and knows
    nothing of signals, while no call is in flight. An error of that library which the signal caused is `Interrupted`.
    """
    heed_signals()
    outer, _state.noting = _state.noting, 0
    try:
        yield
    except Exception:
        heed_signals()
        raise
    finally:
        _state.noting = outer
    heed_signals()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Inside, no wait is given up: half of this would be worse than all of it."""
    _state.finishing += 1
    try:
        yield
    finally:
        _state.finishing -= 1


@dataclass(eq=False)
class Work:
    """Work that a stop gives up or lets finish."""

    since: float | None = None
    """When there was no way back (monotonic clock); None = it can still be given up."""


@contextlib.contextmanager
def all_or_nothing() -> Iterator[Work]:
    """Work that a stop gives up until `no_way_back` is called within it, and from then on lets finish."""
    outer = _state.work
    _state.work = work = Work()
    try:
        yield work
    finally:
        _state.work = outer
        if work.since is not None:
            _state.finishing -= 1


def no_way_back() -> None:
    """From here on a stop waits for the end of the `all_or_nothing` that this is in; without one it has no effect."""
    heed_signals()
    work = _state.work
    if work is not None and work.since is None:
        work.since = time.monotonic()
        _state.finishing += 1


@contextlib.contextmanager
def telling(outlook: Callable[[], Outlook]) -> Iterator[None]:
    """Inside, signals are answered with what `outlook` says at that moment; it is called from another thread. After a
    signal it goes on to say what a second one loses, until the process ends."""
    outer = _state.outlook
    _state.outlook = outlook
    try:
        yield
    finally:
        if _state.received is None:
            _state.outlook = outer


# ---------------------------------------------------------------------------------------------------- the answers


def _note(number: int, frame: FrameType | None) -> None:
    first = _state.received is None
    _state.received = _state.received or signal.Signals(number)
    if first and _state.answering is not None:
        _state.answered.wait(_ONE_SIGNAL_S)  # what happens next is not on the screen before its announcement
    if first and not _state.noting and not _state.finishing:
        _state.disturbed = True
        heed_signals()


def _answer_all(reading: int) -> None:
    # Consumes the numbers of the signals that arrive; waits for the next one; ends with the process.
    while numbers := os.read(reading, 1):
        with contextlib.suppress(ValueError):  # another signal that somebody handles in Python
            _answer(signal.Signals(numbers[0]))


def _answer(number: signal.Signals) -> None:
    if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return
    leave_closed_outputs()
    now = time.monotonic()
    outlook = _state.outlook()
    if _state.answered_at is None:
        _state.answered_at = now
        loses = f" and loses {outlook.lost}" if outlook.lost else ""
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            print(f"{number.name}: {outlook.next}. Another one ends it at once{loses}", file=sys.stderr, flush=True)
        _state.answered.set()
    elif now - _state.answered_at >= _ONE_SIGNAL_S:
        lost = f"lost: {outlook.lost}" if outlook.lost else "nothing is lost"
        with contextlib.suppress(OSError):
            os.write(2, f"\n{number.name} again: ended at once, {lost}\n".encode())
        os._exit(Interrupted.exit_code)


def _begin_anew() -> None:
    """In a forked child: what is sent to it is not an answer's business in its parent."""
    if _state.answering is not None:
        signal.set_wakeup_fd(-1)
        _state.answering = _state.received = _state.answered_at = None
        _state.answered = threading.Event()


def leave_closed_outputs() -> None:
    """Send to nowhere what is printed to a terminal that has closed, or to a program that has gone, such as the `tee`
    that Ctrl-C ended, too: an error would end what has to be finished."""
    gone = [descriptor for descriptor in (1, 2) if descriptor not in _state.terminals and _reader_has_gone(descriptor)]
    closed = gone + [descriptor for descriptor in _state.terminals if not os.isatty(descriptor)]
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        _state.terminals = tuple(set(_state.terminals) - set(closed))


def _reader_has_gone(descriptor: int) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            poll = select.poll()
            poll.register(descriptor, 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
