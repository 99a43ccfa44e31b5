"""The signals that arrived, and how they are obeyed: the state behind `signals.py`.

Invariant: each value is written at once, so any thread may read it at any moment.
Deliberately not here: handlers, announcements and waits (`signals.py`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


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
    """

    committed_at: float | None = None


class SignalState:
    """The signals that arrived, and how they are obeyed.

    The main thread and the announcer thread write it, one value at a time.

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


signal_state = SignalState()
