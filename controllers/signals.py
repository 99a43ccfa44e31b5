"""Ctrl-C, SIGTERM and `ray job stop` as one exception.

Invariant: the first signal raises `Interrupted` in the main thread, so that `finally` clauses give everything back; a
second one ends the process at once. Deliberately not here: what there is to give back.
"""

from __future__ import annotations

import signal
from types import FrameType

from verl_ray.errors import Interrupted

_STOPS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> None:
    """Turn the next SIGINT or SIGTERM into `Interrupted`.

    Call it again after `ray.init`, which installs a handler of its own that exits without a message.
    """
    for number in _STOPS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_DFL)
    raise Interrupted(f"stopped by {signal.Signals(number).name}")
