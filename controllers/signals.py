"""Ctrl-C, SIGTERM and `ray job stop` as one exception.

Invariant: the first signal raises `Interrupted` in the main thread, so that `finally` clauses give everything back; a
second one ends the process at once. Where the first arrives within one of Ray's compiled calls, its exception may be
swallowed, and with it half of what the call was doing: so the signal is remembered, and what fails after it is a stop.
Deliberately not here: what there is to give back.
"""

from __future__ import annotations

import signal
from types import FrameType

from verl_ray.errors import Interrupted

_STOPS = (signal.SIGINT, signal.SIGTERM)
_received: list[signal.Signals] = []


def stop_on_signals() -> None:
    """Turn the next SIGINT or SIGTERM into `Interrupted`.

    Call it again after `ray.init`, which installs a handler of its own that exits without a message.
    """
    heed_signals()
    for number in _STOPS:
        signal.signal(number, _interrupt)


def heed_signals() -> None:
    """Raise `Interrupted` if a signal came, whatever became of its exception."""
    if _received:
        raise Interrupted(f"stopped by {_received[0].name}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_DFL)
    heed_signals()
